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


def test_binding_it_in_the_notebook_takes_it_back(house: Any) -> None:
    """The notebook's new value is sent, also if it is the very same object."""
    house.cell("n = 4")
    house.distributed("n = 5")
    house.cell("n = 4")
    assert house.distributed("n") == 4


def test_another_object_under_the_name_takes_it_back(house: Any) -> None:
    """Without the hook it is noticed by identity."""
    house.cell("xs = [1]")
    house.distributed("xs = [2]")
    house.notebook.run("xs = [3]")
    assert house.distributed("xs") == [3]


def test_a_cell_that_might_have_bound_it_does_not_take_it_back(house: Any) -> None:
    """`if not trained: model = Net()` leaves the workers' model alone."""
    house.cell("class Net: pass\nmodel = Net()")
    house.distributed("model.weight = 1\nmodel = model")
    house.distributed("model = Net()")
    house.cell("if False: model = Net()")
    assert house.names("model") == set()


def test_what_workers_changed_in_place_stays(house: Any) -> None:
    """The notebook's object has not changed, so the workers' changes are kept."""
    house.cell("xs = [1]")
    house.distributed("xs.append(2)")
    assert house.distributed("xs") == [1, 2]


def test_running_the_binding_cell_again_resets_it(house: Any) -> None:
    """`xs = []` run again is sent again, though it looks as it did."""
    house.cell("xs = []")
    house.distributed("xs.append(2)")
    house.cell("xs = []")
    assert house.distributed("xs") == []


def test_functions_use_the_workers_own_names(house: Any) -> None:
    """A function from the notebook finds the model that a distributed cell made, or alone has."""
    house.cell("model = 'notebook'\ndef f(): return model, only_there")
    house.distributed("model = 'workers'")
    assert house.distributed("only_there = 1\nf()") == ("workers", 1)


def test_names_with_a_meaning_are_never_sent(house: Any) -> None:
    """`rank`, `dist` and the like stay the worker's; the user is told once, push is refused."""
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


def test_the_same_torch_is_not_shipped(house: Any) -> None:
    """The workers have the module under that name from the start."""
    import torch
    import torch.distributed

    house.notebook.names.update(torch=torch, dist=torch.distributed)
    assert house.names("torch.zeros(1), dist.get_rank()") == set()


def test_push_sends_what_nobody_asked_for(house: Any) -> None:
    """Whoever owns it, with what it needs."""
    house.cell("k = 1\ndef f(): return k\nn = 1")
    house.distributed("n = 2")
    house.send(push(["n", "f"], house.table, ALL))
    assert house.distributed("n, f()") == (1, 1)
    assert house.names("n") == set()


# --- ranks ------------------------------------------------------------------------------


def test_other_ranks_get_what_one_rank_has(house: Any) -> None:
    """A name that went to rank 0 goes to the others when they use it."""
    house.cell("n = 1")
    house.distributed("n", ranks=(0,))
    assert house.names("n", ranks=(0,)) == set()
    assert house.names("n", ranks=(0, 1)) == {"n"}
    house.distributed("n", ranks=(1,))
    assert house.names("n", ranks=(0, 1)) == set()


def test_a_name_that_one_rank_bound_is_not_overwritten(house: Any) -> None:
    """It belongs to the workers; that the others lack it is said."""
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
