"""Who has what: names of the notebook, names of the workers, and ranks.

Tests of `nbdist.world.names` and of what `nbdist.notebook.shipping` makes of it.
"""

from __future__ import annotations

from typing import Any

import pytest

from nbdist.errors import UsageError
from nbdist.notebook.shipping import push

ALL = (0, 1)

# --- whose name it is -------------------------------------------------------------------


def test_what_takes_it_back(house: Any) -> None:
    """To bind it in the notebook, also to an equal object; not a cell that might have bound it."""
    house.cell("n = 4")
    house.distributed("n = 5")
    house.cell("n = 4")
    assert house.distributed("n") == 4
    house.cell("xs = [1]")
    house.distributed("xs = [2]")
    house.notebook.run("xs = [3]")
    assert house.distributed("xs") == [3]
    house.cell("class Net: pass\nmodel = Net()")
    house.distributed("model.weight = 1\nmodel = model")
    house.distributed("model = Net()")
    house.cell("if False: model = Net()")
    assert house.names("model") == set()


def test_what_workers_changed_in_place_stays(house: Any) -> None:
    """The notebook's has not changed; once its cell is run again it is sent."""
    house.cell("xs = [1]")
    house.distributed("xs.append(2)")
    assert house.distributed("xs") == [1, 2]
    house.cell("xs = [1]")
    assert house.distributed("xs") == [1]


def test_functions_use_the_workers_own_names(house: Any) -> None:
    """Made by a distributed cell, or theirs alone; push sends the notebook's."""
    house.cell("model = 'notebook'\ndef f(): return model, only_there")
    house.distributed("model = 'workers'")
    assert house.distributed("only_there = 1\nf()") == ("workers", 1)
    house.cell("k = 1\ndef f(): return k\nn = 1")
    house.distributed("n = 2")
    house.send(push(["n", "f"], house.table, ALL))
    assert house.distributed("n, f()") == (1, 1)
    assert house.names("n") == set()


def test_names_with_a_meaning_are_never_sent(house: Any) -> None:
    """`rank`, `dist` and the like stay the worker's, which is said once; push is refused."""
    import torch
    import torch.distributed

    house.notebook.names.update(torch=torch, dist=torch.distributed)
    assert house.names("torch.zeros(1), dist.get_rank()") == set()
    house.cell("rank = 99\nimport torch.distributions as dist\ndef f(): return rank, dist")
    assert house.distributed("rank, dist = 1, 'group'\nf()") == (1, "group")
    house.distributed("rank, dist")
    house.cell("device = 'cpu'")
    house.cell("torch = dist = 5")
    assert house.names("rank, device, dist, torch") == set()
    house.distributed("device = 'cuda:0'\ntorch = dist = 6\ndevice, dist, torch")
    own = "was ignored: each worker has"
    assert house.notices == [
        f"Your notebook's `dist` {own} torch.distributed",
        f"Your notebook's `rank` {own} its own",
    ]
    for name in ("rank", "dist", "torch", "device", "world_size", "local_rank"):
        with pytest.raises(UsageError, match=f"`%dist_push`: each worker has its own `{name}`"):
            push([name], house.table, ALL)


# --- ranks ------------------------------------------------------------------------------


def test_other_ranks_get_what_one_rank_has(house: Any) -> None:
    """What went to one; what one has bound is not overwritten, and what others lack is said."""
    house.cell("n = 1")
    house.distributed("n", ranks=(0,))
    assert house.names("n", ranks=(0,)) == set()
    assert house.names("n", ranks=(0, 1)) == {"n"}
    house.distributed("n", ranks=(1,))
    assert house.names("n", ranks=(0, 1)) == set()
    house.cell("x = 1")
    house.distributed("x = 2", ranks=(0,))
    assert house.distributed("x", ranks=(0, 1)) == 2
    assert house.notices == ["`x` exists on rank 0 but not on rank 1: `%dist_sync x --from 0`"]


def test_ranks_that_have_the_notebooks_value_lack_nothing(house: Any) -> None:
    """Where one of them has bound the name, as with `if rank == 0: ...`."""
    house.cell("x = 1")
    house.distributed("x")
    house.distributed("x = 2", ranks=(0,))
    assert house.names("x") == set()
    house.distributed("x")
    assert house.notices == []
    house.cell("y = 1")
    house.distributed("y")
    house.cell("y = 2")
    house.distributed("y = 3", ranks=(0,))
    house.distributed("y")
    assert house.notices == [
        "`y` is rank 0's own, rank 1 has an older one: `%dist_sync y --from 0 -r 1`"
    ]
