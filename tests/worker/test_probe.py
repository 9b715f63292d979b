"""Tests of `nbdist.worker.probe`: where the main thread is, asked from another one."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from linecache import getline
from pathlib import Path

import pytest

from nbdist.wire.views import CallLayout, Place, StackFrame
from nbdist.worker.probe import awaited, described, frames_of, handles_stop
from nbdist.world.world import World
from tests.waiting import wait_until
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world

SETUP = """
import threading, time
from nbdist.worker.probe import Probe
probe = Probe(get_ipython().kernel.group)
store = dist.group.WORLD.get_group_store()

def sample(is_so, go):
    '''Keep the first place of the main thread that is so, then have it go on.'''
    def run():
        global place, brief, calls
        deadline = time.monotonic() + 20
        while not is_so(place := probe.locate()) and time.monotonic() < deadline:
            time.sleep(0.01)
        brief, calls = probe.locate_briefly(), probe.trace().frames
        go()
    thread = threading.Thread(target=run)
    thread.start()
    return thread
"""


@pytest.fixture(scope="module")
def world(new_world: NewWorld) -> Iterator[World]:
    with new_world(2) as world:
        world.execute(SETUP)
        yield world


def test_a_line_of_a_cell(world: World) -> None:
    """It waits for no rank, and the calls lead from the cell inwards."""
    world.execute(
        "over = threading.Event()\n"
        "def wait(): over.wait(20)\n"
        "sampling = sample(lambda place: place.line == 4, over.set)\n"
        "wait()\n"
        "sampling.join()"
    )
    for place, brief, calls in world.gather("place, brief, calls"):
        assert (place.line, place.operation, place.is_cleaning_up) == (4, "", False)
        assert brief == Place(line=4)
        own = [(frame.function, frame.line) for frame in calls if frame.is_cell]
        assert own == [("wait", 2), ("<module>", 4)]


def test_a_collective_that_a_rank_waits_in(world: World) -> None:
    """Its name and line, and what it has begun; all is calm, and only ranks can help."""
    world.execute(
        "if rank == 0:\n"
        "    go = lambda: store.set('in all_reduce', '')\n"
        "    sampling = sample(lambda place: place.operation and place.is_calm, go)\n"
        "else:\n"
        "    store.wait(['in all_reduce'])\n"
        "dist.all_reduce(torch.ones(1))\n"
        "if rank == 0: sampling.join()"
    )
    ((place, brief),) = world.gather("place, brief", ranks=[0])
    assert (place.operation, place.line) == ("all_reduce", 6)
    assert brief == Place(line=6, operation="all_reduce")
    assert place.is_calm


def test_a_rank_that_waits_to_make_a_group(world: World) -> None:
    """In the store, for the others."""
    world.execute(
        "if rank == 0:\n"
        "    sampling = sample(lambda place: place.operation, lambda: store.set('meet', ''))\n"
        "else:\n"
        "    store.wait(['meet'])\n"
        "dist.new_group([0, 1])\n"
        "if rank == 0: sampling.join()"
    )
    (place,) = world.gather("place", ranks=[0])
    assert (place.operation, place.line) == ("new_group", 5)


def test_cleaning_up(world: World) -> None:
    """An `except` or `finally` that Stop has led to is known for one."""
    world.execute(
        "over = threading.Event()\n"
        "try:\n"
        "    raise KeyboardInterrupt\n"
        "except KeyboardInterrupt:\n"
        "    sampling = sample(lambda place: place.line == 6, over.set)\n"
        "    over.wait(20)\n"
        "sampling.join()"
    )
    assert world.gather("place.is_cleaning_up") == [True, True]


def test_no_task(world: World, tmp_path: Path) -> None:
    """Between tasks it is in no line, and in nothing that ranks wait for."""
    go = f"lambda: open(f'{tmp_path}/{{rank}}', 'x').close()"
    world.execute(f"sampling = sample(lambda place: not place.line, {go})")
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, "both ranks were idle")
    for place in world.gather("place"):
        assert not place.is_in_code
        assert (place.operation, place.has_help) == ("", False)


@contextmanager
def running(code: str) -> Iterator[int]:
    """While another thread is in `wait()`, which the code calls; its identifier."""
    waits, over = threading.Event(), threading.Event()

    def wait() -> None:
        waits.set()
        over.wait(10)

    def run() -> int:
        exec(compile(code, "<cell>", "exec"), {"wait": wait})
        return threading.get_ident()

    with ThreadPoolExecutor() as pool:
        done = pool.submit(run)
        waits.wait(10)
        (ident,) = {t.ident for t in threading.enumerate() if t.name.startswith("ThreadPool")}
        try:
            yield ident or 0
        finally:
            over.set()
            done.result(10)


def test_frames_of_a_thread() -> None:
    """From the innermost out; a cell's are named as the notebook names it, with their line."""
    with running("def f():\n    wait()\n\n\nf()") as ident:
        frames = [f for f in frames_of(ident) if f.f_code.co_filename == "<cell>"]
        found = described(frames, {"<cell>": 3})
    assert found == (StackFrame("Cell In[3]", 2, "f"), StackFrame("Cell In[3]", 5, "<module>"))
    assert list(frames_of(0)) == []


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="collections do not begin there")
def test_no_garbage_is_collected_as_a_frame_is_taken() -> None:
    """A destructor would let the thread go on, and the frame's memory be something else."""
    thresholds, began = gc.get_threshold(), set()

    def note(phase: str, _: object) -> None:
        if phase == "start":
            at = sys._getframe(1)
            began.add((at.f_code.co_name, getline(at.f_code.co_filename, at.f_lineno).strip()))

    with running("def f():\n    wait()\nf()") as ident:
        gc.callbacks.append(note)
        gc.set_threshold(1)
        try:
            assert len(list(frames_of(ident))) > 5
        finally:
            gc.set_threshold(*thresholds)
            gc.callbacks.remove(note)
    assert began
    # Where one of another thread is made; afterwards it is owned, and a collection does no harm.
    assert ("_uncollected", "return get()") not in began
    assert "<lambda>" not in {name for name, _ in began}
    assert gc.isenabled()


def test_source_lines_are_of_cells_only() -> None:
    """The agent reads those of files without this process's GIL."""
    frame = sys._getframe()
    (found,) = described([frame], {})
    assert (found.file, found.line > 0) == (__file__, True)
    assert (found.function, found.code) == (frame.f_code.co_name, "")


async def in_cell(code: str) -> list[str]:
    """The functions that are found while a task like IPython's awaits what the code says."""
    names: dict[str, object] = {"asyncio": asyncio}
    exec(compile(code, "<cell>", "exec"), names)

    async def run_cell_async() -> None:
        await names["cell"]()  # type: ignore[operator]

    task = asyncio.get_running_loop().create_task(run_cell_async())
    await asyncio.sleep(0)
    frames = awaited(asyncio.get_running_loop(), {"<cell>": 1})
    task.cancel()
    return [frame.f_code.co_name for frame in frames]


def test_a_cell_that_awaits() -> None:
    """Its frames are on no thread's stack, but in the chain of what it awaits."""
    source = "async def inner(): await asyncio.sleep(9)\nasync def cell(): await inner()"
    found = asyncio.run(in_cell(source))
    assert found[-3:] == ["inner", "cell", "run_cell_async"]
    assert asyncio.run(in_cell("async def cell(): pass")) == []


def test_cleaning_up_after_stop() -> None:
    """In an `except` or `finally` that KeyboardInterrupt has led to, also through another one."""
    stopped = "try:\n    raise KeyboardInterrupt\nexcept BaseException:\n    "
    for code, handles in [
        (f"{stopped}wait()", True),
        (f"{stopped}try:\n        1 / 0\n    except Exception:\n        wait()", True),
        ("try:\n    1 / 0\nexcept Exception:\n    wait()", False),
        (f"{stopped}pass\nwait()", False),
    ]:
        with running(code) as ident:
            assert handles_stop(ident) == handles, code


CRASHES = """
import sys
from nbdist.worker.probe import write_stacks_to
write_stacks_to(sys.argv[1])
def stuck():
    print("ready", flush=True)
    sys.stdin.read()
stuck()
"""


@pytest.mark.world
def test_the_stack_of_a_crash(tmp_path: Path) -> None:
    """It is appended to the file, whose first line says where calls are."""
    path = tmp_path / "rank0.stack"
    command = [sys.executable, "-c", CRASHES, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        head = path.read_bytes()
        assert CallLayout.read(head).line() == head
        os.kill(process.pid, signal.SIGSEGV)
        process.wait(10)
    found = path.read_text()
    assert found.startswith(head.decode())
    assert found.count("in stuck") == 1
    assert "Fatal Python error: Segmentation fault" in found
