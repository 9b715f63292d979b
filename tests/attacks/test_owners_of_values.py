"""Whose a value is: what gather brought, what has a meaning, and what ranks have changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.notebook.front_end import Notebook, body, lasting

pytestmark = [pytest.mark.shared_world, pytest.mark.kernel]


two = lasting("%load_ext nbdist", "import torch", "%%distributed -n 2\npass")


def test_what_gather_binds_stays_here(two: Notebook) -> None:
    """Whatever it was: cells use the ranks' own, and after a restart an error says why."""
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


def test_a_cell_that_binds_such_a_name_is_told(two: Notebook) -> None:
    """Once, in a dim line; not where it is bound to what it was; no command gives it another."""
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


def test_a_deleted_one_is_there_again(two: Notebook) -> None:
    """In the next cell; in the same one nobody offers to send the notebook's, which cannot be."""
    two.run("rank, dist = 3, 4")
    assert two.run("%%distributed\ndel rank, dist").errors == []
    assert two.run("%%distributed\nprint(dist.get_rank() == rank)").errors == []
    (error,) = two.run("%%distributed\ndel rank\nprint(rank)").errors
    assert "The notebook has" not in error["evalue"]
    two.run("del rank, dist")


def test_hints_never_destroy(two: Notebook) -> None:
    """A replaced rank says who has what it misses, what it has lost is listed by importance."""
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


def test_what_was_trained_or_changed_is_never_overwritten(two: Notebook) -> None:
    """What both have changed stays the ranks', entry by entry; the rest follows the notebook."""
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


def test_requests_work_beside_such_names(two: Notebook, tmp_path: Path) -> None:
    """What users call their variables is nothing to snapshots, memory, names and calls."""
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
