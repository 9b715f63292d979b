"""If a rank fails or never comes, the ranks that wait for it are released and keep all variables.

The error says why, and the world goes on, also if ranks wait for one another in vain.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from nbdist.config import Patience
from nbdist.errors import (
    NO_VARIABLES_LOST,
    CellTimeout,
    RanksReleased,
    WorkerDied,
    WorkerError,
)
from nbdist.world import dispatch
from nbdist.world.states import WorldState
from nbdist.world.world import World
from tests.cells import ends, press_stop, run_for, stop
from tests.faults.collectives import BEFORE, BIG_ONLY, COLLECTIVES, SMALL
from tests.waiting import SOON, wait_until

pytestmark = pytest.mark.shared_world(4)

# The sources below run on GPUs as well: tests/gpu.

BIG = {"all_reduce": COLLECTIVES["all_reduce"]} | BIG_ONLY
"""Calls with messages of 20 MB: the other ranks have begun to send more than sockets hold."""

KINDS = (
    *("all_reduce", "broadcast", "all_gather", "recv", "batch_isend_irecv"),
    *("DDP", "FSDP2 backward", "DTensor", "barrier", "all_gather_object"),
)
MEETINGS = {
    "new_group": "dist.new_group()",
    "init_device_mesh": "init_device_mesh(device.type, (2, world_size // 2))",
}
"""Calls in which the other ranks wait in the store."""

CASES = {
    **{name: (SMALL[name], 256) for name in KINDS},
    "recv from any": ("dist.recv(t)", 256),  # with gloo only
    **{f"{name} of 20 MB": (source, 5_000_000) for name, source in BIG.items()},
    **{name: (source, 1) for name, source in MEETINGS.items()},
}

HALF_READ = """
if rank == 0:
    dist.irecv(torch.zeros(1), 1)  # gloo frees what belongs to it at once
    time.sleep(0.2)
    dist.recv(torch.zeros(1), 2)
if rank == 1:
    time.sleep(0.1)
    sent = dist.isend(torch.ones(1), 0)
    time.sleep(0.2)
    raise ValueError
if rank == 2: time.sleep(0.5)
"""
"""A cell after which rank 0 has the head of a message from rank 1, but no buffer for the rest."""

ALL_MEET = """
t = torch.full((1,), float(rank))
dist.all_reduce(t, group=dist.new_group())
assert t.item() == sum(range(world_size)), t
"""

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

MESSAGES_WORK = """
sent = dist.isend(torch.full((1,), float(rank)), (rank + 1) % world_size)
assert dist.recv(t := torch.ones(1)) == (rank - 1) % world_size
sent.wait()
assert t.item() == (rank - 1) % world_size, t
"""

WORKS = MODEL_WORKS + SHARDS_WORK + MESSAGES_WORK

SET_UP = f"import time\n{BEFORE}"


@pytest.fixture(scope="module")
def started(started: World) -> World:
    started.execute(SET_UP)
    return started


@pytest.fixture
def world(started: World) -> World:
    """The world with all that `SET_UP` makes, restarted if a test has lost any of it."""
    is_whole = started.state is WorldState.READY and started.size == 4
    if not is_whole or None in started.gather("globals().get('kept')"):
        started.restart(4)
        started.execute(SET_UP)
    return started


def fails(world: World, source: str, ranks: list[int] | None = None) -> WorkerError:
    """Run a cell that must fail and end by itself; return its error."""
    _, error = ends(world, source, ranks=ranks)
    assert isinstance(error, WorkerError)
    return error


def goes_on(world: World, pids: dict[int, int]) -> None:
    """Assert that no process is new, and that ranks keep variables, and use old and new groups."""
    assert world.pids == pids
    assert world.gather("kept") == [*range(world.size)]
    world.execute(ALL_MEET)
    world.execute(WORKS)


INCOMPLETE = {
    **dict.fromkeys(("all_reduce", "broadcast", "recv"), "`t`"),
    "batch_isend_irecv": "A tensor of the call",
    "DDP": "Gradients of `net`",
}
"""Variables that a released collective may have filled in part, by collective."""


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_wait_for_a_failed_rank_are_released(world: World, name: str) -> None:
    """The error has the rank's exception and the call in which the others waited; all goes on."""
    before, (source, length) = dict(world.pids), CASES[name]
    error = fails(
        world,
        f"t = torch.ones({length})\nu = torch.ones(world_size * 64)\n"
        f"if rank == 1:\n    raise ValueError('bad')\n{source}",
    )
    assert error.errors.keys() == {1}
    assert str(error).startswith(f"rank 1 failed, of {world.size}, after ")
    where = name if name in MEETINGS else ""
    assert f"ValueError: bad. Ranks 0,2-3 were waiting in {where}" in str(error)
    what = INCOMPLETE.get(name.split(" of ")[0].split(" from ")[0])
    if "waiting in broadcast (" in str(error) and name == "DDP":  # of buckets, not of gradients
        what = None
    left = f". {what} on ranks 0,2-3 may hold a part of the result (" if what else NO_VARIABLES_LOST
    assert f"(line 5) and were released{left}" in str(error)
    goes_on(world, before)


def test_every_incomplete_variable_is_named(world: World) -> None:
    """Every variable is named that has memory into which an aborted collective writes."""
    for written, called, named in (
        ("x = torch.ones(3)\nsame, other = {'a': x[1:]}, torch.ones(3)", "x", "`x`, `same`"),
        ("import numpy\nx = numpy.ones(3)", "torch.from_numpy(x)", "`x`"),
        (
            "layer = torch.nn.Linear(2, 2)\nlayer(torch.ones(2)).sum().backward()",
            "layer.weight.grad",
            "Gradients of `layer`",
        ),
        ("layer = torch.nn.Linear(2, 2)", "layer.weight.data", "Parameters of `layer`"),
        ("x = torch.ones(3)", "x.clone()", ""),
        ("base = torch.ones(6)\nx, apart = base[:3], base[3:]", "x", "`x`, `base`"),
    ):
        raises = "if rank == 1: raise ValueError('bad')"
        _, error = ends(world, f"{written}\n{raises}\ndist.all_reduce({called})")
        line = written.count("\n") + 3
        left = f"{named} on ranks 0,2-3 may hold a part of the result (all_reduce, line {line})."
        assert str(error).endswith(
            f" and were released{f'. {left}' if named else NO_VARIABLES_LOST + '.'}"
        )
        world.execute("x = layer = same = base = apart = None")
    source = "x = torch.ones(3)\nif rank < 3: dist.all_reduce(x)\nelse: input()"
    running = world.submit(world.task(source))
    for _ in world.follow(running):
        places = [stack.place.operation for stack in world.stacks([0, 1, 2])]
        if places == ["all_reduce"] * 3:
            break
    stop(world, running)
    assert running.ending.damage.startswith("`x` on ranks 0-2 may hold")


def test_gloo_rests_after_an_abort(world: World) -> None:
    """A connection that gloo neither reads nor closes wakes gloo's thread only once.

    Otherwise the thread would use a whole processor until the rank ends.
    """
    before = dict(world.pids)
    error = fails(world, f"import time\n{HALF_READ}")
    assert "Rank 0 was waiting in recv" in str(error)
    world.execute(
        "from nbdist.worker.group.gloo_loop import watched_with\n"
        "watched = watched_with(get_ipython().kernel.group._gloo._listener)\n"
        "left = [each.is_reported_once for each in watched if each.is_shut_down]"
    )
    assert world.gather("left") == [[True], [], [], []]
    goes_on(world, before)


def test_waits_end_if_the_awaited_rank_cannot_come(world: World) -> None:
    """A rank is released if the awaited one failed, does not run the cell, or has finished it."""
    before = dict(world.pids)
    source = "if rank == 2: raise ValueError('bad')\nif rank == 0: dist.barrier(group=evens)"
    error = fails(world, source)
    assert "Rank 0 was waiting in barrier (line 2) and was released" in str(error)
    error = fails(world, "x = 1\ndist.barrier()", [0])
    assert str(error) == (
        "rank 0 waits in barrier, line 2; ranks 1-3 do not run this cell. "
        "The waiting ranks were released; no variables were lost."
    )
    fails(
        world,
        "if rank == 1: raise ValueError('bad')\n"
        "works = [dist.all_reduce(torch.ones(3_000_000), async_op=True) for _ in range(5)]\n"
        "works[-1].wait()",
    )
    error = fails(world, "if rank != 1:\n    dist.barrier()")
    assert isinstance(error, RanksReleased)
    said = "ranks 0,2-3 wait in barrier, line 2; rank 1 finished the cell without"
    assert str(error).startswith(said)
    goes_on(world, before)


DEAF = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"


STOPPED = {
    "a barrier": "if rank: time.sleep(600)\ndist.barrier()",
    # In the store, in code that ignores SIGINT.
    "a group": f"if rank: time.sleep(600)\n{DEAF}dist.new_group()",
    "a thread": "import threading\nthread = threading.Thread(target=dist.recv, args=(t,))\n"
    "if rank == 1: time.sleep(600)\nthread.start(); dist.recv(t, tag=1)",
}


@pytest.mark.parametrize("name", STOPPED)
def test_stop_ends_every_wait_without_losses(world: World, name: str) -> None:
    """Stop ends waits in collectives, in the store and in threads; no rank loses anything."""
    before = dict(world.pids)
    stop(world, run_for(world, f"t = torch.zeros(2)\n{STOPPED[name]}", 0.5))
    world.execute("import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)")
    goes_on(world, before)


ANSWERS_LATE = """
import time
from nbdist.worker.probe import Probe
quick = Probe.locate
def slow(probe):
    time.sleep(0.6)
    return quick(probe)
Probe.locate = slow
"""


def test_stop_releases_ranks_that_answer_late(world: World) -> None:
    """Ranks that do not say in time that they wait in a collective are released as well."""
    before = dict(world.pids)
    world.execute(ANSWERS_LATE)
    running = run_for(world, "if rank == 0: time.sleep(600)\ndist.barrier()", 0.7)
    press_stop(world, running)
    assert (running.unfinished, running.transcript.deaths) == ((), {})
    world.execute("Probe.locate = quick")
    goes_on(world, before)


@pytest.mark.parametrize("stuck", range(4))
def test_stop_releases_ranks_beside_one_in_c_code(world: World, stuck: int) -> None:
    """Whichever rank holds its GIL and cannot end a connection, the other ranks are released."""
    source = f"if rank == {stuck}: sum(iter(int, 1))\ndist.barrier()"
    running = run_for(world, source, 0.5)
    press_stop(world, running)
    assert {*running.transcript.errors} - {stuck} == {*range(4)} - {stuck}
    if running.unfinished:  # Stop has not ended the rank yet
        os.kill(world.pids[stuck], signal.SIGKILL)
        dispatch.wait(world.engine, running)
    world.execute(ALL_MEET)


NEVER_MEET = {
    "two collectives": (
        "if rank == 0:\n    dist.all_reduce(t)\nelse:\n    dist.barrier()",
        "rank 0 is in all_reduce (line 3), ranks 1-3 in barrier (line 5): these calls do not "
        "match and would wait forever",
    ),
    "groups": (
        "if rank == 0:\n    dist.all_reduce(t, group=evens)\nelse:\n    dist.all_reduce(t)",
        "rank 0 is in all_reduce (line 3), ranks 1-3 in all_reduce (line 5): all ranks wait for "
        "each",
    ),
    "making a group": (
        "if rank == 0:\n    dist.new_group()\nelse:\n    dist.barrier()",
        "rank 0 is in new_group (line 3), ranks 1-3 in barrier (line 5): all ranks wait for each "
        "other",
    ),
    "a message from any rank": (
        "if rank != 1:\n    dist.recv(t)",
        "ranks 0,2-3 wait in recv, line 3; rank 1 finished the cell without it",
    ),
    "one with a tag": (
        "if rank != 1:\n    dist.irecv(t, tag=7).wait()",
        "line 3; rank 1 finished the cell without it",
    ),
}


@pytest.mark.parametrize("name", NEVER_MEET)
def test_ranks_that_never_meet_are_released(world: World, name: str) -> None:
    """Ranks whose calls do not match are released without Stop; the error says who was where."""
    before, (source, told) = dict(world.pids), NEVER_MEET[name]
    error = fails(world, f"t = torch.ones(2)\n{source}")
    assert isinstance(error, RanksReleased)
    assert told in str(error)
    goes_on(world, before)


MEET_IN_THE_END = {
    "a rank that holds the GIL": "import ctypes\n"
    "if rank == 1: ctypes.PyDLL(None).sleep(3)\ndist.barrier()",
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
    "a long transfer": "t = torch.ones(25_000_000)\nfor _ in range(5): dist.broadcast(t, 0)",
    "a slow rank": "if rank == 2: time.sleep(3)\n"
    "late = dist.new_group([0, 2])\nif rank == 2: time.sleep(3)\n"
    "if rank in (0, 2): dist.all_reduce(t, group=late)",
}


@pytest.mark.parametrize("name", MEET_IN_THE_END)
def test_ranks_that_meet_in_the_end_go_on_waiting(world: World, name: str) -> None:
    """No rank is released while its call can complete, even if others have finished the cell."""
    world.execute(f"t = torch.zeros(2)\n{MEET_IN_THE_END[name]}")


def test_sizes_and_dtypes_that_differ_are_reported(world: World) -> None:
    """The error lists differing sizes and dtypes by rank, and the ranks whose result is wrong."""
    before = dict(world.pids)
    error = fails(world, "t = torch.ones(3 if rank == 1 else 2)\ndist.all_reduce(t)")
    assert isinstance(error, RanksReleased)
    for told in (
        "all_reduce (line 2), sizes differ: ",
        *("ranks 0,2-3 [2]", "rank 1 [3]"),
        "the result on ranks 0,3 is wrong. The waiting ranks were released",
    ):
        assert told in str(error)
    goes_on(world, before)
    # Gloo adds tensors of as many bytes; if the cell then fails, its error tells the dtypes.
    source = "t = torch.ones(4, dtype=torch.int32 if rank == 1 else torch.float32)\n"
    source += "dist.all_reduce(t)\n"
    # Rank 3 is then slow to report its dtype: a thread holds its GIL.
    slow = "import ctypes, time\nfrom threading import Timer\n"
    slow += "if rank == 3: Timer(0.1, lambda: ctypes.PyDLL(None).sleep(2)).start()\n"
    slow += "else: time.sleep(0.4)\n"
    error = fails(world, f"{source}{slow}assert t[0] == world_size")
    assert "Before that: all_reduce, dtypes differ: ranks 0,2-3 float32, rank 1 int32" in str(error)


def test_a_dead_rank_is_restarted_under_its_number(world: World) -> None:
    """A dead rank gets a new worker; the others, in a collective or the store, keep all."""
    before = dict(world.pids)
    dies = "import os, signal\nif rank == 0: os.kill(os.getpid(), signal.SIGSEGV)\n"
    error = fails(world, f"{dies}dist.all_reduce(torch.ones(1000))")
    assert isinstance(error, WorkerDied)
    assert (error.rank, error.pid) == (0, before[0])
    assert "was killed by SIGSEGV" in str(error)
    said = (
        r"Rank 0 was restarted and its variables \((sharded, )?net, .+\) are gone; other ranks are"
    )
    assert re.search(said, str(error))
    assert {rank for rank in before if before[rank] != world.pids[rank]} == {0}
    # A new group works too, though survivors still hold older groups.
    world.execute(ALL_MEET)
    error = fails(world, "import os\nif rank == 1: os._exit(3)\ndist.new_group()")
    assert isinstance(error, WorkerDied)
    assert world.gather("globals().get('kept')") == [None, None, 2, 3]
    world.execute(ALL_MEET)


def test_a_message_too_long_for_its_tensor_is_explained(started: World) -> None:
    """Gloo ends a rank that receives more than its tensor holds; the error lists the dtypes."""
    source = "t = torch.ones(4, dtype=torch.float64 if rank == 1 else torch.float32)\n"
    error = fails(started, f"{source}dist.all_reduce(t)")
    assert isinstance(error, WorkerDied)
    said = "received more than its tensor holds: sizes or dtypes differ between ranks in all_reduce"
    assert f"{said} (" in str(error)
    assert "rank 1 float64 [4]" in str(error)


ENDS = """
import os, time
from pathlib import Path
try:
    Path({folder!r}, f"begun{{rank}}").touch()
    time.sleep(1)
    {body}
finally:
    Path({folder!r}, f"ended{{rank}}").touch()
"""
"""A cell that leaves a file when it begins on a rank, and another once its body has ended."""


@pytest.mark.parametrize(
    ("body", "patience", "error"),
    [
        ("assert rank != 1; dist.barrier()", Patience(), AssertionError),
        ("os._exit(3) if rank == 1 else dist.barrier()", Patience(), WorkerDied),
        ("dist.barrier() if rank else dist.all_reduce(torch.ones(1))", Patience(), RanksReleased),
        ("time.sleep(600)", Patience(timeout=1.0), CellTimeout),
    ],
    ids=["error", "death", "mismatch", "timeout"],
)
def test_a_blocked_notebook_keeps_nobody_waiting(
    world: World, tmp_path: Path, body: str, patience: Patience, error: type[Exception]
) -> None:
    """Ranks are released and stopped while the notebook's process is blocked in C code."""
    source = ENDS.format(body=body, folder=str(tmp_path))
    running = world.submit(world.task(source), patience)
    wait_until(lambda: len([*tmp_path.glob("begun*")]) == 4)
    ranks = "023" if error is WorkerDied else "0123"
    have_ended = " && ".join(f"test -e {tmp_path}/ended{rank}" for rank in ranks)
    # `PyDLL` holds the GIL, so neither the main thread nor any other thread of this process runs.
    command = f"for i in $(seq {10 * SOON}); do {have_ended} && exit 0; sleep 0.1; done; exit 1"
    assert ctypes.PyDLL(None).system(command.encode()) == 0
    for _ in world.follow(running):
        pass
    with pytest.raises(error):
        dispatch.check(world.engine, running)
    world.execute(ALL_MEET)


DIES_LATER = """
import os, time
open(f"{folder}/begun{{rank}}", "w").close()
while not os.path.exists("{folder}/gate"): time.sleep(0.01)
if rank == 1: os._exit(3)
dist.barrier()
"""


def test_a_dead_rank_is_replaced_while_the_notebook_is_blocked(
    world: World, tmp_path: Path
) -> None:
    """The agent starts a new worker, and the ranks form their group, without the notebook."""
    world.execute("kept = rank")
    before = dict(world.pids)
    (agent,) = psutil.Process(world.engine.connection.link.agent.pid).children()
    children = "|".join(str(each.pid) for each in agent.children())
    running = world.submit(world.task(DIES_LATER.format(folder=tmp_path)))
    wait_until(lambda: len([*tmp_path.glob("begun*")]) == 4)
    is_replaced = f"test ! -e /proc/{before[1]} && pgrep -P {agent.pid} | grep -qvxE '{children}'"
    command = (
        f"touch {tmp_path}/gate; "
        f"for i in $(seq {10 * SOON}); do {is_replaced} && exit 0; sleep 0.1; done; exit 1"
    )
    assert ctypes.PyDLL(None).system(command.encode()) == 0
    now = time.time()
    for _ in world.follow(running):
        pass
    with pytest.raises(WorkerDied, match=r"rank 1 .* exited with code 3.*Rank 1 was restarted"):
        dispatch.check(world.engine, running)
    assert psutil.Process(world.pids[1]).create_time() < now
    assert {rank: pid for rank, pid in world.pids.items() if rank != 1} == {
        rank: pid for rank, pid in before.items() if rank != 1
    }
    assert world.gather("globals().get('kept')") == [0, None, 2, 3]
    world.execute(ALL_MEET)
