"""Tests of `nbdist.worker.group.default`: user code initialises and destroys the group itself."""

from __future__ import annotations

import pytest
import torch

from nbdist.errors import RanksReleased, WorkerDied, WorkerError
from nbdist.output.events import Text
from nbdist.worker.compat import torch as seam
from nbdist.worker.group.default import missing_backends
from nbdist.world import task_error
from nbdist.world.world import World

pytestmark = pytest.mark.shared_world(3)

SETUP = """
import os
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

os.environ["MASTER_ADDR"] = "localhost"
os.environ["MASTER_PORT"] = "12355"
dist.init_process_group("gloo", rank=rank, world_size=world_size)
"""

STEP = """
torch.manual_seed(0)
ddp_model = DDP(torch.nn.Linear(10, 5))
loss_fn = torch.nn.MSELoss()
optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.001)
optimizer.zero_grad()
outputs = ddp_model(torch.full((20, 10), float(rank)))
loss_fn(outputs, torch.zeros(20, 5)).backward()
optimizer.step()
grads = [torch.empty(5, 10) for _ in range(world_size)]
dist.all_gather(grads, ddp_model.module.weight.grad)
assert all(torch.equal(grad, grads[0]) for grad in grads)
"""

CLEANUP = "dist.destroy_process_group()\nassert not dist.is_initialized()\n"


WORKS = """
t = torch.full((1,), float(rank))
dist.all_reduce(t)
assert t.item() == sum(range(world_size)), t
"""

ALL_MEET = """
t = torch.full((1,), float(rank))
dist.all_reduce(t, group=dist.new_group())
assert t.item() == sum(range(world_size)), t
"""

IS_THERE = "\x1b[2mThe group of all 3 ranks (gloo) exists already.\x1b[0m\n"
IS_BACK = (
    "\x1b[2mThe group that an earlier cell initialised has ended; the world's group is used "
    "again.\x1b[0m\n"
)


def printed(world: World, source: str) -> dict[int, str]:
    """Return the text that each rank prints in the cell."""
    texts = dict.fromkeys(range(world.size), "")
    running = world.submit(world.task(source))
    for news in world.follow(running):
        for rank, output in news:
            if isinstance(output, Text):
                texts[rank] += output.text
    assert task_error.error_of(running) is None
    return texts


def error_of(world: World, source: str) -> str:
    """Return the message of the error that all ranks raise in the cell."""
    with pytest.raises(WorkerError) as caught:
        world.execute(source)
    assert caught.value.errors.keys() == {0, 1, 2}
    return str(caught.value)


def test_tutorials_run_in_one_cell_or_several(world: World) -> None:
    """Code of tutorials runs in one cell or several, also again; a model on the group works on."""
    world.restart()
    assert printed(world, SETUP + STEP + CLEANUP) == dict.fromkeys(range(3), IS_THERE)
    for source in (SETUP + STEP + CLEANUP, (SETUP + STEP + CLEANUP) * 2):
        assert printed(world, source) == dict.fromkeys(range(3), "")
    for source in (SETUP, SETUP, STEP, STEP, CLEANUP, SETUP, STEP, CLEANUP):
        world.execute(source)
    world.execute("ddp_model(torch.ones(20, 10)).sum().backward()\n" + WORKS + CLEANUP)
    world.execute(
        "from torch.distributed._functional_collectives import all_reduce\n"
        "t = all_reduce(torch.ones(1), 'sum', [*range(world_size)])\nassert t.item() == 3"
    )


def test_usual_arguments_give_the_worlds_group(world: World) -> None:
    """Usual arguments of `init_process_group` give the world's group, and so does a device mesh."""
    for arguments in (
        "",
        "None",
        "'cpu:gloo'",
        "'gloo', init_method='env://'",
        "'gloo', world_size=world_size",
        "'gloo', device_id=device",
        "'gloo', store=dist.HashStore(), rank=rank, world_size=world_size",
    ):
        world.execute(f"dist.init_process_group({arguments})\n{WORKS}")
    world.execute(
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "dist.destroy_process_group()\nmesh = init_device_mesh('cpu', (world_size,))\n" + WORKS
    )
    assert printed(world, WORKS) == dict.fromkeys(range(3), "")


def test_a_destroyed_group_is_gone_until_the_next_cell(world: World) -> None:
    """A destroyed group is back in the next cell, but its subgroups are not.

    User code can also destroy a subgroup alone.
    """
    said = error_of(
        world,
        "sub = dist.new_group()\ndist.destroy_process_group()\n"
        "assert not dist.is_initialized()\ndist.all_reduce(torch.ones(1))",
    )
    assert "Default process group has not been initialized" in said
    world.execute(WORKS)
    assert "Please initialize the group first" in error_of(world, "dist.get_backend(sub)")
    assert "cannot be None" in error_of(world, "dist.destroy_process_group()\n" * 2)
    world.execute(ALL_MEET)
    world.execute("sub = dist.new_group()\ndist.destroy_process_group(sub)\n" + WORKS + ALL_MEET)


def test_a_group_destroyed_on_some_ranks_comes_back(world: World) -> None:
    """A group destroyed on some ranks comes back, and groups that are made next have all ranks."""
    for last in (WORKS, ALL_MEET):
        world.execute("if rank == 1: dist.destroy_process_group()")
        world.execute(last)
    world.execute(
        "if rank == 1:\n    dist.destroy_process_group()\n    dist.init_process_group('gloo')\n"
        + ALL_MEET
    )


NO_NCCL = 'Pass "gloo" or leave it out'
if not torch.cuda.is_available():
    NO_NCCL += "."  # without a GPU no workers with nccl are suggested


def test_calls_to_a_rank_that_does_not_exist_raise(world: World) -> None:
    """Point-to-point calls to a rank that does not exist raise; torch alone would wait for ever."""
    for call, rank in (
        ("send(x, dst=5)", 5),
        ("send(x, 5)", 5),
        ("isend(x, group_dst=3)", 3),
        ("recv(x, src=3, group=dist.group.WORLD)", 3),
        ("irecv(x, -1)", -1),
    ):
        said = error_of(world, f"x = torch.zeros(1)\ndist.{call}")
        assert f"there is no rank {rank}, only ranks 0-2." in said
    world.execute(
        "x = torch.zeros(1)\nnext_rank = (rank + 1) % 3\n"
        "for work in dist.batch_isend_irecv([\n"
        "    dist.P2POp(dist.isend, torch.ones(1), next_rank),\n"
        "    dist.P2POp(dist.irecv, x, (rank - 1) % 3),\n"
        "]): work.wait()\n"
        "assert x.item() == 1\n"
        "pair = dist.new_group([0, 2])\n"
        "if rank == 0: dist.send(torch.ones(1), 2, group=pair)\n"
        "if rank == 2: dist.recv(x, 0, group=pair)"
    )


def test_contradicting_arguments_are_refused(world: World) -> None:
    """Arguments that contradict the world are refused with a remedy, also without a group."""
    for arguments, said, remedy in (
        ("rank=(rank + 1) % 3", "this is rank ", "Pass rank=rank or leave it out."),
        ("backend='nccl'", "the world's group has the backend gloo, not nccl.", NO_NCCL),
    ):
        for first in ("", "dist.destroy_process_group()\n"):
            found = error_of(world, f"{first}dist.init_process_group({arguments})")
            assert f"init_process_group: {said}" in found
            assert remedy in found
            world.execute(WORKS)
    said = error_of(world, "dist.init_process_group('gloo', rank=0, world_size=1)")
    assert "init_process_group: the world has 3 ranks, not 1. Pass world_size=world_size" in said
    world.execute(WORKS)


def test_either_class_of_nccl_is_nccl() -> None:
    """The backend "nccl" means either class that the world has, "nccl2" that class alone."""
    assert missing_backends("nccl", "cpu:gloo,cuda:nccl-legacy") == set()
    assert missing_backends("nccl2", "cpu:gloo,cuda:nccl-legacy") == {"nccl2"}
    assert missing_backends("nccl", "gloo") == {"nccl"}


def test_user_code_can_make_a_smaller_group(world: World) -> None:
    """A cell can replace the world's group by a smaller group; the next cell has the world's."""
    first = world.execute(
        "dist.destroy_process_group()\n"
        "dist.init_process_group('gloo', rank=0, world_size=1, store=dist.HashStore())\n"
        "mine = dist.new_group()\nt = torch.ones(1)\ndist.all_reduce(t, group=mine)",
        fetch=("dist.get_world_size()",),
    )
    assert list(first) == [1] * 3
    assert printed(world, WORKS) == dict.fromkeys(range(3), IS_BACK)
    assert printed(world, ALL_MEET) == dict.fromkeys(range(3), "")


def test_a_hang_beside_an_own_group_is_released(world: World) -> None:
    """If a rank makes a default group of its own, ranks that wait are released, and groups heal."""
    world.execute("sub = dist.new_group()\nkept = rank")
    with pytest.raises(RanksReleased):
        world.execute(
            "if rank == 1:\n"
            "    dist.destroy_process_group()\n"
            "    from torch.testing._internal.distributed.fake_pg import FakeStore\n"
            "    dist.init_process_group('fake', rank=0, world_size=8, store=FakeStore())\n"
            "    mine = dist.new_group()\n"
            "else:\n    dist.barrier()"
        )
    assert world.gather("kept") == [0, 1, 2]
    world.execute(WORKS + ALL_MEET)


def test_a_timeout_holds_until_the_group_is_destroyed(world: World) -> None:
    """A timeout holds until the group is destroyed; if a rank exceeds it, the group is healed."""
    set_to = (
        "import datetime, time\ndist.init_process_group('gloo', timeout=datetime.timedelta({}))"
    )
    timeout = "dist.group.WORLD._get_backend(torch.device('cpu')).options._timeout.total_seconds()"
    world.execute(set_to.format("seconds=7"))
    assert world.gather(timeout) == [7.0] * 3
    world.execute(CLEANUP)
    assert world.gather(timeout) == [24 * 3600.0] * 3
    if seam.SETS_TIMEOUTS:
        world.execute(f"kept = rank\n{set_to.format('seconds=0.5')}")
        with pytest.raises(WorkerError, match="Timed out waiting 500ms"):
            world.execute("if rank == 1: time.sleep(1.5)\ndist.all_reduce(torch.ones(1))")
        world.execute(WORKS)
        assert world.gather("kept") == [0, 1, 2]
        world.execute(CLEANUP)


def test_an_error_after_the_group_was_destroyed_heals(world: World) -> None:
    """If a rank raises after some ranks have destroyed the group, the others are released."""
    world.execute("kept = rank")
    for ranks in ("range(3)", "[1]", "[0, 2]"):
        world.execute(f"if rank in {ranks}: dist.destroy_process_group()")
        with pytest.raises(WorkerError, match="ValueError: bad"):
            world.execute("if rank == 1: raise ValueError('bad')\ndist.all_reduce(torch.ones(1))")
        assert world.gather("kept") == [0, 1, 2]
        world.execute(WORKS + ALL_MEET)


def test_a_rank_that_dies_without_a_group_is_replaced(world: World) -> None:
    """A rank that dies after all ranks have destroyed the group is replaced; the new rank joins."""
    with pytest.raises(WorkerDied):
        world.execute("dist.destroy_process_group()\nimport os\nif rank == 1: os._exit(3)")
    world.execute(SETUP + STEP + CLEANUP)
    world.execute(WORKS + ALL_MEET)


def test_a_group_of_all_follows_groups_of_some(world: World) -> None:
    """A new group has all ranks, whichever groups some ranks have made without the others."""
    with pytest.raises(WorkerError, match="bad"):
        world.execute(
            "if rank == 1: raise ValueError('bad')\n"
            "pair = dist.new_group([0, 2])\ndist.barrier(group=pair)"
        )
    world.execute(ALL_MEET)
    world.execute("if rank != 1: dist.barrier(group=pair)")
    world.execute("dist.barrier(group=dist.new_group([0, 2]))", ranks=[0, 2])
    world.execute(ALL_MEET)
    for _ in range(2):
        world.execute(
            "for _ in range(2):\n"
            "    if rank < 2:\n"
            "        pair = dist.new_group([0, 1], use_local_synchronization=True)\n"
            "        dist.barrier(group=pair)\n"
            "        dist.destroy_process_group(pair)"
        )
    world.execute(ALL_MEET)


def test_names_of_groups_are_equal_on_all_ranks(world: World) -> None:
    """Names of groups are unique and equal on all ranks, and torch still counts the groups."""
    before = world.gather("dist.get_pg_count()")
    result = world.execute("", fetch=("[dist.new_group().group_name for _ in range(2)]",))
    assert world.gather("dist.get_pg_count()") == [count + 2 for count in before]
    names = result.rank(0)
    assert list(result) == [names] * 3
    assert len({*names, *world.execute("", fetch=("dist.new_group().group_name",))}) == 3


def test_an_exception_ends_coalescing(world: World) -> None:
    """After an exception in a coalescing block, collectives of the next cell run at once."""
    left = (
        "from torch.distributed.distributed_c10d import _coalescing_manager\n"
        "with _coalescing_manager():\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "    raise ValueError('bad batch')"
    )
    assert "bad batch" in error_of(world, left)
    world.execute(WORKS)
