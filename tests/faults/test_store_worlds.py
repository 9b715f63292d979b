"""Worlds whose ranks meet in a store that they ask through their agent, as on many machines."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import ProcessGroupGloo

from nbdist.errors import NbdistError, WorkerDied, WorkerError
from nbdist.wire.store import SOCKET
from nbdist.world.link import Link
from nbdist.world.states import State
from nbdist.world.world import World
from tests.faults.test_training import TRAINING

pytestmark = pytest.mark.shared_world(2)

ROOT = Path(__file__).parent.parent.parent

SUM = "dist.all_reduce(t := torch.ones(1))\nassert t.item() == dist.get_world_size()"

BREAK = "if rank == 1: raise ValueError\ndist.barrier()"


@pytest.fixture(scope="module")
def started() -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        link = Link("tests.agent.store_agent")
        link.open()
        world = World(2, log_dir="")
        world.session.adopt(link)
        with world:
            yield world
        link.close()


def asked(world: World) -> list[int]:
    """How many questions the store has had by the begin of each world."""
    lines = world.session.link.agents[0].last_lines()
    return [int(found[1]) for line in lines if (found := re.match(r"(\d+) operations", line))]


def test_a_store_that_only_torch_still_has(world: World) -> None:
    """It works for as long as torch has it."""
    world.execute(
        "import gc\n"
        "from torch._C._distributed_c10d import PrefixStore\n"
        "group = get_ipython().kernel.group\n"
        "kept = PrefixStore('a', group._store_of(0, 'b'))\n"
        "gc.collect()\n"
        "kept.set(str(rank), 'x')\n"
        "value = kept.get(str(rank))"
    )
    assert world.gather("value") == [b"x"] * 2


def test_collectives(world: World) -> None:
    """Of the world's group and others, of tensors and objects."""
    world.execute(
        SUM + "\npair = dist.new_group([0, 1])\n"
        "dist.all_gather_object(found := [None, None], {'rank': rank}, group=pair)\n"
        "dist.broadcast_object_list(one := [f'from {rank}'], src=1)"
    )
    found = [{"rank": 0}, {"rank": 1}]
    assert world.gather("found, one") == [(found, ["from 1"])] * 2


def test_what_a_group_costs(world: World) -> None:
    """Two questions for each rank, however many there are: so it takes the way there twice.

    A backend that can be connected anew (from torch 2.14 on) takes two more, and one for all.
    """
    world.restart(3)
    world.execute("groups = [dist.new_group([0, 1, 2]) for _ in range(4)]")
    world.restart(2)
    before, after = asked(world)[-2:]
    is_renewable = hasattr(ProcessGroupGloo, "reconfigure")
    assert after - before == (1 + 4) * (4 * 3 + 1 if is_renewable else 2 * 3)


def test_a_model_goes_on(world: World) -> None:
    """After a failure its groups are whole again, and all ranks have equal weights."""
    world.execute(TRAINING + "net, optimizer = make('FSDP')\ntrain(net, optimizer, [1])")
    with pytest.raises(WorkerError):
        world.execute(BREAK)
    world.execute("train(net, optimizer, [2])\nfound = weights(net).tolist()")
    one, other = world.gather("found")
    assert one == other


def test_a_killed_rank(world: World) -> None:
    """It is replaced; the other ranks keep their variables, and the groups they hold."""
    world.execute("kept, pair = rank, dist.new_group([0, 1])")
    os.kill(world.pids[1], signal.SIGKILL)
    with pytest.raises(NbdistError):
        world.execute(SUM)
    world.execute(SUM)
    world.execute("if rank == 0: assert pair is not None")
    assert world.gather("globals().get('kept')") == [0, None]


def test_a_cleaner_that_takes_the_socket(world: World) -> None:
    """A rank that is new finds the store all the same."""
    folder = Path(world.session.link.address.removeprefix("ipc://")).parent
    (folder / SOCKET).unlink()
    with pytest.raises(WorkerDied):
        world.execute("import os\nif rank: os.kill(os.getpid(), 9)\ndist.barrier()")
    world.execute(SUM)


def test_ranks_that_never_meet(world: World) -> None:
    """One that waits in the store for the others is freed, and where it waits is known."""
    with pytest.raises(NbdistError, match="new_group"):
        world.execute("if rank == 0: dist.new_group([0, 1])")
    assert world.state is State.READY
    world.execute(SUM)


def test_another_size(world: World) -> None:
    """The world has more ranks, and then fewer."""
    world.execute("kept = rank")
    world.scale(4)
    world.execute(SUM)
    assert world.gather("globals().get('kept')") == [0, 1, None, None]
    world.scale(2)
    world.execute(SUM)
    assert world.gather("globals().get('kept')") == [0, 1]
