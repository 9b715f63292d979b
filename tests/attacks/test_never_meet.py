"""Ranks that wait for what can never come are freed, keep all they have, and learn why."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from nbdist.config import Patience
from nbdist.errors import RanksReleased, WorkerDied, WorkerError
from nbdist.world.running import RunningTask
from nbdist.world.states import State
from nbdist.world.world import World
from tests.waiting import SOON
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world

BEFORE = "import time\nkept = rank\nevens = dist.new_group([*range(0, world_size, 2)])"

WORKS = """
t = torch.full((1,), float(rank))
dist.all_reduce(t)
assert t.item() == sum(range(world_size)), t
if rank % 2 == 0:
    dist.all_reduce(t, group=evens)
sent = dist.isend(torch.full((1,), float(rank)), (rank + 1) % world_size)
assert dist.recv(t) == (rank - 1) % world_size
sent.wait()
assert t.item() == (rank - 1) % world_size, t
dist.barrier()
"""


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


def runs(world: World, source: str, stop_after: float = SOON) -> RunningTask:
    """Run a cell to its end; Stop it where it does not come to one."""
    running = world.submit(world.task(source))
    stopped = False
    for _ in world.follow(running):
        if running.age > stop_after and not stopped:
            stopped = True
            world.interrupt()
    sys.stdout.write(f"{running.age:.2f} s: {running.error()}\n")
    assert stopped == (stop_after < SOON), "not freed by itself"
    return running


def goes_on(world: World, pids: dict[int, int]) -> None:
    """The same processes have all variables, and the groups work."""
    assert world.pids == pids
    assert world.gather("kept") == [*range(world.size)]
    world.execute(WORKS)


RECEIVES = {
    "recv": "dist.recv(t)",
    "irecv": "dist.irecv(t).wait()",
    "a tag": "dist.recv(t, tag=7)",
    "a thread": "import threading\nthread = threading.Thread(target=dist.recv, args=(t,))\n"
    "thread.start(); dist.recv(t, tag=1)",
}


@pytest.mark.parametrize(
    ("name", "others"),
    [("recv", "time.sleep(600)"), ("a thread", "time.sleep(600)")]
    + [(name, "pass") for name in RECEIVES],
)
def test_a_message_from_any_rank_that_never_comes(world: World, name: str, others: str) -> None:
    """Who waits for it is freed, by Stop, or by itself where all others have finished."""
    before = dict(world.pids)
    source = f"t = torch.zeros(2)\nif rank == 1:\n    {others}\nelse:\n"
    source += "\n".join(f"    {line}" for line in RECEIVES[name].splitlines())
    stop_after = SOON if others == "pass" else 0.5
    running = runs(world, source, stop_after)
    if others == "pass":
        assert isinstance(error := running.error(), RanksReleased)
        assert "line " in str(error)
    goes_on(world, before)


NEVER_MEET = {
    "two collectives": (
        "if rank == 0:\n    dist.all_reduce(t)\nelse:\n    dist.barrier()",
        "rank 0 is in all_reduce (line 3), {others} in barrier (line 5): these calls do not "
        "match and would wait forever",
    ),
    "one ahead": (
        "if rank == 0:\n    dist.all_reduce(t, async_op=True)\ndist.barrier()",
        "these calls do not match and would wait forever; the first that differ: rank 0 "
        "all_reduce, {others} barrier",
    ),
    "groups": (
        "if rank == 0:\n    dist.all_reduce(t, group=evens)\nelse:\n    dist.all_reduce(t)",
        "rank 0 is in all_reduce (line 3), {others} in all_reduce (line 5): all ranks wait for "
        "each",
    ),
    "receive and collective": (
        "if rank == 0:\n    dist.recv(t, 1)\nelse:\n    dist.barrier()",
        "rank 0 is in recv (line 3), {others} in barrier (line 5): all ranks wait for each other",
    ),
    "all receive": (
        "dist.recv(t, (rank + 1) % world_size)",
        "are in recv (line 2): all ranks wait",
    ),
    "making a group": (
        "if rank == 0:\n    dist.new_group()\nelse:\n    dist.barrier()",
        "rank 0 is in new_group (line 3), {others} in barrier (line 5): all ranks wait for each "
        "other",
    ),
}


@pytest.mark.parametrize("name", NEVER_MEET)
def test_ranks_that_never_meet(world: World, name: str) -> None:
    """They are freed with no Stop needed, and the cell says who was where."""
    before = dict(world.pids)
    source, told = NEVER_MEET[name]
    error = runs(world, f"t = torch.ones(2)\n{source}").error()
    assert isinstance(error, RanksReleased)
    assert told.format(others="ranks 1-3") in str(error)
    goes_on(world, before)


def test_told_only(world: World) -> None:
    """With --no-free nobody is freed, and Stop takes nothing from anybody."""
    before = dict(world.pids)
    source = "if rank == 0:\n    dist.all_reduce(torch.ones(2))\nelse:\n    dist.barrier()"
    running = world.submit(world.task(source), Patience(hang_timeout=0.5, aborts=False))
    told = " · these calls do not match and would wait forever"
    for _ in world.follow(running):
        if running.age > 3.0 and "in barrier" in running.waits and running.waits.endswith(told):
            break
    assert not running.aborted
    world.interrupt()
    world.session.wait(running)
    goes_on(world, before)


MEET_IN_THE_END = {
    "a rank that holds the GIL": "if rank == 1: sum(range(80_000_000))\ndist.barrier()",
    "a stopped rank": "import os, signal, subprocess\nif rank == 1:\n"
    "    subprocess.Popen(f'sleep 2.5; kill -CONT {os.getpid()}', shell=True)\n"
    "    os.kill(os.getpid(), signal.SIGSTOP)\ndist.barrier()",
    "subgroups": "if rank == 0: time.sleep(2.5)\n"
    "if rank % 2 == 0: dist.all_reduce(t, group=evens)\ndist.barrier()",
    "a pipeline": "if rank: dist.recv(t, rank - 1)\ntime.sleep(0.9)\n"
    "if rank < world_size - 1: dist.send(t, rank + 1)\ndist.barrier()",
    "a thread": "import threading\n"
    "def send():\n    time.sleep(3); dist.send(torch.ones(2), (rank + 1) % world_size)\n"
    "thread = threading.Thread(target=send); thread.start()\n"
    "dist.recv(t, (rank - 1) % world_size); thread.join()",
    "something else": "work = dist.all_reduce(t, async_op=True) if rank == 0 else None\n"
    "import threading; threading.Event().wait(3) if rank == 0 else dist.recv(t, 0)\n"
    "if rank == 0: [dist.send(torch.ones(2), other) for other in range(1, world_size)]\n"
    "work.wait() if rank == 0 else dist.all_reduce(t)",
    "many small ones": "for _ in range(1000): dist.all_reduce(t)",
    "a child": "import subprocess\nif rank == 1: subprocess.run(['sleep', '2.5'])\ndist.barrier()",
}


@pytest.mark.parametrize("name", MEET_IN_THE_END)
def test_ranks_that_meet_in_the_end(world: World, name: str) -> None:
    """Nobody is freed who waits for what is on its way."""
    assert runs(world, f"t = torch.zeros(2)\n{MEET_IN_THE_END[name]}").error() is None


def test_sizes_that_differ(world: World) -> None:
    """They are told by rank, with those whose result is wrong."""
    before = dict(world.pids)
    error = runs(world, "t = torch.ones(3 if rank == 1 else 2)\ndist.all_reduce(t)").error()
    assert isinstance(error, RanksReleased)
    assert "all_reduce (line 2), sizes differ: " in str(error)
    assert "ranks 0,2-3 [2]" in str(error)
    assert "rank 1 [3]" in str(error)
    assert "the result on ranks 0,3 is wrong. The waiting ranks were released" in str(error)
    goes_on(world, before)


def test_dtypes_of_one_size_that_differ(world: World) -> None:
    """Gloo adds them up all the same; where the cell then fails, it says so."""
    source = "t = torch.ones(4, dtype=torch.int32 if rank == 1 else torch.float32)\n"
    error = runs(world, f"{source}dist.all_reduce(t)\nassert t[0] == world_size").error()
    assert isinstance(error, WorkerError)
    assert "Before that: all_reduce, dtypes differ: ranks 0,2-3 float32, rank 1 int32" in str(error)


def test_dtypes_that_end_a_rank(world: World) -> None:
    """Gloo ends the process that receives too much; its error says why, by what others did."""
    source = "t = torch.ones(4, dtype=torch.float64 if rank == 1 else torch.float32)\n"
    error = runs(world, f"{source}dist.all_reduce(t)").error()
    assert isinstance(error, WorkerDied)
    assert "received more than its tensor holds: sizes or dtypes differ between ranks in " in str(
        error
    )
    assert "all_reduce (" in str(error)
    assert "rank 1 float64 [4]" in str(error)
