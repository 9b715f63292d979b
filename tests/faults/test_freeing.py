"""A rank that fails frees those that wait for it; all keep what they have, and go on."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator

import pytest

from nbdist.errors import RanksReleased, WorkerDied, WorkerError
from nbdist.world.running import RunningTask
from nbdist.world.states import State
from nbdist.world.world import World
from tests.faults.collectives import BEFORE, BIG_ONLY, COLLECTIVES, SMALL
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world

# What follows runs on GPUs as well: tests/gpu.

BIG = {name: COLLECTIVES[name] for name in ("all_reduce", "all_gather")} | BIG_ONLY
"""What other ranks have begun to send one another by then, and more than sockets take."""

ANY = {"recv from any": "dist.recv(t)"}  # gloo's alone

CASES = [
    *((source, 256) for source in (SMALL | ANY).values()),
    *((source, 5_000_000) for source in BIG.values()),
]
NAMES = [*SMALL, *ANY, *(f"{name} of 20 MB" for name in BIG)]

MODEL_WORKS = """
t = torch.full((1,), float(rank))
dist.all_reduce(t)
assert t.item() == sum(range(world_size)), t
if rank % 2 == 0:
    t = torch.ones(1)
    dist.all_reduce(t, group=evens)
    assert t.item() == (world_size + 1) // 2, t
optimizer.zero_grad()
net(torch.full((2, 64), float(rank))).sum().backward()
optimizer.step()
weights = [torch.empty_like(net.module.weight) for _ in range(world_size)]
dist.all_gather(weights, net.module.weight.detach())
assert all(torch.equal(weights[0], other) for other in weights)
"""

SHARDS_WORK = """
dist.all_reduce(torch.ones(1), group=mesh.get_group())
sharded(torch.full((2, 64), float(rank))).sum().backward()
assert spread.full_tensor().sum() == 4 * world_size
"""

WORKS = MODEL_WORKS + SHARDS_WORK


@pytest.fixture(scope="module")
def started(new_world: NewWorld) -> Iterator[World]:
    with new_world(4) as world:
        world.execute(BEFORE)
        yield world


@pytest.fixture
def world(started: World) -> World:
    """The world, with what `BEFORE` makes, made anew where a test has lost it."""
    if started.state is not State.READY or None in started.gather("globals().get('kept')"):
        started.restart()
        started.execute(BEFORE)
    return started


def fails(world: World, source: str) -> tuple[RunningTask, WorkerError]:
    """Run a cell that has to fail; how long it took is printed."""
    running = world.submit(world.task(source))
    started = time.monotonic()
    world.session.wait(running)
    seconds = time.monotonic() - started
    sys.stdout.write(f"{seconds:.2f} s from the start to idle\n")
    error = running.error()
    assert isinstance(error, WorkerError)
    assert not running.unfinished
    assert world.state is State.READY
    return running, error


def goes_on(world: World) -> None:
    """All variables are there, and all that was built before works."""
    assert world.gather("kept") == [*range(world.size)]
    world.execute(WORKS)


@pytest.mark.parametrize(("source", "length"), CASES, ids=NAMES)
def test_one_rank_raises(world: World, source: str, length: int) -> None:
    """The cell ends with that one exception, and says who waited in what; all goes on."""
    before = dict(world.pids)
    _, error = fails(
        world,
        f"t = torch.ones({length})\nu = torch.ones(world_size * 64)\n"
        f"if rank == 1:\n    raise ValueError('bad')\n{source}",
    )
    assert error.errors.keys() == {1}
    assert str(error).startswith(f"1 of {world.size} ranks failed (1); first: rank 1 after ")
    assert "ValueError: bad. Ranks 0,2-3 were waiting in " in str(error)
    assert "(line 5) and were released; no variables were lost." in str(error)
    assert world.pids == before
    goes_on(world)


def test_a_subgroups_collective(world: World) -> None:
    """A rank that waits for one of its subgroup's that has failed is freed."""
    _, error = fails(
        world,
        "if rank == 2: raise ValueError('bad')\n"
        "if rank == 0: dist.all_reduce(torch.ones(1), group=evens)",
    )
    assert "Rank 0 was waiting in all_reduce (line 2) and was released" in str(error)
    goes_on(world)


def test_a_skipped_collective(world: World) -> None:
    """Ranks that wait for one that has finished the cell are freed, and the cell says so."""
    _, error = fails(world, "if rank != 1:\n    dist.barrier()")
    assert isinstance(error, RanksReleased)
    assert str(error).startswith(
        "ranks 0,2-3 wait in barrier, line 2; rank 1 finished the cell without"
    )
    goes_on(world)


def test_a_cell_for_some_ranks(world: World) -> None:
    """A cell for one rank with a collective of all cannot hang, and says why."""
    running = world.submit(world.task("x = 1\ndist.barrier()", ranks=[0]))
    world.session.wait(running)
    assert str(running.error()) == (
        "rank 0 waits in barrier, line 2; ranks 1-3 do not run this cell. "
        "The waiting ranks were released; no variables were lost."
    )
    goes_on(world)


ALL_MEET = """
t = torch.full((1,), float(rank))
dist.all_reduce(t, group=dist.new_group())
assert t.item() == sum(range(world_size)), t
"""

MEETINGS = {
    "new_group": "dist.new_group()",
    "new_subgroups": "dist.new_subgroups(world_size)",
    "init_device_mesh": "init_device_mesh(device.type, (2, world_size // 2))",
}


@pytest.mark.parametrize("function", MEETINGS)
def test_one_rank_raises_before_a_group_is_made(world: World, function: str) -> None:
    """Who waits for it in the store is freed, and the next group is made by all."""
    before = dict(world.pids)
    _, error = fails(world, f"if rank == 1: raise ValueError('bad')\n{MEETINGS[function]}")
    assert f"ValueError: bad. Ranks 0,2-3 were waiting in {function} (line 2) and " in str(error)
    assert world.pids == before
    world.execute(ALL_MEET)
    goes_on(world)


def test_a_skipped_new_group(world: World) -> None:
    """The cell says who waits in the store for whom."""
    _, error = fails(world, "if rank != 1:\n    dist.new_group()")
    assert isinstance(error, RanksReleased)
    assert str(error).startswith("ranks 0,2-3 wait in new_group, line 2; rank 1 finished the cell")
    world.execute(ALL_MEET)
    goes_on(world)


def test_a_rank_dies_before_a_group_is_made(world: World) -> None:
    """Who waits for it in the store is freed, and it is replaced."""
    _, error = fails(world, "import os\nif rank == 1: os._exit(3)\ndist.new_group()")
    assert isinstance(error, WorkerDied)
    world.execute(ALL_MEET)


def test_slow_is_not_stuck(world: World) -> None:
    """A rank that computes before it joins is waited for, though others have finished the cell."""
    result = world.execute(
        "import time\nt = torch.ones(1)\nif rank == 2: time.sleep(3)\n"
        "late = dist.new_group([0, 2])\nif rank == 2: time.sleep(3)\n"
        "if rank in (0, 2): dist.all_reduce(t, group=late)",
        fetch=("t.item()",),
    )
    assert list(result) == [2.0, 1.0, 2.0, 1.0]


DEAF = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"


@pytest.mark.parametrize("waits", ["dist.barrier()", "dist.new_group()", f"{DEAF}dist.new_group()"])
def test_stop(world: World, waits: str) -> None:
    """It ends a wait, in the store too, also of code that ignores SIGINT; nobody loses anything."""
    before = dict(world.pids)
    running = world.submit(world.task(f"import time\nif rank: time.sleep(600)\n{waits}"))
    for _ in world.follow(running):
        if running.age > 0.5:
            break
    world.interrupt()
    world.session.wait(running)
    assert world.pids == before
    world.execute("import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)")
    world.execute(ALL_MEET)
    goes_on(world)


def test_what_failed_before_is_over(world: World) -> None:
    """Collectives of a group that was formed anew since are no sign of a wait."""
    fails(
        world,
        "if rank == 1: raise ValueError('bad')\n"
        "works = [dist.all_reduce(torch.ones(3_000_000), async_op=True) for _ in range(20)]\n"
        "works[-1].wait()",
    )
    test_a_skipped_collective(world)


def test_who_waits_for_whom_is_told(world: World) -> None:
    """While it waits a cell says who waits in what, and in which line the others are."""
    source = "import time\nif rank == 1:\n    time.sleep(600)\ndist.barrier()"
    running = world.submit(world.task(source))
    said = "ranks 0,2-3 wait in barrier, line 4 · rank 1 is in line 3: time.sleep(600)"
    for _ in world.follow(running):
        if running.waits == said:
            break
    sys.stdout.write(f"told after {running.age:.2f} s\n")
    world.interrupt()
    world.session.wait(running)
    goes_on(world)


def test_long_transfers_are_not_stuck(world: World) -> None:
    """Ranks that still move data are let be after the others have finished."""
    result = world.execute(
        "t = torch.ones(25_000_000)\nfor _ in range(5):\n    dist.broadcast(t, 0)",
        fetch=("t[-1].item()",),
    )
    assert list(result) == [1.0] * world.size


@pytest.mark.parametrize(
    ("end", "told", "dying"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL", 0),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV", 1),
        ("os._exit(3)", "exited with code 3", 0),
    ],
)
def test_a_rank_dies_in_a_collective(world: World, end: str, told: str, dying: int) -> None:
    """It is replaced under its number; the others keep processes and variables."""
    before = dict(world.pids)
    _, error = fails(
        world,
        f"import os, signal, time\nif rank == {dying}:\n    time.sleep(0.2); {end}\n"
        "dist.all_reduce(torch.ones(1000))",
    )
    assert isinstance(error, WorkerDied)
    assert (error.rank, error.pid) == (dying, before[dying])
    assert told in str(error)
    said = rf"Rank {dying} was restarted and its variables \(net, .+\) are gone; other ranks are"
    assert re.search(said, str(error))
    assert {rank for rank in before if before[rank] != world.pids[rank]} == {dying}
    kept = [None if rank == dying else rank for rank in range(world.size)]
    assert world.gather("globals().get('kept')") == kept
    # Also a group that is made only now, and those that survivors still hold.
    world.execute(
        "t = torch.full((1,), float(rank)); dist.all_reduce(t, group=dist.new_group())\n"
        "assert t.item() == sum(range(world_size))"
    )


def test_a_second_death_before_the_first_is_healed(world: World) -> None:
    """Both are replaced."""
    _, error = fails(world, "import os\nif rank < 2: os._exit(rank + 1)\ndist.barrier()")
    assert isinstance(error, WorkerDied)
    assert world.gather("rank") == [*range(world.size)]
    world.execute("dist.barrier()")


@pytest.fixture
def many(started: World) -> World:
    """Eight ranks in its place."""
    if started.size != 8:
        started.restart(8)
        started.execute(BEFORE)
    return started


def test_one_rank_of_many_raises(many: World) -> None:
    """As with few: that one exception, who waited in what, and all goes on."""
    _, error = fails(
        many,
        "t = torch.ones(5_000_000)\nif rank == 1:\n    raise ValueError('bad')\ndist.all_reduce(t)",
    )
    assert error.errors.keys() == {1}
    assert f"ValueError: bad. Ranks 0,2-{many.size - 1} were waiting in " in str(error)
    goes_on(many)


def test_two_of_many_die(many: World) -> None:
    """They are replaced, the others keep what they have."""
    _, error = fails(many, "import os\nif rank in (3, 5): os._exit(1)\ndist.barrier()")
    assert isinstance(error, WorkerDied)
    assert "Ranks 3,5 were restarted and their variables (" in str(error)
    kept = [None if rank in (3, 5) else rank for rank in range(many.size)]
    assert many.gather("globals().get('kept')") == kept
    many.execute("t = torch.ones(1); dist.all_reduce(t); assert t.item() == world_size")
