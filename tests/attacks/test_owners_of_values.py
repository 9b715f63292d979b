"""Whose a value is: what gather brought, what has a meaning, and what ranks have changed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.notebook.front_end import Notebook, body

pytestmark = pytest.mark.shared_world


@pytest.fixture(scope="module")
def two() -> Iterator[Notebook]:
    """A notebook with two workers."""
    notebook = Notebook("%load_ext nbdist", "import torch", "%%distributed -n 2\npass")
    yield notebook
    notebook.close()


# --- what was gathered ----------------------------------------------------------------------------


def test_what_gather_binds_stays_here(two: Notebook) -> None:
    """Under any name, from an expression, of one rank or of all: cells use the ranks' own."""
    two.run(
        "%%distributed\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n"
        "model = DDP(torch.nn.Linear(2, 1)); acc = torch.tensor(0.5 + rank); x = torch.ones(2)"
    )
    for line in (
        "model.module --as model --rank 0",
        "acc.item() --as acc",
        "x --stack",
        "float(rank) --rank 1 --as top",
    ):
        assert two.run(f"%dist_gather {line}").errors == [], line
    kinds = "type(model).__name__, type(acc).__name__, tuple(x.shape), 'top' in globals()"
    assert two.value(kinds) == ("Linear", "list", (2, 2), True)
    ran = two.run(f"%%distributed\n{kinds}")
    assert body(ran)[1:] == ["('DistributedDataParallel', 'Tensor', (2,), False)"]
    two.run("top = top")
    assert two.run("%%distributed\ntop").errors == []


def test_what_was_gathered_does_not_outlive_its_ranks(two: Notebook) -> None:
    """After a restart the name is not defined there, and the error says why, and what sends it."""
    two.run("%%distributed\nloss = rank / 2")
    two.run("%dist_gather loss")
    two.run("%dist_restart")
    said = two.run("%%distributed\nprint(loss)").errors[0]["evalue"]
    why = "`loss` was gathered from the ranks, so it is not sent by itself; "
    assert said.endswith(f"{why}`%dist_push loss` sends it.")
    assert two.run("%%distributed --pool other -n 1\nloss").errors != []
    two.run("%dist_push loss")
    assert body(two.run("%%distributed\nloss"))[1:] == ["[0.0, 0.5]"]


# --- names with a meaning -------------------------------------------------------------------------


def test_names_with_a_meaning_are_safe(two: Notebook) -> None:
    """Whatever the notebook binds or gathers under them, and wherever it says to send it."""
    two.run("%dist_gather rank")
    two.run("dist, device = 3, 'cuda:7'")
    ran = two.run("%%distributed\nrank, dist.get_rank(), str(device)")
    assert "(0, 0, 'cpu')" in ran.text
    assert "(1, 1, 'cpu')" in ran.text
    assert two.value("rank") == [0, 1]
    for line in ("%dist_push rank", "%dist_sync device --from 0", "%dist_scatter rank"):
        command = line.partition(" ")[0]
        said = f"UsageError: `{command}`: each worker has its own `"
        assert two.run(line).error.startswith(said), line
    assert two.run("del device, dist").errors == []
