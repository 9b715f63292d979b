"""Tests of `nbdist.world` with real workers: cells, output, failures, Stop, restarts and ends."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from nbdist.agent.worker_output import LOST_AFTER
from nbdist.errors import (
    AgentLost,
    BadRanks,
    RanksNotStopped,
    UsageError,
    WorkerError,
    WorldNotStarted,
)
from nbdist.output.events import Clear, Display, DisplayUpdate, Text
from nbdist.values.linked import write
from nbdist.values.links import Links
from nbdist.values.payload import Identity, pack_frames
from nbdist.world import dispatch, inbox, restarts
from nbdist.world.name_table import Sent
from nbdist.world.sent_objects import Parcel
from nbdist.world.states import WorldState
from nbdist.world.world import World
from tests.cells import begin, follow, run, run_well
from tests.waiting import SOON, wait_until

pytestmark = pytest.mark.shared_world


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(3, log_dir=str(tmp_path_factory.mktemp("logs")), name="test") as world:
        yield world


@pytest.fixture
def world(started: World) -> World:
    """The ready world, which is restarted if the previous test has left it in another state."""
    inbox.receive_waiting(started.engine)
    if started.state is not WorldState.READY:
        started.restart()
    return started


def test_a_data_loader_finds_a_cells_classes(world: World) -> None:
    """A data set whose class a cell defines works in a DataLoader whose worker is spawned."""
    ran = run_well(
        world,
        "class Squares(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, i): return offset() + i * i\n"
        "def offset(): return 100\n"
        "loader = torch.utils.data.DataLoader(\n"
        "    Squares(), batch_size=4, num_workers=1, multiprocessing_context='spawn')\n"
        "print([batch.tolist() for batch in loader])\n"
        "del loader",
        ranks=(0,),
    )
    assert ran.lines() == ["[[100, 101, 104, 109], [116, 125, 136, 149]]"]
    assert ran.stderr() == []


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_return_objects_of_a_cells_classes(world: World, method: str) -> None:
    """Objects from a DataLoader's process are of the cell's own classes, also of nested classes."""
    ran = run_well(
        world,
        "import enum\n"
        "class Batch:\n"
        "    loaded = 0\n"
        "    class Kind(enum.Enum):\n"
        "        TEXT = 1\n"
        "    def __init__(self, kind): self.kind = kind\n"
        "class Texts(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 1\n"
        "    def __getitem__(self, i):\n"
        "        Batch.loaded += 1\n"
        "        return Batch(Batch.Kind.TEXT)\n"
        "loader = torch.utils.data.DataLoader(\n"
        "    Texts(), batch_size=None, num_workers=1, timeout=30,\n"
        f"    multiprocessing_context={method!r})\n"
        "for batch in loader:\n"
        "    print(isinstance(batch, Batch), batch.kind is Batch.Kind.TEXT, Batch.loaded)\n"
        "del loader",
        ranks=(0,),
    )
    assert ran.lines() == ["True True 0"]


def test_functions_in_a_forked_pool_use_its_globals(world: World) -> None:
    """In a pool's process, a cell's functions use the globals that an initializer has set there."""
    ran = run_well(
        world,
        "import multiprocessing\n"
        "def begin(first):\n"
        "    global count\n"
        "    count = first\n"
        "def number():\n"
        "    global count\n"
        "    count += 1\n"
        "    return count\n"
        "with multiprocessing.get_context('fork').Pool(1, begin, (5,)) as pool:\n"
        "    print([pool.apply(number) for _ in range(3)])",
        ranks=(0,),
    )
    assert ran.lines() == ["[6, 7, 8]"]


def test_a_fork_servers_pools_end_with_their_rank(world: World) -> None:
    """Functions of a cell run in pools of a fork server, whose processes end with the rank."""
    ran = run_well(
        world,
        "import multiprocessing, psutil\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "context = multiprocessing.get_context('forkserver')\n"
        "def square(x): return x * x + offset()\n"
        "class Sides: count: int\n"
        "def offset(): return rank + 4 * (Sides.__annotations__ != {'count': int})\n"
        "pool = context.Pool(2)\n"
        "with ProcessPoolExecutor(2, mp_context=context) as executor:\n"
        "    later = pool.map_async(square, range(3))\n"
        "    print([*executor.map(square, range(3))], later.get())\n"
        "print(*(each.pid for each in psutil.Process().children(recursive=True)))",
    )
    children = []
    for rank in range(world.size):
        squares = [rank, 1 + rank, 4 + rank]
        results, pids = ran.lines(rank)
        assert results == f"{squares} {squares}"
        children += [int(pid) for pid in pids.split()]
    assert len(children) >= 4 * world.size  # the fork server and the resource tracker included
    world.restart()
    wait_until(lambda: not any(map(psutil.pid_exists, children)), "the ranks' children have ended")


# --- output -----------------------------------------------------------------------------


def test_outputs_of_all_kinds_keep_their_order(world: World) -> None:
    """Text, displays, stderr, and output of descriptors and child processes keep their order."""
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
    each = "print {0}\nwrite {0}\n<{0}>\nstderr {0}\nchild {0}"
    for rank in range(world.size):
        assert ran.lines(rank) == "\n".join(map(each.format, range(3))).splitlines()
        assert ran.stderr(rank) == ["stderr 0", "stderr 1", "stderr 2"]


def test_text_is_not_changed(world: World) -> None:
    """Spaces, tabs, colours, unicode and missing newlines arrive as printed, also by C code."""
    printed = "  two spaces\ttab\n\n\x1b[31mred\x1b[0m é€😀 no newline"
    ran = run_well(world, f"print({printed!r}, end='')")
    text = "".join(output.text for rank, output in ran.news if (rank, type(output)) == (0, Text))
    assert text == printed
    # Text that C code has not flushed belongs to the cell that ran the code.
    ran = run_well(world, "import ctypes\n_ = ctypes.CDLL(None).printf(b'from C\\n')")
    assert ran.lines() == ["from C"]


def test_much_text_is_kept_and_blocks_no_rank(world: World) -> None:
    """The log has a line of 10 MB in full; 1 MB to stderr with the GIL held blocks no rank."""
    ran = run_well(world, "print('x' * 10_000_000)\nprint('end')", ranks=(0,))
    assert ran.lines()[-1] == "end"
    assert f"{'x' * 10_000_000}\nend\n" in (Path(world.logs[0]) / "stdout.log").read_text()
    line = "import ctypes\nline = b'e' * 999 + b'\\n'\n"
    ran = run_well(world, f"{line}print(ctypes.PyDLL(None).write(2, line * 1000, 1_000_000))")
    for rank in range(world.size):
        assert "1000000" in ran.lines(rank)
        assert ran.running.transcript[rank].line_count == 1001


def test_displays_are_updated_and_cleared_by_rank(world: World) -> None:
    """Displays behave on each rank as in a notebook; a forked child's display delays no rank."""
    ran = run_well(
        world,
        "from IPython.display import display, clear_output\n"
        "print('gone')\nclear_output()\nshown = display('first', display_id=True)\n"
        "print('kept')\nshown.update(f'second {rank}')\n",
    )
    for rank in range(world.size):
        assert ran.lines(rank) == [f"<'second {rank}'>", "kept"]
    kinds = {type(output) for _, output in ran.news}
    assert kinds >= {Clear, Display, DisplayUpdate, Text}
    ran = run_well(
        world,
        "import os\nif (pid := os.fork()) == 0:\n    display(5)\n    os._exit(0)\n"
        "_ = os.waitpid(pid, 0)\ndisplay(6)\nprint('end')",
    )
    assert ran.lines()[-2:] == ["<6>", "end"]
    assert ran.running.transcript.elapsed() < LOST_AFTER


# --- values that come back --------------------------------------------------------------


def test_execute_binds_names_and_fetches_values(world: World) -> None:
    """`execute` binds names first, and brings back names and expressions afterwards."""
    result = world.execute("x = rank * 2", fetch=("x", "x + 1"))
    assert list(result) == [{"x": 2 * r, "x + 1": 2 * r + 1} for r in range(world.size)]
    result = world.execute("y = [a + rank, b.sum()]", names={"a": 1, "b": np.ones(5)}, fetch=("y",))
    assert list(result) == [[1 + rank, 5.0] for rank in range(world.size)]


def test_only_received_names_are_recorded(world: World) -> None:
    """The table has a name only if ranks could rebuild its value; new workers have no names."""
    engine = world.engine
    restarts.restart(engine)
    assert engine.names.owners() == {}
    no_number = type("Bad", (), {"__reduce__": lambda self: (int, ("x",))})()
    for name, value in (("bad", no_number), ("given", 1)):
        frames = write({name: value}, [], Links(), {}, (), engine.names.namespace).frames
        payload, _ = pack_frames(frames)
        ranks = range(engine.size)
        task = engine.task(names=dict.fromkeys(ranks, payload))
        parcel = Parcel({name: Sent(type(value), Identity(value))})
        dispatch.wait(engine, dispatch.submit(engine, task, shipped=dict.fromkeys(ranks, parcel)))
    assert engine.names.owners() == {"given": ("notebook", {0, 1, 2})}


def test_unknown_ranks_are_refused(world: World) -> None:
    """Ranks that the world does not have, and `ranks` as a plain number, are refused."""
    for ranks in ("3", [7], [-4], []):
        with pytest.raises(BadRanks, match=r"selects no ranks: .+ There are ranks 0-2"):
            world.task("x = 1", ranks=ranks)
    with pytest.raises(UsageError, match=r"`ranks=0`: .+ list: `ranks=\[0\]`"):
        world.execute("x = 1", ranks=0)  # type: ignore[arg-type]


def test_each_call_runs_on_the_ranks_that_it_names(world: World, tmp_path: Path) -> None:
    """Methods take `ranks` as numbers or as the text of `-r`, and `rank` for a single rank."""
    script = tmp_path / "who.py"
    script.write_text("rank = int(__import__('os').environ['RANK'])")
    world.execute("mine = rank")
    for number, on, selected in (
        (0, {"rank": 1}, [1]),
        (1, {"rank": np.int64(-1)}, [2]),
        (2, {"ranks": [0, 2]}, [0, 2]),
        (3, {"ranks": (1,)}, [1]),
        (4, {"ranks": range(2)}, [0, 1]),
        (5, {"ranks": "::2"}, [0, 2]),
        (6, {"ranks": "1-2"}, [1, 2]),
        (7, {"ranks": "all"}, [0, 1, 2]),
        (8, {}, [0, 1, 2]),
    ):
        for called in (
            world.execute("rank", **on),
            world.run(lambda: int(os.environ["RANK"]), **on),
            world.run_script(str(script), **on),
            world.call("memory.clean", **on),
        ):
            assert [*called.keys()] == selected
        gathered = world.gather("mine", **on)
        assert gathered == (selected[0] if "rank" in on else selected)
        world.scatter("part", [number] * len(selected), **on)
        parts = world.gather("globals().get('part', [])")
        assert [rank for rank in range(3) if parts[rank] == [number]] == selected
        assert [each.rank for each in world.stacks(**on)] == selected


def test_listed_ranks_get_the_parts_in_that_order(world: World) -> None:
    """`scatter` gives the first part to the first rank of a list, and one rank the whole value."""
    world.scatter("part", [10, 11, 12, 13], ranks=[2, 0, 2])
    assert world.gather("part", ranks="0,2") == [[12, 13], [10, 11]]
    world.scatter("part", [1, 2, 3], rank=1)
    assert world.gather("part", rank=1) == [1, 2, 3]


# --- errors -----------------------------------------------------------------------------


def test_a_lasting_gpu_error_restarts_its_rank(world: World) -> None:
    """A rank whose process cannot use its GPU any more is restarted; other ranks keep variables."""
    run_well(world, "kept = rank")
    message = "CUDA error: device-side assert triggered"
    ran = run(
        world,
        "kind = getattr(torch, 'AcceleratorError', RuntimeError)\n"
        f"if rank == 1: raise kind({message!r})\ndist.barrier()",
    )
    assert isinstance(ran.error, RuntimeError)
    assert re.search(
        rf"{message}. .*A GPU error \(device-side assert triggered\) made the process of rank 1 "
        r"unusable. Rank 1 was restarted and its variables \(.+\) are gone; other ranks are",
        str(ran.error),
    )
    assert "`%dist_restart --debug`" in ran.failure(1).account[0]
    run_well(world, "dist.barrier()")
    assert world.gather("globals().get('kept')") == [0, None, 2]


# --- Stop, restarts and shutdowns -------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("while True: pass", "KeyboardInterrupt"),
        ("import subprocess\n_ = subprocess.run(['sleep', '600'])", "KeyboardInterrupt"),
        # ipykernel cancels a coroutine instead of raising KeyboardInterrupt.
        ("import asyncio\nawait asyncio.sleep(600)", "CancelledError"),
    ],
)
def test_an_interrupt_keeps_all_variables(world: World, source: str, name: str) -> None:
    """Stop raises KeyboardInterrupt in Python code, or cancels a coroutine; variables are kept."""
    run_well(world, "kept = rank")
    running = begin(world, source)
    world.interrupt()
    ran = follow(world, running)
    assert isinstance(ran.error, WorkerError)
    assert {failure.name for failure in ran.error.errors.values()} == {name}
    assert world.state is WorldState.READY
    assert world.gather("kept") == [*range(world.size)]


def test_the_first_stop_kills_no_rank_that_catches_it(world: World) -> None:
    """A rank that catches KeyboardInterrupt and goes on is not killed by the first Stop."""
    before = dict(world.pids)
    running = begin(
        world,
        "import time\ncaught, end = [], time.monotonic() + 6\nwhile time.monotonic() < end:\n"
        "    try:\n        time.sleep(1)\n"
        "    except KeyboardInterrupt:\n        caught.append(rank)",
    )
    world.interrupt()
    assert isinstance(follow(world, running).error, RanksNotStopped)
    world.execute("pass")  # waits for all ranks
    assert world.pids == before
    assert {*world.gather("caught[0]")} == {*range(world.size)}


def test_restart_ends_a_cell(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No other cell runs beside a running cell; a restart ends the cell and all that it started.

    New workers have the environment and folder that the notebook has at the restart.
    """
    run_well(world, "gone = 1")
    before = [*world.pids.values()]
    running = begin(world, "import subprocess\nsubprocess.run(['sleep', '601'])")

    def children() -> list[psutil.Process]:
        below = (child for pid in before for child in psutil.Process(pid).children(recursive=True))
        # `as_dict` has None for a process that has ended.
        return [each for each in below if each.as_dict(["cmdline"])["cmdline"] == ["sleep", "601"]]

    wait_until(lambda: len(children()) == world.size, "all have begun")
    started = children()
    assert {row.state for row in world.status()} == {"busy"}
    with pytest.raises(UsageError, match="still running"):
        run(world, "1")
    monkeypatch.setenv("NBDIST_TEST_NEW", "1")
    monkeypatch.chdir(tmp_path)
    world.restart()
    assert running.unfinished == (*range(world.size),)
    assert not any(map(psutil.pid_exists, before))
    assert psutil.wait_procs(started, timeout=SOON)[1] == []
    assert world.gather("'gone' in globals()") == [False] * world.size
    run_well(world, "dist.barrier()")
    environments = world.gather("(os := __import__('os')).environ['NBDIST_TEST_NEW'], os.getcwd()")
    assert environments == [("1", str(tmp_path))] * world.size
    world.shutdown()  # the next test starts workers with its own environment


@pytest.mark.own_agent
def test_a_killed_agent_ends_its_workers() -> None:
    """The cell's error names the remedy, the workers end, and `run` starts no other world."""
    world = World(2, log_dir="")
    workers = [*world.run(os.getpid)]  # starts the world
    assert workers == [*world.pids.values()]
    running = begin(world, "import time\ntime.sleep(600)")
    os.kill(world.engine.connection.link.agent.pid, signal.SIGKILL)
    ran = follow(world, running)
    assert isinstance(ran.error, AgentLost)
    assert "%dist_restart" in str(ran.error)
    assert (world.status(), world.state) == ((), WorldState.LOST)
    wait_until(lambda: not any(map(psutil.pid_exists, workers)), "the workers end with the agent")
    world.shutdown()
    with pytest.raises(WorldNotStarted):
        world.run(os.getpid)


def test_a_world_can_start_again_after_a_shutdown(world: World) -> None:
    """A world that was shut down, even twice, takes no cells until a new start."""
    for _ in range(2):
        world.shutdown()
    assert repr(world) == f"<World {world.size} ranks, stopped>"
    with pytest.raises(WorldNotStarted, match="%dist_init -n 4"):
        run(world, "1")
    assert world.status() == ()
    world.start()
    assert world.gather("rank") == [*range(world.size)]
