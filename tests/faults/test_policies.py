"""What the user can say about deaths and waits."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest

from nbdist.config import Patience
from nbdist.errors import NbdistError, RanksReleased, UsageError, WorkerDied, WorkerError
from nbdist.world.running import RunningTask
from nbdist.world.states import State
from nbdist.world.world import World

pytestmark = pytest.mark.shared_world(4)

SUM = "t = torch.ones(1); dist.all_reduce(t); assert t.item() == world_size"

DIES = "import os, time\nif rank == 1: time.sleep(0.2); os.kill(os.getpid(), 9)\n"


@pytest.fixture
def world(started: World) -> World:
    """Four ready ranks with `kept`, and no earlier test's replacements or policy."""
    started.session.take_replaced()
    started.session.on_failure = "heal"
    if started.state is not State.READY:
        started.restart()
    started.execute("kept = rank")
    return started


def ends(world: World, running: RunningTask) -> NbdistError | None:
    """Wait for the end of a cell; how long that took is printed."""
    world.session.wait(running)
    sys.stdout.write(f"{running.age:.2f} s from the start to idle\n")
    return running.error()


# --- what a death leads to ----------------------------------------------------------------


@pytest.mark.parametrize("others", ["dist.barrier()", "time.sleep(600)"])
def test_restart_all(world: World, others: str) -> None:
    """All workers are new after a death, as with torchrun; those that lived end at once."""
    world.session.on_failure = "restart-all"
    before = dict(world.pids)
    error = ends(world, world.submit(world.task(DIES + others)))
    assert isinstance(error, WorkerDied)
    assert error.rank == 1
    assert "All workers were restarted (`--on-failure restart-all`); their" in str(error)
    assert set(before.values()).isdisjoint(world.pids.values())
    assert world.gather("globals().get('kept')") == [None] * 4
    world.execute(SUM)


def test_stop_policy(world: World) -> None:
    """All workers end with a death; a start gives new ones."""
    world.session.on_failure = "stop"
    before = dict(world.pids)
    error = ends(world, world.submit(world.task(DIES + "dist.barrier()")))
    assert isinstance(error, WorkerDied)
    assert "All workers were ended (`--on-failure stop`)" in str(error)
    assert world.state is State.STOPPED
    assert not any(os.path.exists(f"/proc/{pid}") for pid in before.values())
    world.start()
    world.execute(SUM)


def test_policies_concern_deaths_alone(world: World) -> None:
    """An exception ends nothing but the cell, whatever the policy is."""
    world.session.on_failure = "stop"
    error = ends(world, world.submit(world.task("if rank == 1: raise ValueError\ndist.barrier()")))
    assert isinstance(error, WorkerError)
    assert not isinstance(error, WorkerDied)
    assert world.gather("kept") == [0, 1, 2, 3]


def test_survivors_are_freed_whoever_they_wait_for(world: World) -> None:
    """Also those of a group without the dead rank, whose cell has failed all the same."""
    error = ends(
        world,
        world.submit(
            world.task(
                "pair = dist.new_group([2, 3])\n"
                + DIES
                + "if rank == 2: dist.barrier(group=pair)\nif rank == 3: time.sleep(3)"
            )
        ),
    )
    assert isinstance(error, WorkerDied)
    world.execute(SUM)


# --- some ranks anew ------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [(2,), (0, 3), (0, 1, 2, 3)])
def test_replace(world: World, ranks: tuple[int, ...]) -> None:
    """These ranks are new, and lack what was bound on them; the others keep all."""
    world.execute("net = rank")
    before = dict(world.pids)
    started = time.monotonic()
    world.replace(ranks)
    sys.stdout.write(f"{time.monotonic() - started:.2f} s\n")
    assert {rank for rank in before if before[rank] != world.pids[rank]} == set(ranks)
    kept = [None if rank in ranks else rank for rank in range(4)]
    assert world.gather("globals().get('kept')") == kept
    assert re.search("kept(,| and) net", world.session.names.lacking(ranks))
    world.execute(SUM)


def test_replace_while_a_cell_runs(world: World) -> None:
    """It is refused; nothing is ended."""
    running = world.submit(world.task("import time; time.sleep(1)"))
    with pytest.raises(UsageError, match="still running an earlier cell"):
        world.replace([1])
    assert ends(world, running) is None


# --- waits ----------------------------------------------------------------------------------


def test_hang_timeout(world: World, tmp_path: Path) -> None:
    """It says when waits are told; then is when they are."""
    told: dict[float, float] = {}
    for seconds in (0.5, 30.0):
        sign = tmp_path / f"{seconds}"
        wait = f"if rank == 1:\n    while not os.path.exists({str(sign)!r}): time.sleep(0.05)"
        source = f"import os, time\n{wait}\ndist.barrier()"
        running = world.submit(world.task(source), Patience(hang_timeout=seconds))
        for _ in world.follow(running):
            if running.waits:
                told.setdefault(seconds, running.age)
            if running.age > 2.5 and (seconds in told or seconds == 30.0):
                sign.touch()
        assert running.error() is None
    assert told.keys() == {0.5}
    sys.stdout.write(f"told after {told[0.5]:.2f} s\n")


def test_what_a_failed_cell_has_begun_is_ended(world: World) -> None:
    """The next cell's collectives do not meet those that nobody waited for."""
    error = ends(
        world,
        world.submit(
            world.task(
                "if rank == 1: raise ValueError('bad')\n"
                "works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(3)]"
            )
        ),
    )
    assert isinstance(error, WorkerError)
    assert not isinstance(error, RanksReleased)
    result = world.execute("t = torch.full((1,), 5.0); dist.all_reduce(t)", fetch=("t.item()",))
    assert list(result) == [20.0] * 4
    assert world.gather("kept") == [0, 1, 2, 3]


# --- what is kept ---------------------------------------------------------------------------


def test_keep(world: World) -> None:
    """Named variables are carried over, each rank's own, big ones too; nothing else is."""
    world.execute("big = torch.full((100_000,), float(rank)); both = [big, big]; other = 1")
    world.restart(keep=["big", "both"])
    assert world.gather("big.sum().item()") == [rank * 100_000.0 for rank in range(4)]
    assert world.gather("both[0] is both[1] is big") == [True] * 4
    assert world.gather("'other' in globals()") == [False] * 4
    world.replace([2], keep=["big"])
    assert world.gather("big[0].item()") == [0.0, 1.0, 2.0, 3.0]
    assert world.session.names.lacking([2]) == "both"


@pytest.mark.parametrize("keep", ["nowhere", "lock"])
def test_keep_what_cannot_be_kept(world: World, keep: str) -> None:
    """It is told, and nothing is ended."""
    world.execute("import threading; lock = threading.Lock()")
    before = dict(world.pids)
    with pytest.raises(NbdistError, match=keep):
        world.restart(keep=[keep])
    assert world.pids == before
    assert world.gather("kept") == [0, 1, 2, 3]
