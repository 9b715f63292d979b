"""Finds out where in their code a machine's workers are, and how much memory and GPU they use.

Runs in the agent, which uses this file to answer `%dist_status`, `world.stacks`, completions and
`nbdist mcp`.  If a worker does not answer, the agent finds the worker's place in its memory.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, Self

import psutil

from nbdist.agent.stacks import frames_of, user_frames, with_code
from nbdist.agent.worker import Worker
from nbdist.system.processes import OwnTime, cpu_seconds, is_stopped
from nbdist.system.secrets import secret_values
from nbdist.wire import control
from nbdist.wire.control import Completions, Description, TypingQuestion
from nbdist.wire.messages import RankSecrets, UsageReport
from nbdist.wire.places import CALL_FILE, Collective, RankPosition, Stack, StackFrame
from nbdist.wire.status import Gpu, Usage, WorkerStatus

FRESH_SECONDS = 1.0  # seconds for which a count of memory pages is used again, by default
STACK_TIMEOUT = 0.3  # seconds for a worker to send its stack, before the agent reads its memory
STATUS_TIMEOUT = 0.12  # seconds that `%dist_status` waits for an answer, or for a measurement
SECRETS_TIMEOUT = 3.0  # seconds for a worker to list the secrets of its environment
LAST_TIMEOUT = 2.0  # seconds before a silent worker is asked again for its last collective
BRIEF_SAMPLE_TIMEOUT = 0.04  # seconds for `%dist_status` to read a stack, or for a second answer
LOCATE_TIMEOUT = 0.5  # seconds for a rank to say where it is; then C code seems to hold the GIL
LOCATE_AGAIN_TIMEOUT = 0.3  # seconds for a second answer, if a rank got no processor for the first
SAMPLE_TIMEOUT = 0.4  # seconds to read a stack from memory, for `world.stacks` and Stop

CONSULT_TIMEOUT = 0.4  # seconds for an idle rank to answer; the notebook waits 0.9 s, enough for 2

TORCH_DISTRIBUTED = (
    "/torch/distributed/"  # if the innermost frame's file is there, the rank counts as waiting
)

NO_ANSWER = "it does not answer, and its stack cannot be read"
NO_CELL_LINE = "no line of the cell runs: variables are being received or sent"


async def stack_of(worker: Worker) -> Stack:
    """Return where in its code a worker is, with its stack.

    The worker is asked first; if it does not answer, the stack is read from its memory.  The stack
    is empty for a worker that is starting, dead or stopped by a signal.
    """
    state = worker.state
    if state in ("starting", "dead"):
        return Stack(worker.rank, worker.pid, state, RankPosition())
    with _Turn(worker, STACK_TIMEOUT) as turn:
        answer = await _ask(worker, control.Trace(), STACK_TIMEOUT)
    if isinstance(answer, RankPosition):
        return Stack(worker.rank, worker.pid, state, answer)
    frames: Sequence[StackFrame]
    if isinstance(answer, control.Traced):
        place, frames = answer.place, answer.frames
    else:
        place, frames = await place_from_outside(worker, SAMPLE_TIMEOUT)
        place = turn.judge(place)
        if not frames:
            return Stack(worker.rank, worker.pid, state, place, problem=NO_ANSWER)
    shown = user_frames(frames)
    problem = NO_CELL_LINE if state == "busy" and not shown else ""
    return Stack(worker.rank, worker.pid, state, place, with_code(shown), problem)


async def secrets_of(worker: Worker) -> RankSecrets:
    """Return the values of the secret environment variables of a rank.

    Values from the rank's start, and values that the notebook has sent with the running task, are
    always included.  Other values, such as those that code on the rank has set, are included only
    if the rank answers.
    """
    start, task = worker.start_info, worker.task.unpack()
    changed = task.around.environ if task and task.around else {}
    given = {**start.world.environ, **start.environ}
    now = {name: value for name, value in changed.items() if value is not None}
    values = secret_values(given) | secret_values(now)
    listed = await worker.ask(control.ListSecrets(), SECRETS_TIMEOUT)
    return RankSecrets(worker.rank, (*values.union(listed if isinstance(listed, tuple) else ()),))


async def ask_idle_worker(
    workers: Sequence[Worker], question: TypingQuestion
) -> Completions | Description | None:
    """Ask an idle worker for completions, or for the description of a name; return the answer.

    If the first idle worker does not answer in time, one more is asked.  Returns None if neither
    answers, or if no worker is idle.
    """
    for worker in [each for each in workers if each.state == "idle"][:2]:
        answer = await worker.ask(question, CONSULT_TIMEOUT)
        if isinstance(answer, Completions | Description):
            return answer
    return None


async def status_of(
    workers: Sequence[Worker], usage: UsageWatch, fresh: float = FRESH_SECONDS
) -> tuple[WorkerStatus, ...]:
    """Return the rows of `%dist_status` for these workers.

    Pages of memory that were counted less than `fresh` seconds ago are not counted again.
    """
    memory, gpus, rows = await asyncio.gather(
        usage.memory.read([worker.pid for worker in workers], STATUS_TIMEOUT, fresh),
        usage.gpus(workers, STATUS_TIMEOUT),
        asyncio.gather(*map(_status_of, workers)),
    )
    # If a rank was replaced meanwhile, its memory is 0: the new process was not measured.
    return tuple(
        replace(row, memory=memory.get(row.pid, 0), gpu=gpus.get(row.rank)) for row in rows
    )


def status_without_asking(worker: Worker) -> WorkerStatus:
    """Return the fields of a worker's status that the agent knows without asking the worker."""
    return WorkerStatus(
        rank=worker.rank,
        pid=worker.pid,
        host=socket.gethostname(),
        state=worker.state,
        busy_seconds=worker.task.busy_seconds,
        memory=0,
        device=worker.start_info.device,
        cpu_seconds=cpu_seconds(worker.pid),
        last_line=worker.output.last_line,
    )


async def _status_of(worker: Worker) -> WorkerStatus:
    status = status_without_asking(worker)
    if status.state in ("starting", "dead"):
        return status
    if status.state == "idle":
        with _Turn(worker, STATUS_TIMEOUT) as turn:
            answer = await _last_collective(worker)
        place = await _place_of_silent(worker, turn) if answer is None else RankPosition()
        if place.holds_gil:  # ask again: perhaps the worker was only slow, because of a busy disk
            answer = await _last_collective(worker, BRIEF_SAMPLE_TIMEOUT)
        if answer is not None:  # an answer shows that C code does not hold the GIL
            place = RankPosition(is_stopped=is_stopped(worker.pid))
    else:
        place, answer = await asyncio.gather(_place(worker), _last_collective(worker))
    task = worker.task.unpack()
    lines = task.source.splitlines() if task else []
    code = place.code or (lines[place.line - 1] if 0 < place.line <= len(lines) else "")
    place = replace(place, asks=worker.input.waits_for_line, is_debugged=worker.is_debugged)
    shown = place if status.state == "busy" or place.holds_gil or place.is_stopped else None
    cell = task.execution_count if task else None
    collective = answer if isinstance(answer, Collective) else None
    return replace(status, place=shown, code=code, collective=collective, cell=cell)


async def _ask(
    worker: Worker, request: control.ControlRequest, timeout: float
) -> control.ControlReply | None:
    """Return the worker's answer, or None if it does not answer within `timeout` seconds.

    If a signal such as SIGSTOP has stopped the worker, return a `RankPosition` with `is_stopped`.
    """
    if not is_stopped(worker.pid):
        answer = await worker.ask(request, timeout)
        if answer is not None or not is_stopped(worker.pid):
            return answer
    return RankPosition(is_stopped=True)


async def place_from_outside(
    worker: Worker, timeout: float
) -> tuple[RankPosition, list[StackFrame]]:
    """Return the place and the stack of a rank that does not answer, read from the rank's memory.

    The innermost frame comes first.  There are no frames if the memory cannot be read in time.
    """
    task = worker.task.unpack()
    frames = frames_of(await worker.stacks.sample(worker.pid, timeout), task)
    line, file = _line_of(frames), ""
    if task and task.script:
        file = os.path.basename(task.script.file)
        line = next((frame.line for frame in frames if frame.file == task.script.file), 0)
    # A rank that waits in a collective does not hold the GIL: it only answers slowly.
    waits = bool(frames) and TORCH_DISTRIBUTED in frames[0].file
    operation = frames[0].function if waits else ""
    return RankPosition(line=line, operation=operation, holds_gil=not waits, file=file), frames


def _line_of(frames: Sequence[StackFrame]) -> int:
    """Return the line that runs in the cell or in the task's function call; 0 if unknown."""
    for inner, frame in pairwise(frames):
        if frame.file.endswith(CALL_FILE) and frame.function == "call":
            return inner.line
    return next((frame.line for frame in reversed(frames) if frame.is_cell), 0)


async def _place(worker: Worker) -> RankPosition:
    with _Turn(worker, STATUS_TIMEOUT) as turn:
        answer = await _ask(worker, control.LocateMainThread(briefly=True), STATUS_TIMEOUT)
    return answer if isinstance(answer, RankPosition) else await _place_of_silent(worker, turn)


async def locate(worker: Worker, timeout: float = LOCATE_TIMEOUT) -> RankPosition:
    """Ask a worker where in its code it is; return the answer.

    If the worker does not answer within `timeout` seconds, the result has only `holds_gil` set, and
    facts that the agent itself knows.
    """
    place = await worker.ask(control.LocateMainThread(), timeout)
    if not isinstance(place, RankPosition):
        place = RankPosition(holds_gil=True, is_stopped=is_stopped(worker.pid))
    return replace(place, asks=worker.input.waits_for_line, is_debugged=worker.is_debugged)


async def locate_with_patience(worker: Worker) -> RankPosition:
    """Return where in its code a worker is; ask again if the worker got no processor to answer.

    A worker that does not answer counts as one whose C code holds the GIL.  On a busy machine the
    worker may instead have waited for a processor.
    """
    with _Turn(worker, LOCATE_TIMEOUT) as turn:
        place = await locate(worker)
    if place.is_stopped or place.holds_gil == turn.judge(place).holds_gil:
        return place
    return await locate(worker, LOCATE_AGAIN_TIMEOUT)


async def _place_of_silent(worker: Worker, turn: _Turn) -> RankPosition:
    if is_stopped(worker.pid):
        return RankPosition(is_stopped=True)
    place, _ = await place_from_outside(worker, BRIEF_SAMPLE_TIMEOUT)
    return turn.judge(place)


class _Turn:
    """Measures whether a rank has had time to answer, in a `with` block that awaits the answer.

    On a busy machine a rank may be silent because the rank or this process got no processor, and
    not because C code holds the rank's GIL.  So this class measures how long both processes have
    waited for a processor.  The waits of all threads are added up, because an answer may need
    several threads one after the other.  Measuring begins after a quarter of `timeout`, and so
    costs nothing for ranks that answer at once.
    """

    def __init__(self, worker: Worker, timeout: float) -> None:
        self._pid = worker.pid
        self._timeout = timeout
        self._clocks: list[OwnTime] = []

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._timeout / 4, self._start)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _start(self) -> None:
        self._clocks = [OwnTime(self._pid), OwnTime(os.getpid())]

    def judge(self, place: RankPosition) -> RankPosition:
        """Return `place`, but with `holds_gil=False` if the rank had too little time to answer.

        Returns `holds_gil=False` also if the `with` block ended before measuring began.
        """
        if not (place.holds_gil and self._clocks):
            return replace(place, holds_gil=False)
        waited = sum(sum(clock.waits()) for clock in self._clocks)
        passed = time.monotonic() - self._clocks[0].since
        return replace(place, holds_gil=passed - waited > self._timeout / 4)


async def _last_collective(
    worker: Worker, timeout: float = STATUS_TIMEOUT
) -> Collective | control.Ok | None:
    """Return the worker's last collective; `Ok` if there was none, None if no answer comes in time.

    While an earlier question is unanswered, wait for its answer instead of asking again.
    """
    if worker.last_collective is None or worker.last_collective.done():
        asking = _ask(worker, control.LastCollective(), LAST_TIMEOUT)
        worker.last_collective = asyncio.ensure_future(asking)
    await asyncio.wait([worker.last_collective], timeout=timeout)
    answer = worker.last_collective.result() if worker.last_collective.done() else None
    return answer if isinstance(answer, Collective | control.Ok) else None


# --- memory and GPUs --------------------------------------------------------------------------


class _Count(NamedTuple):
    """The memory of a process when its pages were last counted."""

    pss: int = 0  # bytes
    private: int = 0  # bytes
    at: float = float("-inf")  # monotonic time
    seconds: float = 0.0  # processor time that the count took


class MemoryGauge:
    """Measures the memory of processes by counting their pages, and keeps each count for a while.

    Counting takes 6 ms for a process with 200 MB, and 15 ms more for each GB.  Reading how much
    memory is private, which Linux counts itself, takes 0.1 ms.
    """

    def __init__(self) -> None:
        self._counts: dict[int, _Count] = {}
        self._counting: asyncio.Future[None] | None = None

    async def read(
        self, pids: Sequence[int], timeout: float, fresh: float = FRESH_SECONDS
    ) -> dict[int, int]:
        """Return the memory (PSS) of each process in bytes, by pid.

        A page that n processes share counts as 1/n of a page for each of them.  Pages are counted
        again only if the last count is more than `fresh` seconds old.  If that takes longer than
        `timeout` seconds, or is not necessary, the result is the last count plus the growth of
        private memory since then.  A process that was never counted gets its private memory, and a
        process that has exited gets 0.
        """
        counts, now = list(self._counts.items()), time.monotonic()
        self._counts = {pid: count for pid, count in counts if pid in pids}
        old = [pid for pid in pids if now - self._last_count(pid).at > fresh]
        if old and (self._counting is None or self._counting.done()):
            loop = asyncio.get_running_loop()
            with suppress(RuntimeError):  # raised if no further thread can be started
                self._counting = loop.run_in_executor(None, self._count, old, now + timeout)
        if self._counting is not None:
            await asyncio.wait([self._counting], timeout=timeout)
        return {pid: self._current_size(pid) for pid in pids}

    @property
    def cost(self) -> float:
        """How many processor seconds it took to count the pages of all processes the last time."""
        return sum(count.seconds for count in [*self._counts.values()])

    def _current_size(self, pid: int) -> int:
        last = self._last_count(pid)
        with suppress(psutil.Error):  # the process has exited
            memory = psutil.Process(pid).memory_info()
            if private := int(memory.rss - memory.shared):  # without files and shared memory
                return last.pss + max(private - last.private, -last.pss)
        return 0

    def _last_count(self, pid: int) -> _Count:
        return self._counts.get(pid, _Count())

    def _count(self, pids: Sequence[int], deadline: float) -> None:
        """Count the pages of processes until the monotonic time `deadline`; runs in a thread.

        Processes that were never counted come first.
        """
        for pid in sorted(pids, key=lambda pid: pid in self._counts):
            if time.monotonic() > deadline:
                return
            began = time.thread_time()
            with suppress(psutil.Error):  # the process has exited
                memory = psutil.Process(pid).memory_full_info()
                took = time.thread_time() - began
                private = memory.rss - memory.shared
                self._counts[pid] = _Count(memory.pss or private, private, time.monotonic(), took)


class GpuGauge:
    """Reads the memory and load of GPUs, which are named as CUDA_VISIBLE_DEVICES names them."""

    def __init__(self) -> None:
        self._handles: dict[str, Any] = {}

    @cached_property
    def _nvml(self) -> Any:
        """The initialised module `pynvml`, or None if the module or NVIDIA's driver is missing."""
        try:
            import pynvml
        except ImportError:
            return None
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            return pynvml
        return None

    def read(self, names: Iterable[str], environ: Mapping[str, str]) -> dict[str, Gpu]:
        """Return the state of the GPUs `names`, by name; GPUs that cannot be read are left out.

        `environ` is the workers' environment, whose CUDA_DEVICE_ORDER can change which GPU a name
        means.  Reading a GPU takes 1 ms, and longer the first time.
        """
        gpus: dict[str, Gpu] = {}
        for name in sorted({*names}) if self._nvml else ():
            # `_find` raises LookupError if it does not know which GPU CUDA means by the name.
            with suppress(self._nvml.NVMLError, LookupError):
                if name not in self._handles:
                    self._handles[name] = self._find(name, environ)
                gpus[name] = self._gpu(self._handles[name])
        return gpus

    def close(self) -> None:
        """Release the driver, if `read` has used it; from now on `read` returns no GPUs."""
        if nvml := vars(self).get("_nvml"):
            nvml.nvmlShutdown()
        self._nvml = None

    def _find(self, name: str, environ: Mapping[str, str]) -> Any:
        nvml = self._nvml
        if name.startswith("MIG-"):
            return nvml.nvmlDeviceGetHandleByUUID(name)
        every = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        if not name.isdigit():  # CUDA accepts the beginning of a UUID
            uuids = {_text(nvml.nvmlDeviceGetUUID(each)): each for each in every}
            return uuids[next((uuid for uuid in uuids if uuid.startswith(name)), name)]
        # CUDA numbers GPUs from the fastest on, unless CUDA_DEVICE_ORDER is PCI_BUS_ID; NVML
        # numbers GPUs by bus address.  The numbers agree if all GPUs are of one model.
        in_order = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        if in_order or len({_text(nvml.nvmlDeviceGetName(each)) for each in every}) == 1:
            return every[int(name)]
        raise LookupError(name)

    def _gpu(self, handle: Any) -> Gpu:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        busy = None
        with suppress(self._nvml.NVMLError):  # a MIG slice has no utilisation
            busy = int(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        return Gpu(int(memory.used), int(memory.total), busy)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # pynvml before 11.5 returns bytes


# --- reports to the notebook --------------------------------------------------------------------

FIRST_USAGE_DELAY = 1.0  # seconds into a task until usage is first read
USAGE_INTERVAL = 2.0  # seconds between reports
COUNT_TIMEOUT = 1.0  # seconds for a count of pages, and for reading GPUs
MIN_COUNT_SECONDS, LARGEST_SHARE = 10.0, 0.005
"""Seconds for which a count of memory pages is used at least, and the most that counting may take.

`LARGEST_SHARE` is a share of a core.  If counting would take more, each count is used for longer.
"""


class UsageWatch:
    """Sends the notebook a report on the memory and GPUs of busy workers every few seconds."""

    def __init__(self, send: Callable[[UsageReport], None]) -> None:
        self.memory = MemoryGauge()
        self._gpus = GpuGauge()
        self._send = send
        self._reading: asyncio.Future[dict[str, Gpu]] | None = None
        self.is_on = False

    def watch(self, busy: Callable[[], Sequence[Worker]]) -> Coroutine[Any, Any, None]:
        """Return a coroutine that sends reports as long as `busy` returns any workers.

        `is_on` is True from this call until the coroutine has ended.
        """
        self.is_on = True
        return self._watch(busy)

    async def _watch(self, busy: Callable[[], Sequence[Worker]]) -> None:
        try:
            await asyncio.sleep(FIRST_USAGE_DELAY)
            while workers := busy():
                pids = {worker.rank: worker.pid for worker in workers}
                memory = await self.memory.read([*pids.values()], COUNT_TIMEOUT, self.fresh_seconds)
                gpus = await self.gpus(workers, COUNT_TIMEOUT)
                used = {rank: Usage(memory[pid], gpus.get(rank)) for rank, pid in pids.items()}
                self._send(UsageReport(used))
                await asyncio.sleep(USAGE_INTERVAL)
        finally:
            self.is_on = False

    @property
    def fresh_seconds(self) -> float:
        """For how many seconds a count of memory pages is used; it grows with the time to count."""
        return max(MIN_COUNT_SECONDS, self.memory.cost / LARGEST_SHARE)

    async def gpus(self, workers: Sequence[Worker], timeout: float) -> dict[int, Gpu]:
        """Return the GPUs of workers by rank; GPUs that cannot be read in time are left out."""
        named = {worker.rank: worker.start_info.gpu for worker in workers if worker.start_info.gpu}
        if not named:
            return {}
        if self._reading is None or self._reading.done():
            names, environ = [*named.values()], workers[0].start_info.world.environ
            loop = asyncio.get_running_loop()
            self._reading = loop.run_in_executor(None, self._gpus.read, names, environ)
        await asyncio.wait([self._reading], timeout=timeout)
        states = self._reading.result() if self._reading.done() else {}
        return {rank: states[name] for rank, name in named.items() if name in states}

    def close(self) -> None:
        """Release the GPU driver."""
        self._gpus.close()
