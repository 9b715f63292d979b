"""Finds out in which line a worker's main thread is, and for which collective it waits.

The control thread of each worker calls `Probe` on the agent's request, while the main thread runs a
task. If a thread holds the GIL, the control thread cannot answer. For this case the last part of
the file tells the agent where in the worker's memory CPython keeps the calls of the main thread.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import gc
import inspect
import linecache
import os
import re
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import CodeType, FrameType
from typing import IO, Any, TypeVar

import torch.distributed as dist

from nbdist.values.definitions import cell_numbers, function_name
from nbdist.wire.control import Traced
from nbdist.wire.places import PACKAGES, Begun, Collective, RankPosition, StackFrame
from nbdist.wire.stack_layout import CallLayout
from nbdist.worker.compat import accelerator
from nbdist.worker.compat import torch as seam
from nbdist.worker.group.gloo import wait
from nbdist.worker.group.group import Group
from nbdist.worker.group.nccl import Counts, Pending, Recording, UnderWay, wait_for_device
from nbdist.worker.group.stores import AbortableStore
from nbdist.worker.ops import run
from nbdist.worker.process import system_call
from nbdist.worker.steps import STEPS

TORCH_DISTRIBUTED_FOLDER = os.path.join("torch", "distributed") + os.sep
WAIT_KINDS = "send or recv" if seam.RECORDS_GLOO else "send, recv or an asynchronous collective"
CALLING, COALESCED = TORCH_DISTRIBUTED_FOLDER + "distributed_c10d.py", "_coalescing_manager"
POINT_TO_POINT = {inspect.unwrap(each).__code__ for each in (dist.send, dist.recv)}
FUTEX = 202 if os.uname().machine == "x86_64" else 98
LIBRARIES = (PACKAGES.pattern, "<frozen ", re.escape(os.path.dirname(os.path.dirname(__file__))))
IN_LIBRARY = re.compile("|".join(LIBRARIES))
# The option for getsockopt, and the struct that it fills (tcp_info in linux/tcp.h), with the fields
# `tcpi_retransmits`, `tcpi_unacked`, `tcpi_bytes_acked` and `tcpi_bytes_received`.
TCP_INFO, TCP_INFO_FIELDS = 11, struct.Struct("=2xB21xI92xQQ")
# A connection counts as stalled after this many retransmissions in vain. TCP makes them after 0.2,
# 0.6 and 1.4 s.
STALLED = 3


class Probe:
    """Finds out in which line and collective the main thread is, up to ten times a second."""

    def __init__(self, group: Group | None) -> None:
        self._loop = asyncio.get_event_loop()  # the loop of the main thread, which runs this line
        self._group = group
        self._ident = threading.main_thread().ident or 0
        self._recording = Recording()
        self.uses_nccl = group is not None and group.uses_nccl
        self._nccl = UnderWay(is_used=self.uses_nccl)

    def locate(self) -> RankPosition:
        """Return the main thread's position, and facts on whether the thread can go on."""
        frames = list(frames_of(self._ident))
        stack = frames if self._find_line(frames) else self._stack()
        counts, nccl = self._recording.counts(), self._nccl.pending()
        begun = {number: each.begun for number, each in counts.items()}
        spot, operation = self._find_spot(stack), self._find_operation(frames, counts, nccl)
        is_idle = not spot.line and not spot.file
        in_flight, moved, stalled = self._read_tcp_state()
        return replace(
            spot,
            operation=operation,
            # Listing the collectives takes long, and the agent needs them only of ranks that wait
            # or are idle.
            begun=self._recent_collectives(counts) if operation or is_idle else (),
            has_help=bool(operation) and self._has_help(frames),
            is_cleaning_up=is_handling_stop(self._ident),
            has_taken_sigint=STEPS.has_taken_sigint,
            dropped_interrupts=STEPS.dropped_interrupts,
            # nccl's number tells the newest collective from earlier ones with the same name.
            counts={**begun, "nccl": nccl.number} if self.uses_nccl else begun,
            moved=moved,
            in_flight=in_flight,
            stalled=stalled,
            # With gloo, a rank is calm if no thread of gloo is running. The threads of ipykernel do
            # not count, as they are often busy for other reasons. With nccl no rank counts as calm:
            # the work is on the GPU, so threads do not show it.
            is_calm=not (
                self.uses_nccl or any(map(_is_running_gloo_thread, os.listdir("/proc/self/task")))
            ),
            unfinished=sum(each.unfinished for each in counts.values()) + nccl.count,
        )

    def locate_briefly(self) -> RankPosition:
        """Return the main thread's position with only its line, file and collective.

        The other fields need more system calls, and after each of these the control thread may wait
        5 ms for the GIL.
        """
        return self._locate(self._stack())

    def trace(self) -> Traced:
        """Return the main thread's position, and the calls of its stack, the innermost first."""
        frames = self._stack()
        shown = [frame for frame in frames if frame.f_code is not wait.__code__]
        cells = cell_numbers()
        return Traced(self._locate(frames), tuple(describe_frame(frame, cells) for frame in shown))

    def last_collective(self) -> Collective | None:
        """Return the collective that was begun last; None if no collective was begun."""
        collectives = filter(None, [self._recording.last(), self._nccl.last()])
        return max(collectives, key=lambda each: each.began_ns, default=None)

    def start_over(self) -> None:
        """Forget the collectives that backends have begun, because the groups are being rebuilt."""
        self._recording.start_over()
        self._nccl.start_over()

    def _locate(self, frames: list[FrameType]) -> RankPosition:
        operation = _called_function(frames)
        if not operation or self._group is None or not _is_in_futex():
            operation = self._find_operation(frames, self._recording.counts(), self._nccl.pending())
        return replace(self._find_spot(frames), operation=operation)

    def _recent_collectives(self, counts: Mapping[str, Counts]) -> tuple[Begun, ...]:
        since_ns = self._group.task_began_ns if self._group is not None else 0
        return self._recording.begun(counts, since_ns) + self._nccl.begun(since_ns)

    @property
    def waits_for_nccl(self) -> bool:
        """Whether the main thread runs user code that may use the result of a collective of nccl.

        This is so if the code is calling a collective, or if a collective has not ended or has
        failed.
        """
        if not self.uses_nccl or self._group is None:
            return False
        frames = list(frames_of(self._ident))
        spot = self._find_spot(frames)
        if not (spot.line or spot.file):
            return False
        is_pending = self._nccl.pending().count > 0 or bool(self._group.nccl_error)
        return is_pending or is_calling(frames[0].f_code)

    def _stack(self) -> list[FrameType]:
        """Return the main thread's frames; if a cell awaits something, the frames of the cell."""
        frames, cells = list(frames_of(self._ident)), cell_numbers()
        if any(frame.f_code.co_filename in cells for frame in frames):
            return frames
        return awaiting_frames(self._loop, cells) or frames

    def _find_spot(self, frames: list[FrameType]) -> RankPosition:
        return run.spot(frames) or RankPosition(line=self._find_line(frames))

    def _find_line(self, frames: list[FrameType]) -> int:
        """Return the line of the running cell or called function; 0 if neither runs."""
        cells, inner = cell_numbers(), None
        for frame in frames:
            if frame.f_code is run.call.__code__ and inner is not None:
                return inner.f_lineno
            if frame.f_code is wait_for_device.__code__:
                return int(frame.f_locals["line"])
            inner = frame
        return next((f.f_lineno for f in reversed(frames) if f.f_code.co_filename in cells), 0)

    def _find_operation(
        self, frames: list[FrameType], counts: Mapping[str, Counts], nccl: Pending
    ) -> str:
        """Return the name of the operation in which the main thread waits for ranks, or "".

        The name is mostly torch's name of a collective. With any backend, the thread waits for
        ranks if it waits in a group's store. With nccl, it waits if a collective has begun and not
        ended, or is being started. With gloo, it waits if it has begun a collective or called a
        function of torch.distributed, and now waits for a lock (a futex of Linux). The list of
        gloo's collectives in Flight Recorder alone cannot tell this, because it has no sends.
        """
        if self._group is None:
            return ""
        if any(frame.f_code is AbortableStore.awaited.__code__ for frame in frames):
            return _called_function(frames) or "store" if self._group.is_waiting_for_ranks else ""
        if nccl.name:
            return nccl.name
        if self.uses_nccl and is_calling(frames[0].f_code if frames else None):
            return _called_function(frames)
        if not _is_in_futex():
            return ""
        if name := self._recording.newest_pending(counts):
            return name
        callers = [outer for inner, outer in pairwise(frames) if inner.f_code is wait.__code__]
        if callers:
            # The wait is for a send or recv, or for a collective that Flight Recorder lacks.
            has_name = not seam.RECORDS_GLOO or callers[0].f_code in POINT_TO_POINT
            return (has_name and _called_function(frames)) or WAIT_KINDS
        if (function := _called_function(frames)) or seam.RECORDS_GLOO:
            return function
        # Autograd waits in C++ for the gradients that a DDP module reduces.
        return "backward" if any(f.f_code.co_name == seam.BACKWARD for f in frames) else ""

    def _has_help(self, frames: list[FrameType]) -> bool:
        """Return True if the main thread's wait may end without the help of another rank.

        The wait may be ended by a GPU that is in use, or by another thread of this process that
        runs user code or communicates. Also return True if the main thread does not wait for ranks.
        """
        threads = set(call_without_gc(sys._current_frames)) - {self._ident, threading.get_ident()}
        has_gpu = accelerator.is_in_use()
        return has_gpu or not _waits_for_ranks(frames) or any(map(_runs_user_code, threads))

    def _read_tcp_state(self) -> tuple[int, int, tuple[tuple[str, str], ...]]:
        """Return facts on gloo's connections.

        The facts are the number of packets in flight, the number of bytes sent and received, and
        the addresses of both ends of each stalled connection.
        """
        in_flight = moved = 0
        stalled = set()
        for connection in self._group.connections() if self._group is not None else ():
            info = connection.getsockopt(6, TCP_INFO, TCP_INFO_FIELDS.size)
            retransmissions, unacked, acked, received = TCP_INFO_FIELDS.unpack(info)
            in_flight += unacked
            moved += acked + received
            if unacked and retransmissions >= STALLED:
                with suppress(OSError):  # TCP has just closed the connection
                    stalled.add((connection.getsockname()[0], connection.getpeername()[0]))
        return in_flight, moved, tuple(sorted(stalled))


def _waits_for_ranks(frames: list[FrameType]) -> bool:
    inner = frames[0].f_code if frames else None
    if any(frame.f_code is AbortableStore.awaited.__code__ for frame in frames):
        return True
    if inner is None or inner is wait.__code__:
        return inner is not None
    return TORCH_DISTRIBUTED_FOLDER in inner.co_filename or inner.co_name == seam.BACKWARD


def is_calling(code: CodeType | None) -> bool:
    """Return True if a thread whose innermost call runs `code` is starting a collective.

    A thread in a public function of torch's `distributed_c10d`, or in `_coalescing_manager`, counts
    as starting a collective. Flight Recorder does not help here: it has no entry for the collective
    until nccl has connected the ranks.
    """
    if code is None or not code.co_filename.endswith(CALLING):
        return False
    return code.co_name == COALESCED or not code.co_name.startswith("_")


def _runs_user_code(ident: int) -> bool:
    files = [frame.f_code.co_filename for frame in frames_of(ident)]
    return any(TORCH_DISTRIBUTED_FOLDER in file or not IN_LIBRARY.match(file) for file in files)


def _is_in_futex() -> bool:
    """Return True if the main thread waits for a lock or for another thread."""
    return system_call()[:1] == [b"%d" % FUTEX]


def _called_function(frames: list[FrameType]) -> str:
    """Return the name of the function of torch.distributed that user code has called.

    This is the outermost public function on the stack, or the outermost function if none is public.
    Return "" if no function of torch.distributed is on the stack.
    """
    names = [f.f_code.co_name for f in frames if TORCH_DISTRIBUTED_FOLDER in f.f_code.co_filename]
    names = [name for name in names if name != "wrapper"]
    public = [name for name in names if not name.startswith("_")]
    return next(reversed(public or names), "")


def _is_running_gloo_thread(tid: str) -> bool:
    """Return True if a thread is gloo's (`gloo_tcp_loop` or `pt_gloo_runloop`) and is running."""
    try:
        with open(f"/proc/self/task/{tid}/stat", mode="rb") as file:
            name, _, status = file.read().rpartition(b") ")
    except OSError:
        return False  # the thread has ended
    return b"gloo" in name and status[:1] in (b"R", b"D")


# --- stacks of this worker's threads ----------------------------------------------------------

RUNS_CELLS = "run_cell_async"  # the coroutine of IPython that awaits the coroutine of a cell
T = TypeVar("T")
_open: list[IO[bytes]] = []  # keeps the file of `write_stacks_to` open: faulthandler does not


def call_without_gc(get: Callable[[], T]) -> T:
    """Call `get`, which makes frame objects of another thread, without collecting garbage.

    In Python 3.11 making a frame object can start a garbage collection, in which a destructor may
    release the GIL. Then the call of the other thread could end, and the new object would refer to
    memory that is already used for something else.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        return get()
    finally:
        if was_on:
            gc.enable()


def frames_of(ident: int) -> Iterator[FrameType]:
    """Yield the frames of a thread, the innermost first."""
    frame = call_without_gc(sys._current_frames).get(ident)
    while frame is not None:
        yield frame
        frame = call_without_gc(partial(getattr, frame, "f_back"))


def awaiting_frames(loop: asyncio.AbstractEventLoop, cells: Mapping[str, int]) -> list[FrameType]:
    """Return the frames of a cell that awaits something, the innermost first.

    `cells` has the numbers of cells by their file names. Return [] if no cell awaits anything.
    """
    for task in asyncio.all_tasks(loop):
        frames = list(_frames_of_coroutine(task.get_coro()))
        names = {frame.f_code.co_name for frame in frames}
        if RUNS_CELLS in names and any(frame.f_code.co_filename in cells for frame in frames):
            return frames[::-1]
    return []


def _frames_of_coroutine(coroutine: Any) -> Iterator[FrameType]:
    """Yield the frames of a coroutine and of all coroutines it awaits, the outermost first."""
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            return
        yield frame
        is_native = hasattr(coroutine, "cr_await")
        coroutine = coroutine.cr_await if is_native else coroutine.gi_yieldfrom


def describe_frame(frame: FrameType, cells: Mapping[str, int]) -> StackFrame:
    """Describe a frame; for a cell's frame add the source line, which the agent cannot read.

    `cells` has the numbers of cells by their file names.
    """
    file, line = frame.f_code.co_filename, frame.f_lineno or 0
    function = function_name(frame.f_code.co_name)
    if file not in cells:
        return StackFrame(file, line, function)
    code = linecache.getline(file, line).strip()
    return StackFrame(f"Cell In[{cells[file]}]", line, function, code)


def is_handling_stop(ident: int) -> bool:
    """Return True if a thread is in an `except` or `finally` block because of Stop.

    Stop raises KeyboardInterrupt, or CancelledError in a cell that awaits something.
    """
    current: Any = sys._current_exceptions().get(ident)
    # In Python 3.11 the value is a tuple of class, exception and traceback.
    error: BaseException | None = current[1] if isinstance(current, tuple) else current
    while error is not None:
        if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
            return True
        error = error.__context__
    return False


# --- without the GIL --------------------------------------------------------------------------


def write_stacks_to(path: str) -> None:
    """Open a file from which the agent can learn this thread's stack without asking this process.

    The first line of the file tells the agent where in this process's memory the stack is
    (`CallLayout`). The line is empty for an unknown version of Python. If the process crashes,
    faulthandler writes the stack to the file.
    """
    file = open(path, "ab", buffering=0)  # noqa: SIM115 (it stays open until the process exits)
    _open.append(file)
    layout = call_layout()
    file.write(layout.line() if layout is not None else b"\n")
    restore_crash_file()


def restore_crash_file() -> None:
    """Let faulthandler write to the file of `write_stacks_to` again.

    User code may have chosen another file, for example by torch's `@record`.
    """
    if _open:
        faulthandler.enable(file=_open[-1], all_threads=False)


# --- where CPython keeps a thread's calls: the agent reads the memory of the worker ------------

# Offsets in structs of CPython, the same in all releases of a minor version: _ts, _PyCFrame (up to
# Python 3.12), _PyInterpreterFrame and PyCodeObject. In a free-threaded build of Python these
# offsets are wrong: the agent notices that the objects there have other types, and shows no stack.

OFFSETS = {
    # By version of Python, the offsets of these fields of `CallLayout`: (holder, call), (code,
    # previous, instruction, owner), (file, name, first_line, lines).
    (3, 11): ((56, 8), (32, 48, 56, 69), (112, 120, 72, 136)),
    (3, 12): ((56, 0), (0, 8, 56, 70), (112, 120, 68, 136)),
    (3, 13): ((0, 72), (0, 8, 56, 70), (112, 120, 68, 136)),
    (3, 14): ((0, 72), (0, 8, 56, 74), (112, 120, 68, 136)),
}


def call_layout() -> CallLayout | None:
    """Return where in memory CPython keeps the calls of the calling thread.

    Return None for another implementation or an unknown version of Python.
    """
    if sys.implementation.name != "cpython" or sys.version_info[:2] not in OFFSETS:
        return None
    state, call, code = OFFSETS[sys.version_info[:2]]
    this_thread = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyThreadState_Get", ctypes.pythonapi))
    return CallLayout(
        this_thread(),
        id(CodeType),
        id(str),
        *(*state, *call, *code),
        instructions=CodeType.__basicsize__,
        # The offset of the letters in a string: the size of the string without its letters and
        # the zero at its end. In the second string a letter and the zero have 2 bytes each.
        ascii=sys.getsizeof("") - 1,
        other=sys.getsizeof(chr(256)) - 4,
    )
