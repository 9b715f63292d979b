"""A rank that fails, or never comes, frees those that wait for it; all keep what they have.

They learn why, and all goes on: also where ranks wait for one another for what can never come.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from nbdist.errors import RanksReleased, WorkerDied, WorkerError
from nbdist.world.running import RunningTask
from nbdist.world.states import State
from nbdist.world.world import World
from tests.faults.collectives import BEFORE, BIG_ONLY, COLLECTIVES, SMALL
from tests.waiting import SOON
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world

# What follows runs on GPUs as well: tests/gpu.

BIG = {"all_reduce": COLLECTIVES["all_reduce"]} | BIG_ONLY
"""What other ranks have begun to send one another by then, and more than sockets take."""

KINDS = (
    *("all_reduce", "broadcast", "all_gather", "recv", "batch_isend_irecv"),
    *("DDP", "FSDP2 backward", "DTensor", "barrier", "all_gather_object"),
)
CASES = [
    *((SMALL[name], 256) for name in KINDS),
    ("dist.recv(t)", 256),  # from any rank: gloo's alone
    *((source, 5_000_000) for source in BIG.values()),
]
NAMES = [*KINDS, "recv from any", *(f"{name} of 20 MB" for name in BIG)]

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

SET_UP = f"import time\n{BEFORE}"


@pytest.fixture(scope="module")
def started(new_world: NewWorld) -> Iterator[World]:
    with new_world(4) as world:
        world.execute(SET_UP)
        yield world


@pytest.fixture
def world(started: World) -> World:
    """The world, with what `SET_UP` makes, made anew where a test has lost it."""
    is_whole = started.state is State.READY and started.size == 4
    if not is_whole or None in started.gather("globals().get('kept')"):
        started.restart(4)
        started.execute(SET_UP)
    return started


def fails(world: World, source: str) -> tuple[RunningTask, WorkerError]:
    """Run a cell that has to fail."""
    running = world.submit(world.task(source))
    world.session.wait(running)
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


SKIPS = "if rank != 1:\n    dist.barrier()"
SKIPPED = "ranks 0,2-3 wait in barrier, line 2; rank 1 finished the cell without"


def test_ranks_that_do_not_come(world: World) -> None:
    """Ranks that wait for one of their subgroup's, or for some that run no cell, are freed."""
    source = "if rank == 2: raise ValueError('bad')\nif rank == 0: dist.barrier(group=evens)"
    _, error = fails(world, source)
    assert "Rank 0 was waiting in barrier (line 2) and was released" in str(error)
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


@pytest.mark.parametrize("waits", ["dist.barrier()", f"{DEAF}dist.new_group()"])
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


def test_a_skipped_collective(world: World) -> None:
    """Ranks that wait for one that has finished the cell are freed, and the cell says so.

    Collectives of a group that was formed anew since are no sign of a wait.
    """
    fails(
        world,
        "if rank == 1: raise ValueError('bad')\n"
        "works = [dist.all_reduce(torch.ones(3_000_000), async_op=True) for _ in range(20)]\n"
        "works[-1].wait()",
    )
    _, error = fails(world, SKIPS)
    assert isinstance(error, RanksReleased)
    assert str(error).startswith(SKIPPED)
    goes_on(world)


def test_long_transfers_are_not_stuck(world: World) -> None:
    """Ranks that still move data are let be after the others have finished."""
    result = world.execute(
        "t = torch.ones(25_000_000)\nfor _ in range(5):\n    dist.broadcast(t, 0)",
        fetch=("t[-1].item()",),
    )
    assert list(result) == [1.0] * world.size


def test_a_rank_dies_in_a_collective(world: World) -> None:
    """It is replaced under its number; the others keep processes and variables."""
    before = dict(world.pids)
    dies = "import os, signal\nif rank == 0: os.kill(os.getpid(), signal.SIGSEGV)\n"
    _, error = fails(world, f"{dies}dist.all_reduce(torch.ones(1000))")
    assert isinstance(error, WorkerDied)
    assert (error.rank, error.pid) == (0, before[0])
    assert "was killed by SIGSEGV" in str(error)
    said = r"Rank 0 was restarted and its variables \(net, .+\) are gone; other ranks are"
    assert re.search(said, str(error))
    assert {rank for rank in before if before[rank] != world.pids[rank]} == {0}
    assert world.gather("globals().get('kept')") == [None, 1, 2, 3]
    # Also a group that is made only now, and those that survivors still hold.
    world.execute(ALL_MEET)


MESSAGES_WORK = """
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


def runs(world: World, source: str, stop_after: float = SOON) -> RunningTask:
    """Run a cell to its end; Stop it where it does not come to one."""
    running = world.submit(world.task(source))
    stopped = False
    for _ in world.follow(running):
        if running.age > stop_after and not stopped:
            stopped = True
            world.interrupt()
    assert stopped == (stop_after < SOON), "not freed by itself"
    return running


def all_go_on(world: World, pids: dict[int, int]) -> None:
    """The same processes have all variables, and the groups work."""
    assert world.pids == pids
    assert world.gather("kept") == [*range(world.size)]
    world.execute(MESSAGES_WORK)


RECEIVES = {
    "recv": "dist.recv(t)",
    "irecv": "dist.irecv(t).wait()",
    "a tag": "dist.recv(t, tag=7)",
    "a thread": "import threading\nthread = threading.Thread(target=dist.recv, args=(t,))\n"
    "thread.start(); dist.recv(t, tag=1)",
}


@pytest.mark.parametrize(
    ("name", "others"),
    [("a thread", "time.sleep(600)"), ("recv", "pass"), ("irecv", "pass"), ("a tag", "pass")],
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
    all_go_on(world, before)


NEVER_MEET = {
    "two collectives": (
        "if rank == 0:\n    dist.all_reduce(t)\nelse:\n    dist.barrier()",
        "rank 0 is in all_reduce (line 3), {others} in barrier (line 5): these calls do not "
        "match and would wait forever",
    ),
    "groups": (
        "if rank == 0:\n    dist.all_reduce(t, group=evens)\nelse:\n    dist.all_reduce(t)",
        "rank 0 is in all_reduce (line 3), {others} in all_reduce (line 5): all ranks wait for "
        "each",
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
    all_go_on(world, before)


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
    "many small ones": "for _ in range(1000): dist.all_reduce(t)",
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
    all_go_on(world, before)


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
