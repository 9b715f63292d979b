"""Tests of `nbdist.agent.inspect`: places, stacks and memory of ranks, whatever the ranks do."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import pytest

from nbdist.agent.inspect import GpuGauge, UsageWatch, status_of
from nbdist.system.processes import thread_state
from nbdist.wire.places import RankPosition, Stack
from nbdist.wire.status import Gpu, WorkerStatus
from nbdist.world import dispatch, inbox
from nbdist.world.result import usage_text
from nbdist.world.task_error import error_of
from nbdist.world.task_run import TaskRun
from nbdist.world.wait_texts import waiting_text
from nbdist.world.world import World
from tests.waiting import SOON

pytestmark = pytest.mark.shared_world(4)


HOLD = "ctypes.PyDLL(None).read(gate, ctypes.create_string_buffer(1), 1)"
"""Waits, with the GIL held, until a byte is written to the gate."""

WAIT = "os.read(gate, 1)"
"""Waits for that byte without the GIL."""


class Gate:
    """A named pipe on which ranks wait until the test opens it."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.cell = f"import ctypes, os\ngate = os.open({str(path)!r}, os.O_RDWR)\n"
        self.end = os.open(path, os.O_RDWR)

    def open(self, ranks: int = 1) -> None:
        os.write(self.end, b"x" * ranks)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path / "gate")
    yield made
    os.close(made.end)


@contextmanager
def busy(world: World, source: str, is_there: Callable[[int], bool]) -> Iterator[TaskRun]:
    """Run `source` as cell 5, and yield once `is_there` holds for the process of every rank.

    The cell ends by itself; it is interrupted only if the test has failed.
    """
    running = world.submit(world.task(source, execution_count=5))
    try:
        until(world, lambda: all(map(is_there, world.pids.values())))
        yield running
    except BaseException:
        world.interrupt()
        raise
    finally:
        dispatch.wait(world.engine, running)


def until(world: World, fact: Callable[[], bool]) -> None:
    """Receive messages of ranks until `fact` holds."""
    deadline = time.monotonic() + SOON
    while not fact():
        inbox.receive(world.engine, 0.01)
        assert time.monotonic() < deadline, world.stacks()


def until_recorded(world: World, ranks: Collection[int]) -> None:
    """Wait until gloo's thread has recorded the last collectives of `ranks` as done."""

    def are_done() -> bool:
        last = [row.collective for row in world.status() if row.rank in ranks]
        return all(each is not None and each.is_done for each in last)

    until(world, are_done)


def reads_a_pipe(pid: int) -> bool:
    """Whether the main thread of a process waits in read(2) on the gate."""
    words = Path(f"/proc/{pid}/syscall").read_text().split()
    if words[0] != str(0 if os.uname().machine == "x86_64" else 63):
        return False
    return os.readlink(f"/proc/{pid}/fd/{int(words[1], 16)}").endswith("/gate")


def stacks(world: World) -> dict[int, Stack]:
    """Return the stacks by rank."""
    return {stack.rank: stack for stack in world.stacks()}


def statuses(world: World) -> dict[int, WorkerStatus]:
    """Return the statuses by rank."""
    return {row.rank: row for row in world.status()}


def calls(stack: Stack) -> list[tuple[str, int, str]]:
    """Return the frames of a stack without source lines, and files by the last part of the path."""
    return [(frame.file.rpartition("/")[2], frame.line, frame.function) for frame in stack.frames]


def test_an_idle_rank_has_no_place_in_a_cell(world: World) -> None:
    """An idle rank has no place in a cell and no stack; its last collective is done."""
    world.execute("t = torch.ones(1)\ndist.all_reduce(t)\ndist.barrier()\ndist.all_reduce(t)")
    until_recorded(world, world.pids)
    first = {rank: row.collective for rank, row in statuses(world).items()}
    assert {(each.name, each.is_done) for each in first.values()} == {("all_reduce", True)}
    world.execute("dist.broadcast(t, 0)")
    until_recorded(world, world.pids)
    for rank, row in statuses(world).items():
        assert (row.state, row.place, row.code) == ("idle", None, "")
        assert (row.pid, row.device) == (world.pids[rank], "cpu")
        assert row.memory > 1 << 20
        assert str(row.collective) == f"broadcast #{first[rank].number + 1}"
    for rank, stack in stacks(world).items():
        assert (stack.state, stack.frames, stack.problem) == ("idle", (), "")
        assert stack.pid == world.pids[rank]


def test_a_waiting_rank_is_shown_with_its_collective(world: World, gate: Gate) -> None:
    """Places name the collectives in which ranks wait; stacks have torch's calls, none of nbdist's.

    Lines are counted from the first that is not blank, as IPython does.
    """
    world.execute("dist.all_reduce(torch.ones(1))")
    source = f"\n \n{gate.cell}if rank == 1:\n    {WAIT}\ndist.barrier()"
    with busy(world, source, lambda pid: pid != world.pids[1] or reads_a_pipe(pid)):
        until(world, lambda: all(s.rank == 1 or s.place.operation for s in world.stacks()))
        found = dict[int, WorkerStatus]()

        def all_have_said() -> bool:  # a slow rank leaves out its last collective
            found.update(statuses(world))
            said = [row.collective for row in found.values()]
            return all(said) and said[1].is_done

        until(world, all_have_said)
        shown, late = stacks(world), found.pop(1)
        assert (late.place, late.code.strip()) == (RankPosition(line=4), WAIT)
        assert (late.collective.name, late.collective.is_done) == ("all_reduce", True)
        for row in found.values():
            assert (row.state, row.place) == ("busy", RankPosition(line=5, operation="barrier"))
            assert (row.collective.name, row.collective.is_done) == ("barrier", False)
            assert row.collective.number == late.collective.number + 1
        assert calls(shown.pop(1)) == [("Cell In[5]", 4, "<module>")]
        for stack in shown.values():
            assert (stack.place.operation, stack.place.line) == ("barrier", 5)
            assert stack.frames[0].code == "dist.barrier()"
            assert calls(stack)[-1][::2] == ("distributed_c10d.py", "barrier")
            assert stack.frames[-1].code == "work.wait()"
            assert not any("nbdist" in frame.file for frame in stack.frames)
        gate.open()


def test_a_rank_that_a_signal_has_stopped_is_reported(world: World) -> None:
    """A stopped rank is reported at once, even when idle, and as the reason why others wait."""
    os.kill(world.pids[1], signal.SIGSTOP)
    try:
        until(world, lambda: thread_state(world.pids[1]) == "T")
        row, found = statuses(world)[1], stacks(world)
        assert (row.state, row.place) == ("idle", RankPosition(is_stopped=True))
        assert row.memory > 1 << 20
        assert found.pop(1).place.is_stopped
        assert {stack.state for stack in found.values()} == {"idle"}
        said = "ranks 0,2-3 wait in barrier, line 1 · rank 1 is stopped by a signal"
        running = world.submit(world.task("dist.barrier()"))
        until(world, lambda: not next(world.follow(running)) and waiting_text(running) == said)
    finally:
        os.kill(world.pids[1], signal.SIGCONT)
    dispatch.wait(world.engine, running)
    assert error_of(running) is None


# --- stacks -----------------------------------------------------------------------------


def test_a_stack_has_the_calls_of_a_cell(world: World, gate: Gate) -> None:
    """A stack begins at the cell, has functions of other cells too, and the source of lines."""
    world.execute("def wait(gate):\n    import os\n    os.read(gate, 1)")
    with busy(world, f"{gate.cell}print('before')\nwait(gate)\nprint('after')", reads_a_pipe) as r:
        for stack in stacks(world).values():
            assert stack.state == "busy"
            assert stack.place.line == 4
            outer, inner = stack.frames
            assert (outer.file, outer.line, outer.code) == ("Cell In[5]", 4, "wait(gate)")
            assert inner.file.startswith("Cell In[")
            assert (inner.line, inner.function, inner.code) == (3, "wait", "os.read(gate, 1)")
        gate.open(world.size)
    # Reading the stacks has lost no output of the cell.
    assert [line.text for line in r.transcript[0].tail(9)] == ["before", "after"]


def test_a_cell_that_awaits_has_a_stack(world: World, gate: Gate) -> None:
    """A cell that awaits is on no thread's stack, and its frames are shown all the same."""
    source = (
        f"{gate.cell}import asyncio\nopened = asyncio.Event()\n"
        "asyncio.get_running_loop().add_reader(gate, opened.set)\n"
        "async def wait():\n    await opened.wait()\n"
        "await wait()\nasyncio.get_running_loop().remove_reader(gate)"
    )
    with busy(world, source, lambda pid: thread_state(pid) == "S"):
        until(world, lambda: all(len(stack.frames) == 3 for stack in world.stacks()))
        for stack in stacks(world).values():
            cell, ours, library = stack.frames
            assert (cell.line, cell.code) == (8, "await wait()")
            assert (ours.line, ours.function) == (7, "wait")
            assert library.function == "wait"
        gate.open(world.size)


def test_a_rank_that_holds_the_gil_has_a_stack(world: World, gate: Gate) -> None:
    """The stack of a rank whose threads cannot run is shown; the other ranks answer as ever."""
    source = f"{gate.cell}def hold():\n    {HOLD}\nif rank == 1: hold()"
    with busy(world, source, lambda pid: pid != world.pids[1] or reads_a_pipe(pid)):
        until(world, lambda: {stack.state for stack in world.stacks([0, 2, 3])} == {"idle"})
        until(world, lambda: statuses(world)[1].place == RankPosition(line=5, holds_gil=True))
        assert [row.place for row in statuses(world).values() if row.rank != 1] == [None] * 3
        until(world, lambda: world.stacks([1])[0].place.holds_gil)
        stack = stacks(world)[1]
        assert calls(stack) == [("Cell In[5]", 5, "<module>"), ("Cell In[5]", 4, "hold")]
        assert stack.frames[1].code == HOLD
        assert len(stacks(world)[1].frames) == 2  # a second reading adds no frames to the first
        gate.open()


@pytest.fixture
def starved(control_group: Callable[..., Path]) -> Path:
    """A control group whose processes run for a hundredth of the time."""
    group = control_group("cpu", "cpu.max", "cpu.cfs_quota_us")
    limits = {"cpu.max": "5000 500000", "cpu.cfs_period_us": "500000", "cpu.cfs_quota_us": "5000"}
    for file, text in limits.items():
        if (group / file).exists():
            (group / file).write_text(text)
    return group


def test_a_starved_rank_is_not_shown_holding_the_gil(world: World, starved: Path) -> None:
    """An idle rank that is too slow to answer is not reported to hold the GIL; takes 8 s."""
    pid = str(world.pids[1])
    (starved / "cgroup.procs").write_text(pid)
    try:
        for _ in range(10):
            found = statuses(world)
            assert [found[rank].place for rank in (0, 1)] == [None] * 2
            assert not any(stack.place.holds_gil for stack in world.stacks([0, 1]))
    finally:
        (starved.parent / "cgroup.procs").write_text(pid)


def test_a_stack_that_cannot_be_read_is_reported(world: World, gate: Gate) -> None:
    """If a rank does not answer and its stack file is unreadable, the stack names both problems."""
    world.execute(
        "import os\nfor fd in os.listdir('/proc/self/fd'):\n"
        "    file = f'/proc/self/fd/{fd}'\n"
        "    if os.path.realpath(file).endswith('.stack'): os.truncate(file, 0)"
    )
    with busy(world, f"{gate.cell}{HOLD}", reads_a_pipe) as running:
        said = ((), True, "it does not answer, and its stack cannot be read")
        shown = attrgetter("frames", "place.holds_gil", "problem")
        until(world, lambda: [*map(shown, world.stacks())] == [said] * world.size)
        gate.open(world.size)
    assert error_of(running) is None
    world.restart()
    files = Path(os.environ["XDG_RUNTIME_DIR"]).glob("nbdist-*/*.stack")
    assert len(list(files)) == world.size  # restarts leave no file behind


def test_reading_a_stack_sends_no_signal(world: World, gate: Gate) -> None:
    """Reading stacks calls no signal handler of the user and interrupts no C code."""
    world.execute(
        "import ctypes, signal\ngot = []\n"
        "real = range(signal.SIGRTMIN, signal.SIGRTMAX + 1)\n"
        "for one in (signal.SIGUSR1, signal.SIGUSR2, *real):\n"
        "    assert signal.signal(one, lambda *_: got.append(1)) == signal.SIG_DFL"
    )
    calls = dict[int, int]()

    def all_hold() -> bool:  # a slow rank may be missed, or not be read in time
        held = (stack for stack in world.stacks() if stack.place.holds_gil and stack.frames)
        calls.update((stack.rank, len(stack.frames)) for stack in held)
        return len(calls) == world.size

    with busy(world, f"{gate.cell}read = {HOLD}", reads_a_pipe):  # a signal would end `read` early
        until(world, all_hold)
        gate.open(world.size)
    assert {*calls.values()} == {1}
    assert world.gather("(read, got)") == [(1, [])] * world.size


@pytest.mark.unit
def test_a_rank_replaced_meanwhile_is_shown_without_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that gets another process while its status is read is shown without its memory."""
    status = WorkerStatus(0, os.getpid(), "vm", "starting", 0.0, 0, "cpu")
    rank = SimpleNamespace(pid=0, rank=0, start_info=SimpleNamespace(gpu=""))
    monkeypatch.setattr("nbdist.agent.inspect.status_without_asking", lambda _: status)
    rows = asyncio.run(status_of([rank], UsageWatch(lambda used: None)))
    assert [(row.pid, row.memory) for row in rows] == [(os.getpid(), 0)]


@pytest.mark.unit
def test_a_usage_watch_is_on_before_it_runs() -> None:
    """A `UsageWatch` is on from the call of `watch`, even before its work begins, to its end."""
    usage = UsageWatch(lambda used: None)
    work = usage.watch(lambda: [])
    assert usage.is_on
    asyncio.run(work)
    assert not usage.is_on


# --- memory and GPUs ----------------------------------------------------------------------

STAND_IN = """
from types import SimpleNamespace
opened = 0
class NVMLError(Exception): pass
NAMES = NAMES_HERE
def nvmlInit():
    global opened
    opened += 1
    if not NAMES: raise NVMLError("no driver")
def nvmlShutdown():
    global opened
    opened -= 1
def nvmlDeviceGetCount(): return len(NAMES)
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetHandleByUUID(uuid): return 1
def nvmlDeviceGetName(index): return NAMES[index]
def nvmlDeviceGetUUID(index): return f"GPU-{index}f00-1"
def nvmlDeviceGetMemoryInfo(index): return SimpleNamespace(used=10 + index, total=80)
def nvmlDeviceGetUtilizationRates(index):
    if index == 1: raise NVMLError("not supported")
    return SimpleNamespace(gpu=97)
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that makes a fake `pynvml` module with GPUs of the given names."""

    def make(*names: str):
        (tmp_path / "pynvml.py").write_text(STAND_IN.replace("NAMES_HERE", repr(names)))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "pynvml", raising=False)
        import pynvml

        return pynvml

    yield make
    sys.modules.pop("pynvml", None)


def test_gpus_are_found_by_number_or_uuid(library):
    """GPUs are found by UUID, by MIG slice, or by number if CUDA and NVML number them alike."""
    nvml = library("H200", "H200", "H200")
    gauge = GpuGauge()
    found = gauge.read(["0", "1", "GPU-2f", "MIG-x", "GPU-7", "5"], {})
    assert found["0"] == Gpu(10, 80, 97)
    assert found["1"] == found["MIG-x"] == Gpu(11, 80, None)
    assert found["GPU-2f"] == Gpu(12, 80, 97)
    assert len(found) == 4
    assert nvml.opened == 1
    gauge.close()
    assert nvml.opened == 0
    assert gauge.read(["0"], {}) == {}
    library("H200", "T4")
    assert GpuGauge().read(["0"], {}) == {}
    assert [*GpuGauge().read(["0", "GPU-1"], {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})] == ["0", "GPU-1"]


def test_without_a_driver_no_gpu_is_known(library, monkeypatch: pytest.MonkeyPatch):
    """Without a driver, or without pynvml, no GPU is known, and NVML is not shut down."""
    nvml = library()
    for _ in range(2):
        gauge = GpuGauge()
        assert gauge.read([], {}) == gauge.read(["0"], {}) == {}
        gauge.close()
        monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.opened == 1


def test_memory_of_ranks_arrives_while_a_cell_runs(world: World, tmp_path: Path) -> None:
    """Each rank's memory arrives while a cell runs, and is larger on the rank that has more."""
    gate = tmp_path / "gate"
    running = world.submit(
        world.task(
            "import os, time\nsize = 201 if rank == 1 else 1\n"
            "big = torch.ones(size * 2**20, dtype=torch.uint8)\n"
            f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)"
        )
    )
    deadline, more = time.monotonic() + SOON, 0
    for _ in world.follow(running):
        if len(running.reports.usage) == world.size:
            more = running.reports.usage[1].memory - running.reports.usage[0].memory
        if more > 150 << 20 or time.monotonic() > deadline:  # `big` may still be filling
            gate.touch()
    assert not error_of(running)
    assert 150 << 20 < more < 250 << 20
    assert usage_text(running.reports.usage.values()).startswith("cpu ")
    world.execute("del big")
