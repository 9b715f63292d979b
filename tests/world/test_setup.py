"""Tests of `nbdist.world.past`: what new workers run before anything else."""

from __future__ import annotations

import signal

import pytest

from nbdist.errors import WorkerDied, WorkerError
from nbdist.values.shared_memory import Segment, to_end
from nbdist.wire.work import Attempt, Source, Task
from nbdist.world.past import Setup
from nbdist.world.states import Renumbering, State
from nbdist.world.world import World
from tests.faults.test_deaths import DIES, SUM, ends

pytestmark = pytest.mark.shared_world(3)


@pytest.fixture
def world(started: World) -> World:
    """Three ready ranks with `kept`, and no set-up cells."""
    started.session.setup.forget()
    if started.state is not State.READY:
        started.restart()
    started.execute("kept = rank")
    return started


# --- the cells ------------------------------------------------------------------------------


def texts(setup: Setup) -> list[str]:
    return [task.source for task in setup.tasks.values()]


def test_cells_are_kept_in_order() -> None:
    """One that runs again takes the place that it had, as a first attempt."""
    setup = Setup()
    for number, key in enumerate("abca"):
        setup.keep(key, Task(key, (0,), Source(f"{key}{number}"), attempt=Attempt(1, 3)), None)
    assert texts(setup) == ["a3", "b1", "c2"]
    assert {task.attempt for task in setup.tasks.values()} == {Attempt()}
    setup.forget()
    assert setup.tasks == {}


def test_names_stay_for_as_long_as_their_cell() -> None:
    """Memory that holds them is released when it is replaced, or forgotten."""
    setup = Setup()
    first, second, other = (to_end(Segment.filling([b"x"])) for _ in range(3))
    for key, segment in (("a", first), ("b", other), ("b", None), ("a", second)):
        setup.keep(key, Task(key, (0,)), segment)
    assert ["closed" in repr(each) for each in (first, second, other)] == [True, False, True]
    setup.forget()
    assert "closed" in repr(second)


@pytest.mark.parametrize("after", [2, 6])
def test_another_number_of_ranks(after: int) -> None:
    """A cell for all ranks is for all of them then; one for some is for these."""
    setup = Setup()
    for key, ranks in (("all", (0, 1, 2, 3)), ("some", (0, 1))):
        setup.keep(key, Task(key, ranks), None)
    setup.renumber(Renumbering(4, after, {}))
    assert [task.ranks for task in setup.tasks.values()] == [tuple(range(after)), (0, 1)]


# --- in new workers -------------------------------------------------------------------------


def test_setup_runs_in_every_new_worker(world: World) -> None:
    """After a death, a replacement and a restart, with the names that came along."""
    numbers = list(range(100_000))  # too many for a message: they stay in shared memory
    world.execute("base = sum(numbers) + rank", names={"numbers": numbers}, setup=True)
    expected = [sum(numbers) + rank for rank in range(3)]
    error = ends(world, world.submit(world.task("base = 0\n" + DIES + "dist.barrier()")))
    assert isinstance(error, WorkerDied)
    assert world.gather("base") == [0, expected[1], 0]
    assert "base" not in world.session.names.lacking([1])
    world.replace([2])
    assert world.gather("base") == [0, *expected[1:]]
    world.restart()
    assert world.gather("base") == expected


def test_setup_runs_in_order_on_its_ranks(world: World) -> None:
    """Once for each cell: the same cell again takes the place of what it was."""
    world.execute("order = ['a']", setup=True)
    world.execute("order.append('b')", ranks=[0, 2], setup=True)
    world.execute("order = ['a']", setup=True)
    world.restart()
    assert world.gather("order") == [["a", "b"], ["a"], ["a", "b"]]


def test_setup_with_collectives(world: World) -> None:
    """They work where all workers are new; in one new worker they are freed, and it is told."""
    world.execute(SUM, setup=True)
    world.restart()
    assert world.gather("t.item()") == [3.0] * 3
    error = ends(world, world.submit(world.task(DIES + "dist.barrier()")))
    said = "A `--setup` cell failed there: rank 1 waits in all_reduce, line 1; ranks 0,2"
    assert said in str(error)
    world.session.setup.forget()
    world.execute(SUM)


def test_setup_that_fails(world: World) -> None:
    """A restart says so; the workers are there."""
    world.execute("dict(); assert kept >= 0", setup=True)
    with pytest.raises(WorkerError, match="NameError: name 'kept' is not defined"):
        world.restart()
    world.session.setup.forget()
    world.execute(SUM)


def test_setup_that_kills_its_worker(world: World) -> None:
    """It is not run over and over."""
    world.execute("import os\nif 'kept' not in globals(): os._exit(7)", setup=True)
    error = ends(world, world.submit(world.task(DIES + "dist.barrier()")))
    assert isinstance(error, WorkerDied)
    assert "A `--setup` cell failed there: rank 1 on" in str(error)
    assert "exited with code 7" in str(error)
    world.session.setup.forget()
    world.execute(SUM)


def test_stop_while_a_new_worker_is_set_up(world: World) -> None:
    """Stop ends the set-up cell; the world takes cells."""
    world.execute(
        "import time\nif 'kept' not in globals(): print('set up'); time.sleep(600)", setup=True
    )
    running = world.submit(world.task(DIES + "dist.barrier()"))
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 4.0)
    try:
        world.session.wait(running)
        with pytest.raises(KeyboardInterrupt):
            world.session.check(running)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    world.session.setup.forget()
    world.execute(SUM)
