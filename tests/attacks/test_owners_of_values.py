"""Owners of values: gathered values, names of a worker's own, and values that ranks changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.notebook.front_end import Notebook, body, lasting

pytestmark = [pytest.mark.shared_world, pytest.mark.kernel]


two = lasting("%load_ext nbdist", "import torch", "%%distributed -n 2\npass", may_have_torch=True)


def test_gathered_values_stay_in_the_notebook(two: Notebook) -> None:
    """Cells use the ranks' own values, not gathered ones; after a restart an error says why."""
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
    assert "`top` was gathered from the ranks" in two.run("%%distributed\ntop").error
    two.run("top = top")
    assert two.run("%%distributed\ntop").errors == []
    two.run("%%distributed\ndef uses(): return later")
    two.run("later = 1")
    said = "The notebook has `later`, which the cell does not name; `%dist_push later` sends it."
    assert two.run("%%distributed\nuses()").error.endswith(said)
    two.run("%dist_restart")
    said = two.run("%%distributed\nprint(acc)").errors[0]["evalue"]
    why = "`acc` was gathered from the ranks, so it is not sent by itself; "
    assert said.endswith(f"{why}`%dist_push acc` sends it.")
    assert two.run("%%distributed --pool other -n 1\nacc").errors != []
    two.run("%dist_push acc")
    assert body(two.run("%%distributed\nacc"))[1:] == ["[0.5, 1.5]"]


def test_rebinding_a_workers_own_name_gives_a_line(two: Notebook) -> None:
    """A cell that changes a worker's own name gets a line, once; no command changes such a name."""
    for line in ("%dist_push rank", "%dist_sync device --from 0", "%dist_scatter rank"):
        said = f"UsageError: `{line.partition(' ')[0]}`: each worker has its own `"
        assert two.run(f"rank = 3\n{line}").error.startswith(said), line
    same = "import torch, torch.distributed as dist; rank = int(str(rank)); device = str(device)"
    assert "gave it" not in two.run(f"%%distributed\n{same}").text
    told = "`rank` was each worker's own; this cell gave it another value on "
    loop = "%%distributed\nfor rank in range(2): pass"
    assert f"{told}rank 0" in two.run(loop).text
    assert told not in two.run(loop).text
    assert "`dist` was torch.distributed; this cell" in two.run("%%distributed\ndist = 3").text
    two.run("%dist_restart")
    assert f"{told}ranks 0-1" in two.run("%%distributed\nrank = 5").text
    two.run("%dist_restart")


def test_a_deleted_own_name_returns_in_the_next_cell(two: Notebook) -> None:
    """A deleted name of a worker's own returns in the next cell; no hint offers to send it."""
    two.run("rank, dist = 3, 4")
    assert two.run("%%distributed\ndel rank, dist").errors == []
    assert two.run("%%distributed\nprint(dist.get_rank() == rank)").errors == []
    (error,) = two.run("%%distributed\ndel rank\nprint(rank)").errors
    assert "The notebook has" not in error["evalue"]
    two.run("del rank, dist")


def test_hints_never_destroy(two: Notebook) -> None:
    """After a restart hints name the rank that has a variable; losses are listed by importance."""
    two.run(
        "%%distributed\na, b, c, d, e, f, g = range(7); import os; pid = os.getpid()\n"
        "net = torch.nn.Linear(1, 1); opt = torch.optim.SGD(net.parameters()); x = torch.ones(1)"
    )
    two.run("pid = 0")
    two.run("del pid")
    restarted = two.run("%dist_restart -r 1").text
    assert "(net, opt, x, a, b, c and 5 more)" in restarted
    said = two.run("%%distributed\nprint(net)").errors[0]["evalue"]
    assert said.endswith("Rank 0 has `net`: `%dist_sync net --from 0`.")
    two.run("x = 3")
    assert two.run("%dist_sync net opt x --from 0").errors == []
    assert two.run("%%distributed\nnet, opt, x").errors == []


STEP = "model(torch.ones(2)).sum().backward(); opt.step(); opt.zero_grad()"


def test_values_that_ranks_changed_are_never_overwritten(two: Notebook) -> None:
    """A part that both sides have changed stays the ranks'; other parts follow the notebook."""
    two.run(
        "import numpy as np\nclass Box: items = None\n"
        "model = torch.nn.Linear(2, 1); opt = torch.optim.Adam(model.parameters(), lr=.5)\n"
        "array = np.zeros(3); rows = [1]; table = {}; box = Box(); box.items = []; same = [0]\n"
        "big = torch.zeros(3_000_000)"
    )
    two.run(
        f"%%distributed\n{STEP}\narray[0] = 1; rows.append(2); table['a'] = 1; box.items += [1]\n"
        "before = model.weight.sum().item(); same[0]; big[123] = 1"
    )
    two.run(
        "opt.param_groups[0]['lr'] = 0.1; array[1] = 5; rows.append(5); table['b'] = 5\n"
        "box.items.append(5); same.append(5); big[7] = 5"
    )
    ran = two.run(
        "%%distributed\nopt.param_groups[0]['lr'], len(opt.state), array.tolist(), rows, table,"
        " box.items, same, big.sum().item(), before == model.weight.sum().item()"
    ).text
    assert "(0.1, 2, [1.0, 0.0, 0.0], [1, 2], {'a': 1, 'b': 5}, [1], [0, 5], 1.0, True)" in ran
    kept = re.findall(r"`(\w+)[^`]*` was \w+ on the ranks since it was sent, and in the noteb", ran)
    assert sorted(kept) == ["array", "big", "box", "rows"]


NAMES = ("globals", "__import__", "dict", "open", "list", "os", "eval", "type")


def test_commands_work_beside_any_variable_names(two: Notebook, tmp_path: Path) -> None:
    """Snapshots, memory, names and calls work even if users' variables are named like builtins."""
    two.run(f"import os; os.environ['NBDIST_SNAPSHOT_DIR'] = {str(tmp_path)!r}")
    bind = "\n".join(f"{name} = 'the user\\'s'" for name in NAMES)
    assert two.run(f"%%distributed\nx = [rank]\n{bind}").errors == []
    for line in (
        *("snapshot x --name s", "restore --name s", "clean", "status -v"),
        *("sync x --from 0 -r 1", "gather x --as xs"),
    ):
        assert two.run(f"%dist_{line}").errors == [], line
    assert two.value("xs") == [[0], [0]]
    assert two.run(f"%%distributed\nassert {NAMES[0]} == 'the user\\'s'").errors == []
    two.run("%dist_restart")
