"""Finds out where the main thread is: in which line, and which collective it waits for.

Runs in each rank on the control thread, which asks for it while the main thread runs a task.
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
from nbdist.wire.call_layout import CallLayout
from nbdist.wire.control import Traced
from nbdist.wire.places import PACKAGES, Begun, Collective, Place, StackFrame
from nbdist.worker.compat import accelerator
from nbdist.worker.compat import torch as seam
from nbdist.worker.group.gloo import wait
from nbdist.worker.group.group import Group
from nbdist.worker.group.nccl import Counts, Pending, Recording, UnderWay, wait_for_device
from nbdist.worker.group.stores import AbortableStore
from nbdist.worker.ops import run
from nbdist.worker.process import system_call
from nbdist.worker.steps import STEPS

IN_TORCH = os.path.join("torch", "distributed") + os.sep
WAITS = "send or recv" if seam.RECORDS_GLOO else "send, recv or an asynchronous collective"
CALLING, COALESCED = IN_TORCH + "distributed_c10d.py", "_coalescing_manager"
POINT_TO_POINT = {inspect.unwrap(each).__code__ for each in (dist.send, dist.recv)}
FUTEX = 202 if os.uname().machine == "x86_64" else 98
LIBRARIES = (PACKAGES.pattern, "<frozen ", re.escape(os.path.dirname(os.path.dirname(__file__))))
IN_LIBRARY = re.compile("|".join(LIBRARIES))
# `tcpi_retransmits`, `tcpi_unacked`, `tcpi_bytes_acked`, `tcpi_bytes_received` of linux/tcp.h.
TCP_INFO, TCP_INFO_FIELDS = 11, struct.Struct("=2xB21xI92xQQ")
STALLED = 3  # retransmissions in vain: TCP makes them after 0.2, 0.6 and 1.4 s


class Probe:
    """Locates the main thread; cheap enough for ten calls a second."""

    def __init__(self, group: Group | None) -> None:
        self._loop = asyncio.get_event_loop()  # the main thread's: it makes this object
        self._group = group
        self._ident = threading.main_thread().ident or 0
        self._recording = Recording()
        self.uses_nccl = group is not None and group.uses_nccl
        self._nccl = UnderWay(is_used=self.uses_nccl)

    def locate(self) -> Place:
        """Return where the main thread is, with all that tells whether it can go on."""
        frames = list(frames_of(self._ident))
        shown = frames if self._line(frames) else self._stack()
        counts, nccl = self._recording.counts(), self._nccl.pending()
        begun = {number: each.begun for number, each in counts.items()}
        spot, operation = self._spot(shown), self._operation(frames, counts, nccl)
        is_idle = not spot.line and not spot.file
        in_flight, moved, stalled = self._carried()
        return replace(
            spot,
            operation=operation,
            # Reading them takes a while, which does no harm to a rank that waits or is idle.
            begun=self._begun(counts) if operation or is_idle else (),
            has_help=bool(operation) and self._has_help(frames),
            is_cleaning_up=handles_stop(self._ident),
            has_taken_sigint=STEPS.has_taken_sigint,
            # A rank that waits in another collective of the same name has another number.
            counts={**begun, "nccl": nccl.number} if self.uses_nccl else begun,
            moved=moved,
            in_flight=in_flight,
            stalled=stalled,
            # Only gloo's threads are looked at: ipykernel's are often busy, and nccl's work is on
            # the GPU.
            is_calm=not (self.uses_nccl or any(map(_is_at_work, os.listdir("/proc/self/task")))),
            unfinished=sum(each.unfinished for each in counts.values()) + nccl.count,
        )

    def locate_briefly(self) -> Place:
        """Return only the line and the collective: a system call can take 5 ms for the GIL."""
        return self._located(self._stack())

    def trace(self) -> Traced:
        """Return the line, the collective and the main thread's calls, the innermost first."""
        frames = self._stack()
        shown = [frame for frame in frames if frame.f_code is not wait.__code__]
        cells = cell_numbers()
        return Traced(self._located(frames), tuple(described(frame, cells) for frame in shown))

    def last_collective(self) -> Collective | None:
        """Return the collective that was begun last; None if none was."""
        found = filter(None, [self._recording.last(), self._nccl.last()])
        return max(found, key=lambda each: each.began_ns, default=None)

    def start_over(self) -> None:
        """Forget what backends have begun so far: the groups are being rebuilt."""
        self._recording.start_over()
        self._nccl.start_over()

    def _located(self, frames: list[FrameType]) -> Place:
        operation = _called(frames)
        if not operation or self._group is None or not _is_in_futex():
            operation = self._operation(frames, self._recording.counts(), self._nccl.pending())
        return replace(self._spot(frames), operation=operation)

    def _begun(self, counts: Mapping[str, Counts]) -> tuple[Begun, ...]:
        since = self._group.task_began_ns if self._group is not None else 0
        return self._recording.begun(counts, since) + self._nccl.begun(since)

    @property
    def waits_for_nccl(self) -> bool:
        """True while a cell runs and nccl's collectives have not ended, or have failed."""
        if not self.uses_nccl or self._group is None:
            return False
        frames = list(frames_of(self._ident))
        spot = self._spot(frames)
        if not (spot.line or spot.file):
            return False
        is_pending = self._nccl.pending().count > 0 or bool(self._group.nccl_error)
        return is_pending or is_calling(frames[0].f_code)

    def _stack(self) -> list[FrameType]:
        """Return the main thread's frames, or those of a cell that awaits something."""
        frames, cells = list(frames_of(self._ident)), cell_numbers()
        if any(frame.f_code.co_filename in cells for frame in frames):
            return frames
        return awaited(self._loop, cells) or frames

    def _spot(self, frames: list[FrameType]) -> Place:
        return run.spot(frames) or Place(line=self._line(frames))

    def _line(self, frames: list[FrameType]) -> int:
        """Return the line of the running cell or called function; 0 if neither runs."""
        cells, inner = cell_numbers(), None
        for frame in frames:
            if frame.f_code is run.call.__code__ and inner is not None:
                return inner.f_lineno
            if frame.f_code is wait_for_device.__code__:
                return int(frame.f_locals["line"])
            inner = frame
        return next((f.f_lineno for f in reversed(frames) if f.f_code.co_filename in cells), 0)

    def _operation(
        self, frames: list[FrameType], counts: Mapping[str, Counts], nccl: Pending
    ) -> str:
        """Return torch's name of the collective that the main thread waits for; "" if for none.

        It waits if it is in the store of a group, or in a futex: with a collective begun, or in a
        function of torch.distributed, as sends are not recorded.
        """
        if self._group is None:
            return ""
        if any(frame.f_code is AbortableStore.awaited.__code__ for frame in frames):
            return _called(frames) or "store" if self._group.is_waiting_for_ranks else ""
        if nccl.name:
            return nccl.name
        if self.uses_nccl and is_calling(frames[0].f_code if frames else None):
            return _called(frames)
        if not _is_in_futex():
            return ""
        if begun := self._recording.newest_pending(counts):
            return begun
        callers = [outer for inner, outer in pairwise(frames) if inner.f_code is wait.__code__]
        if callers:
            # User code is in `dist.recv`, or in a `wait` of its own.
            is_known = not seam.RECORDS_GLOO or callers[0].f_code in POINT_TO_POINT
            return (is_known and _called(frames)) or WAITS
        if (called := _called(frames)) or seam.RECORDS_GLOO:
            return called
        # Autograd waits in C++ for the gradients that a DDP module reduces.
        return "backward" if any(f.f_code.co_name == seam.BACKWARD for f in frames) else ""

    def _has_help(self, frames: list[FrameType]) -> bool:
        """Return True if something other than the other ranks may end the main thread's wait.

        That is a GPU in use, or another thread that runs user code or communicates. It is also True
        if the main thread waits for something other than ranks.
        """
        threads = set(uncollected(sys._current_frames)) - {self._ident, threading.get_ident()}
        has_gpu = accelerator.is_in_use()
        return has_gpu or not _waits_for_ranks(frames) or any(map(_is_of_user, threads))

    def _carried(self) -> tuple[int, int, tuple[tuple[str, str], ...]]:
        """Return gloo's packets in flight, bytes carried, and addresses of stalled connections."""
        in_flight = moved = 0
        stalled = set()
        for connection in self._group.connections() if self._group is not None else ():
            info = connection.getsockopt(6, TCP_INFO, TCP_INFO_FIELDS.size)
            again, unacked, acked, received = TCP_INFO_FIELDS.unpack(info)
            in_flight += unacked
            moved += acked + received
            if unacked and again >= STALLED:
                with suppress(OSError):  # TCP has just closed the connection
                    stalled.add((connection.getsockname()[0], connection.getpeername()[0]))
        return in_flight, moved, tuple(sorted(stalled))


def _waits_for_ranks(frames: list[FrameType]) -> bool:
    inner = frames[0].f_code if frames else None
    if any(frame.f_code is AbortableStore.awaited.__code__ for frame in frames):
        return True
    if inner is None or inner is wait.__code__:
        return inner is not None
    return IN_TORCH in inner.co_filename or inner.co_name == seam.BACKWARD


def is_calling(code: CodeType | None) -> bool:
    """Return True if a thread with this innermost call is in C++ that a collective has called.

    nccl connects ranks there, before there is anything on the GPU or in Flight Recorder.
    """
    if code is None or not code.co_filename.endswith(CALLING):
        return False
    return code.co_name == COALESCED or not code.co_name.startswith("_")


def _is_of_user(ident: int) -> bool:
    files = [frame.f_code.co_filename for frame in frames_of(ident)]
    return any(IN_TORCH in file or not IN_LIBRARY.match(file) for file in files)


def _is_in_futex() -> bool:
    """Return True if the main thread waits for a lock or for another thread."""
    return system_call()[:1] == [b"%d" % FUTEX]


def _called(frames: list[FrameType]) -> str:
    """Return the function of torch.distributed that user code called, preferably a public one."""
    names = [f.f_code.co_name for f in frames if IN_TORCH in f.f_code.co_filename]
    names = [name for name in names if name != "wrapper"]
    public = [name for name in names if not name.startswith("_")]
    return next(reversed(public or names), "")


def _is_at_work(tid: str) -> bool:
    """Return True if a thread is one of gloo's (`gloo_tcp_loop`, `pt_gloo_runloop`) and runs."""
    try:
        with open(f"/proc/self/task/{tid}/stat", mode="rb") as file:
            name, _, rest = file.read().rpartition(b") ")
    except OSError:
        return False  # the thread has ended
    return b"gloo" in name and rest[:1] in (b"R", b"D")


# --- stacks of this worker's threads ----------------------------------------------------------

RUNS_CELLS = "run_cell_async"  # IPython's coroutine, which awaits the cell's
Result = TypeVar("Result")
_open: list[IO[bytes]] = []  # keeps files open, of which faulthandler has only the descriptors


def uncollected(get: Callable[[], Result]) -> Result:
    """Call `get`, which makes objects of another thread's frame, without collecting garbage.

    In Python 3.11 making such an object can start a collection, in which a destructor may release
    the GIL. Then the other thread's call may end, and the frame's memory become something else.
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
    frame = uncollected(sys._current_frames).get(ident)
    while frame is not None:
        yield frame
        frame = uncollected(partial(getattr, frame, "f_back"))


def awaited(loop: asyncio.AbstractEventLoop, cells: Mapping[str, int]) -> list[FrameType]:
    """Return the frames of a cell that awaits something, the innermost first; empty if none."""
    for task in asyncio.all_tasks(loop):
        frames = list(_awaits(task.get_coro()))
        names = {frame.f_code.co_name for frame in frames}
        if RUNS_CELLS in names and any(frame.f_code.co_filename in cells for frame in frames):
            return frames[::-1]
    return []


def _awaits(coroutine: Any) -> Iterator[FrameType]:
    """Yield the frames of a coroutine and of those that it awaits, the outermost first."""
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            return
        yield frame
        is_native = hasattr(coroutine, "cr_await")
        coroutine = coroutine.cr_await if is_native else coroutine.gi_yieldfrom


def described(frame: FrameType, cells: Mapping[str, int]) -> StackFrame:
    """Describe a frame, with its source line if it is a cell's: the agent can read other files."""
    file, line = frame.f_code.co_filename, frame.f_lineno or 0
    name = function_name(frame.f_code.co_name)
    if file not in cells:
        return StackFrame(file, line, name)
    code = linecache.getline(file, line).strip()
    return StackFrame(f"Cell In[{cells[file]}]", line, name, code)


def handles_stop(ident: int) -> bool:
    """Return True if a thread is in an `except` or `finally` that KeyboardInterrupt has led to."""
    found: Any = sys._current_exceptions().get(ident)
    error: BaseException | None = found[1] if isinstance(found, tuple) else found  # Python 3.11
    while error is not None:
        if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
            return True
        error = error.__context__
    return False


# --- without the GIL --------------------------------------------------------------------------


def write_stacks_to(path: str) -> None:
    """Let faulthandler append stacks of crashes to a new file, which this function begins.

    Its first line is the main thread's `CallLayout`, or empty for an unknown Python.
    """
    file = open(path, "ab", buffering=0)  # noqa: SIM115 (for as long as the process lives)
    _open.append(file)
    layout = call_layout()
    file.write(layout.line() if layout is not None else b"\n")
    keep_crashes()


def keep_crashes() -> None:
    """Let faulthandler write to that file again: torch's `@record`, for one, changes the file."""
    if _open:
        faulthandler.enable(file=_open[-1], all_threads=False)


# --- where CPython keeps the calls of a thread, for the agent, which reads them from outside ---

# Offsets in structs of its headers, the same in all releases of a minor version: _ts and _PyCFrame
# (cpython/pystate.h), _PyInterpreterFrame (internal/pycore_frame.h), PyCodeObject (cpython/code.h).
# In a build whose objects begin otherwise, without a GIL, the reader finds other types there.

OFFSETS = {
    # holder, call; code, previous, instruction, owner; file, name, first_line, lines
    (3, 11): ((56, 8), (32, 48, 56, 69), (112, 120, 72, 136)),
    (3, 12): ((56, 0), (0, 8, 56, 70), (112, 120, 68, 136)),
    (3, 13): ((0, 72), (0, 8, 56, 70), (112, 120, 68, 136)),
    (3, 14): ((0, 72), (0, 8, 56, 74), (112, 120, 68, 136)),
}


def call_layout() -> CallLayout | None:
    """Return where the calls of this thread are; None for an unknown Python."""
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
        # After the head: nothing and its end, or a letter and its end with 2 bytes each.
        ascii=sys.getsizeof("") - 1,
        other=sys.getsizeof(chr(256)) - 4,
    )
