"""Tests of `nbdist.world` with real workers: cells, output, failures, and ways out of each.

On workers that the fork server forked; what can differ, also on workers that were spawned.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from nbdist.agent.worker_output import LOST_AFTER
from nbdist.errors import AgentLost, UsageError, WorkerDied, WorkerError, WorldNotStarted
from nbdist.output.events import Clear, Display, Text, Update
from nbdist.world.states import State
from nbdist.world.world import World
from tests.cells import begin, follow, run, run_well
from tests.waiting import wait_until

pytestmark = pytest.mark.shared_world


@pytest.fixture(scope="module", params=["fork"])
def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """A world for all tests of the module; one rank where it imports torch anew."""
    fork = request.param == "fork"
    logs = tmp_path_factory.mktemp("logs")
    with World(4 if fork else 1, fork=fork, log_dir=str(logs), name="test") as world:
        yield world


@pytest.fixture
def world(started: World) -> World:
    """The world, ready: started anew if the test before has left it otherwise."""
    started.session.receive_waiting()
    if started.state is not State.READY:
        started.restart()
    return started


def is_running(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- where a cell runs ------------------------------------------------------------------


def test_process_inherits_the_notebooks_folder_and_path(world: World) -> None:
    """Workers import what the notebook imports and open files where it does."""
    found = world.gather("(__import__('os').getcwd(), __import__('sys').path)")
    for folder, path in found:
        assert folder == os.getcwd()
        # ipykernel adds the current folder, as it has done in a notebook, and IPython 7 the
        # folder of its extensions.
        path = [entry for entry in path if not entry.endswith("/IPython/extensions")]
        assert [entry for entry in path if entry] == [entry for entry in sys.path if entry]


def test_collectives(world: World) -> None:
    """All ranks share a group: all_reduce, barrier and all_gather_object give right results."""
    run_well(
        world,
        "t = torch.ones(3) * rank\ndist.all_reduce(t)\ndist.barrier()\n"
        "all_of_them = [None] * world_size\ndist.all_gather_object(all_of_them, rank)",
    )
    total = float(sum(range(world.size)))
    for rank, (t, ranks) in enumerate(world.gather("(t, all_of_them)")):
        assert t.tolist() == [total] * 3, rank
        assert ranks == [*range(world.size)]


@pytest.mark.parametrize(
    ("started", "method"), [("fork", "fork"), ("spawn", "spawn")], indirect=["started"]
)
def test_data_loader_with_workers(world: World, method: str) -> None:
    """A data set class of a cell works in a DataLoader with worker processes."""
    ran = run_well(
        world,
        "class Squares(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, i): return offset() + i * i\n"
        "def offset(): return 100\n"
        "loader = torch.utils.data.DataLoader(\n"
        f"    Squares(), batch_size=4, num_workers={2 if method == 'fork' else 1},\n"
        f"    multiprocessing_context='{method}')\n"
        "print([batch.tolist() for batch in loader])\n"
        "del loader",
    )
    assert ran.lines() == ["[[100, 101, 104, 109], [116, 125, 136, 149]]"]
    assert ran.stderr() == []


# --- output -----------------------------------------------------------------------------


def test_order_of_everything(world: World) -> None:
    """Text, descriptors, child processes, figures and stderr keep one order."""
    ran = run_well(
        world,
        "import os, sys, subprocess\nfrom IPython.display import display\n"
        "for i in range(3):\n"
        "    print('print', i)\n"
        "    _ = os.write(1, b'write %d\\n' % i)\n"
        "    display(i)\n"
        "    print('stderr', i, file=sys.stderr)\n"
        "    _ = subprocess.run(['echo', 'child', str(i)])\n",
    )
    expected = [
        line
        for i in range(3)
        for line in (f"print {i}", f"write {i}", f"<{i}>", f"stderr {i}", f"child {i}")
    ]
    for rank in range(world.size):
        assert ran.lines(rank) == expected
        assert ran.stderr(rank) == ["stderr 0", "stderr 1", "stderr 2"]


def test_text_is_not_changed(world: World) -> None:
    """Leading spaces, tabs, missing newlines, colours, unicode: as they were printed."""
    said = "  two spaces\ttab\n\n\x1b[31mred\x1b[0m é€😀 no newline"
    ran = run_well(world, f"print({said!r}, end='')")
    text = "".join(output.text for rank, output in ran.news if (rank, type(output)) == (0, Text))
    assert text == said


def test_c_stdio_is_flushed_at_the_end(world: World) -> None:
    """What C code printed and did not flush belongs to the cell that ran it."""
    ran = run_well(world, "import ctypes\n_ = ctypes.CDLL(None).printf(b'from C\\n')")
    assert ran.lines() == ["from C"]


def test_ten_megabyte_line(world: World) -> None:
    """A line of 10 MB is in the log file in full, and accounted for in the notebook."""
    ran = run_well(world, "print('x' * 10_000_000)\nprint('end')", ranks=(0,))
    assert ran.lines()[-1] == "end"
    assert f"{'x' * 10_000_000}\nend\n" in (Path(world.logs[0]) / "stdout.log").read_text()


def test_one_megabyte_to_stderr_with_the_gil_held(world: World) -> None:
    """C code that fills stderr while it holds the GIL does not block its rank."""
    ran = run_well(
        world,
        "import ctypes\n"
        "line = b'e' * 999 + b'\\n'\n"
        "written = ctypes.PyDLL(None).write(2, line * 1000, 1_000_000)\n"
        "print(written)",
    )
    for rank in range(world.size):
        assert "1000000" in ran.lines(rank)
        assert ran.running.transcript[rank].line_count == 1001


def test_display_update_clear(world: World) -> None:
    """`display_id` updates and `clear_output` do on each rank what they do in a notebook."""
    ran = run_well(
        world,
        "from IPython.display import display, clear_output\n"
        "print('gone')\nclear_output()\nshown = display('first', display_id=True)\n"
        "print('kept')\nshown.update(f'second {rank}')\n",
    )
    for rank in range(world.size):
        assert ran.lines(rank) == [f"<'second {rank}'>", "kept"]
    kinds = {type(output) for _, output in ran.news}
    assert kinds >= {Clear, Display, Update, Text}


def test_display_in_a_forked_child(world: World) -> None:
    """A child process that displays something, which it cannot, holds nobody up."""
    ran = run_well(
        world,
        "import os\nif (pid := os.fork()) == 0:\n    display(5)\n    os._exit(0)\n"
        "_ = os.waitpid(pid, 0)\ndisplay(6)\nprint('end')",
    )
    assert ran.lines()[-2:] == ["<6>", "end"]
    assert ran.running.transcript.elapsed() < LOST_AFTER


def test_threads_print_and_display_at_once(world: World) -> None:
    """Text and displays of several threads arrive whole."""
    log = Path(world.logs[0]) / "stdout.log"
    before, errors = log.stat().st_size, log.with_name("stderr.log").stat().st_size
    ran = run_well(
        world,
        "import sys, threading\nfrom IPython.display import display\n"
        "def say(what, where):\n"
        "    for _ in range(10): print(what * 100_000, file=where)\n"
        "def show():\n"
        "    for number in range(50): display(number)\n"
        "threads = [threading.Thread(target=say, args=('€', sys.stdout)),\n"
        "           threading.Thread(target=say, args=('e', sys.stderr)),\n"
        "           threading.Thread(target=show)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n",
        ranks=(0,),
    )
    text = log.read_bytes()[before:].decode()
    assert text.count("€") == 10 * 100_000
    assert "\ufffd" not in text
    assert "\x1b_" not in text
    shown = [output.data["text/plain"] for _, output in ran.news if isinstance(output, Display)]
    assert shown == [str(number) for number in range(50)]
    assert log.with_name("stderr.log").read_bytes()[errors:].count(b"e") == 10 * 100_000


# --- values back ------------------------------------------------------------------------


def test_fetch_of_expressions(world: World) -> None:
    """`execute` brings back values of names and expressions after the source has run."""
    result = world.execute("x = rank * 2", fetch=("x", "x + 1"))
    assert list(result) == [{"x": 2 * r, "x + 1": 2 * r + 1} for r in range(world.size)]
    assert list(world.execute("", fetch=("x",))) == [2 * rank for rank in range(world.size)]


def test_names_go_along(world: World) -> None:
    """`execute(names=...)` binds values on the ranks first."""
    result = world.execute("y = [a + rank, b.sum()]", names={"a": 1, "b": np.ones(5)}, fetch=("y",))
    assert list(result) == [[1 + rank, 5.0] for rank in range(world.size)]


# --- errors -----------------------------------------------------------------------------


def test_one_rank_raises(world: World) -> None:
    """The error names the rank; the other ranks' work is kept; the traceback shows the line."""
    ran = run(world, "done = rank\nif rank == 1:\n    raise KeyError('lost')  # here")
    assert isinstance(ran.error, WorkerError)
    assert isinstance(ran.error, KeyError)
    assert (ran.error.rank, ran.error.pid, [*ran.error.errors]) == (1, world.pids[1], [1])
    assert f"1 of {world.size} ranks failed (1); first: rank 1 after " in str(ran.error)
    assert str(ran.error).endswith("KeyError: 'lost'")
    traceback = ran.traceback(1)
    assert "raise KeyError('lost')  # here" in traceback
    assert "nbdist" not in traceback
    assert world.gather("done") == [*range(world.size)]


def test_all_raise_and_the_earliest_is_the_cause(world: World) -> None:
    """The rank that failed first is named first, whatever its number."""
    ran = run(world, "import time\ntime.sleep(0.4 * (world_size - 1 - rank))\nraise OSError(rank)")
    assert isinstance(ran.error, WorkerError)
    assert ran.error.rank == world.size - 1
    assert len(ran.error.errors) == world.size


REPLACED = r"was restarted and its variables \(.+\) are gone; other ranks are unaffected\."


def test_os_exit(world: World) -> None:
    """`os._exit(3)` on one rank is told with its code; what it said is kept; it is replaced."""
    ran = run(world, "import os\nprint('last words')\nif rank == 1:\n    os._exit(3)")
    assert isinstance(ran.error, WorkerDied)
    assert ran.error.exit_code == 3
    assert "rank 1" in str(ran.error)
    assert "exited with code 3" in str(ran.error)
    assert re.search(REPLACED, str(ran.error))
    assert ran.lines(1) == ["last words"]
    assert repr(world) == f"<World {world.size} ranks, ready>"
    assert world.gather("rank") == [*range(world.size)]


def test_a_gpu_error_that_lasts(world: World) -> None:
    """Its rank is restarted by itself, as nothing works on its GPU; the others lose nothing."""
    run_well(world, "kept = rank")
    before = dict(world.pids)
    said = "CUDA error: device-side assert triggered"
    ran = run(
        world,
        "kind = getattr(torch, 'AcceleratorError', RuntimeError)\n"
        f"if rank == 1: raise kind({said!r})\ndist.barrier()",
    )
    assert isinstance(ran.error, RuntimeError)
    assert re.search(
        rf"{said}. .*A GPU error \(device-side assert triggered\) made the process of rank 1 "
        r"unusable. Rank 1 was restarted and its variables \(.+\) are gone; other ranks are",
        str(ran.error),
    )
    assert "`%dist_restart --debug`" in ran.failure(1).account[0]
    assert {rank for rank in before if before[rank] != world.pids[rank]} == {1}
    run_well(world, "dist.barrier()")
    assert world.gather("globals().get('kept')") == [0, None, 2, 3]


def test_killed_while_idle(world: World) -> None:
    """A worker that dies between cells is seen by the status, and replaced by the next cell."""
    run_well(world, "kept = rank")
    world.session.take_replaced()
    os.kill(world.pids[1], signal.SIGKILL)

    def is_told() -> bool:
        world.session.receive_waiting()
        return world.state is State.BROKEN

    wait_until(is_told, "the death of the worker is known")
    assert [row.state for row in world.status()].count("dead") == 1
    run_well(world, "dist.barrier()")
    assert world.session.take_replaced().keys() == {1}
    expected = [None if rank == 1 else rank for rank in range(world.size)]
    assert world.gather("globals().get('kept')") == expected


# --- stop -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("while True: pass", "KeyboardInterrupt"),
        ("import time\ntime.sleep(600)", "KeyboardInterrupt"),
        ("import subprocess\n_ = subprocess.run(['sleep', '600'])", "KeyboardInterrupt"),
        # What ipykernel does with a coroutine.
        ("import asyncio\nawait asyncio.sleep(600)", "CancelledError"),
    ],
)
def test_interrupt(world: World, source: str, name: str) -> None:
    """Stop raises KeyboardInterrupt in Python code, and everything is kept."""
    run_well(world, "kept = rank")
    running = begin(world, source)
    asked = time.monotonic()
    world.interrupt()
    ran = follow(world, running)
    sys.stdout.write(f"{time.monotonic() - asked:.2f} s\n")
    assert isinstance(ran.error, WorkerError)
    assert {failure.name for failure in ran.error.errors.values()} == {name}
    assert world.state is State.READY
    assert world.gather("kept") == [*range(world.size)]


def test_interrupt_of_a_shell_command(world: World) -> None:
    """Stop ends a `!command` as it does in a notebook, where the cell goes on after it."""
    running = begin(world, "!echo started; sleep 600\nprint('after')")

    def all_have_started() -> bool:
        world.session.receive(0.05)
        return all(track.line_count >= 2 for track in running.transcript)

    wait_until(all_have_started, "the commands run")
    world.interrupt()
    ran = follow(world, running)
    assert ran.error is None
    for rank in range(world.size):
        assert ran.lines(rank)[-1] == "after"


SLOW_TO_LEAVE = """
source = "def show(*_, **__): import time; print('leaves'); time.sleep(2.8)"
exec(compile(source, "elsewhere.py", "exec"))
get_ipython().set_custom_exc((KeyboardInterrupt,), show)
"""

NEVER_LEAVES = """
import signal, time
if rank == 1:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
while True: time.sleep(0.1)
"""


def test_rank_that_is_slow_to_leave(world: World) -> None:
    """Who has left the cell when others are killed is waited for, and keeps its variables."""
    run_well(world, f"kept = rank\n{SLOW_TO_LEAVE}")
    running = begin(world, NEVER_LEAVES)
    world.interrupt()
    ran = follow(world, running)
    assert isinstance(ran.error, WorkerDied)
    kept = world.gather("globals().get('kept')")
    assert kept == [rank if rank != 1 else None for rank in range(world.size)]
    world.restart()


def test_restart_while_a_cell_runs(world: World) -> None:
    """A restart ends a running cell and all it started, and the world is ready."""
    running = begin(world, "import subprocess\n_ = subprocess.run(['sleep', '600'])")
    children = [
        child.pid
        for pid in world.pids.values()
        for child in psutil.Process(pid).children(recursive=True)
    ]
    assert len(children) == world.size
    world.restart()
    assert running.unfinished == (*range(world.size),)
    assert world.gather("rank") == [*range(world.size)]
    wait_until(lambda: not any(map(is_running, children)), "the cell's children have ended")


def test_restart(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """New workers: a working group, no variables, the environment and folder of now."""
    run_well(world, "gone = 1")
    before = dict(world.pids)
    monkeypatch.setenv("NBDIST_TEST_NEW", "1")
    monkeypatch.chdir(tmp_path)
    world.restart()
    assert set(before.values()).isdisjoint(world.pids.values())
    assert not any(psutil.pid_exists(pid) for pid in before.values())
    assert world.gather("'gone' in globals()") == [False] * world.size
    run_well(world, "dist.barrier()")
    found = world.gather("(os := __import__('os')).environ['NBDIST_TEST_NEW'], os.getcwd()")
    assert found == [("1", str(tmp_path))] * world.size
    world.shutdown()  # the next test starts them, with the environment that is there then


@pytest.mark.own_agent
def test_agent_killed() -> None:
    """Status has no workers any more, a cell says once that it is gone; a restart works."""
    with World(2, log_dir="") as world:
        workers = list(world.pids.values())
        os.kill(world.session.link.agent.pid, signal.SIGKILL)
        wait_until(lambda: world.status() == () and world.state is State.LOST, "it is known")
        wait_until(lambda: not any(map(psutil.pid_exists, workers)), "the workers end with it")
        with pytest.raises(AgentLost, match="was killed by SIGKILL"):
            run(world, "1")
        world.restart()
        assert world.gather("rank") == [0, 1]
        running = begin(world, "import time\ntime.sleep(600)")
        os.kill(world.session.link.agent.pid, signal.SIGKILL)
        ran = follow(world, running)
        assert isinstance(ran.error, AgentLost)
        assert "%dist_restart" in str(ran.error)


@pytest.mark.world
def test_it_starts_by_itself() -> None:
    """Where nobody has started it, whatever runs something does; after its end nothing does."""
    world = World(2, log_dir="")
    try:
        assert world.run(os.getpid).rank(1) == world.pids[1]
    finally:
        world.shutdown()
    with pytest.raises(WorldNotStarted):
        world.run(os.getpid)


def test_shutdown_and_start_again(world: World) -> None:
    """A world that was shut down takes no cells, and can be started again."""
    world.shutdown()
    assert repr(world) == f"<World {world.size} ranks, stopped>"
    with pytest.raises(WorldNotStarted, match="%dist_init -n 4"):
        run(world, "1")
    assert world.status() == ()
    world.shutdown()
    world.start()
    assert world.gather("rank") == [*range(world.size)]


def test_status(world: World) -> None:
    """One row per rank with pid, state, device and memory, also while ranks are busy."""
    rows = world.status()
    assert [row.rank for row in rows] == [*range(world.size)]
    assert {row.pid for row in rows} == set(world.pids.values())
    assert {row.state for row in rows} == {"idle"}
    assert all(row.device == "cpu" and row.memory > 1 << 20 for row in rows)
    running = begin(world, "import time\ntime.sleep(600)")
    assert {row.state for row in world.status()} == {"busy"}
    with pytest.raises(UsageError, match="still running"):
        run(world, "1")
    world.interrupt()
    follow(world, running)
