"""The worker as a process: its parent, descriptors, signals, children, times and output streams.

Functions and tables that the other files of `nbdist.worker` use, most of them once at the start.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import inspect
import io
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from nbdist.output.events import StreamName
from nbdist.system.processes import await_end, signal_on_parents_end
from nbdist.wire.work import Mark, mark

PLENTY = 65536
"""Limit of descriptors: enough for any data loader.

Programs that loop over all possible descriptors would take long with a higher limit.
"""

READ_SIZE = 1 << 18  # bytes that are read from a socket at once
RESERVE = 48  # descriptors kept for reading /proc, and for gloo's sockets while a group is formed
DATA_LOADER = "torch.utils.data.dataloader"


class BadEnvironment(Exception):
    """A variable of the user keeps the worker from starting; the message is one line."""


def die_with_parent(parent_pid: int) -> None:
    """Wait until the agent is this process's parent, and let Linux kill this process when it ends.

    The agent adopts a forked worker a moment after the fork, when the fork between them has exited.
    If that does not happen, this process exits.
    """
    await_end(lambda: os.getppid() == parent_pid)
    if not signal_on_parents_end(signal.SIGKILL, parent_pid):
        os._exit(1)


# --- descriptors ------------------------------------------------------------------------------


def set_limit() -> None:
    """Lower the limit of descriptors to `PLENTY`, or to `RESERVE` below the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = PLENTY + RESERVE
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(PLENTY, soft, hard - RESERVE), hard))


def is_ready(end: socket.socket | int, ms: float | None = None, event: int = select.POLLIN) -> bool:
    """Wait at most `ms` milliseconds, or for ever, for an event; return True if it came."""
    # `select` fails with descriptors from 1,024 on.
    waiting = select.poll()
    waiting.register(end, event)
    return bool(waiting.poll(ms))


@contextmanager
def reserve() -> Iterator[None]:
    """Allow `RESERVE` more descriptors in this context; used on the control thread."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    more = soft + RESERVE if hard == resource.RLIM_INFINITY else min(hard, soft + RESERVE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --- SIGINT -----------------------------------------------------------------------------------


class Interrupts:
    """Delivers SIGINT to the running task, or to a task that has arrived but not begun.

    Else SIGINT has no effect. Stop can come while a task is still unread in the worker's socket. If
    SIGINT were ignored then, the task would run on, and the worker would be killed. `has_more`
    returns True if a task has arrived that has not begun; `handle` is the handler of SIGINT while a
    task runs. Everything here runs on the main thread.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        has_more: Callable[[], bool],
        handle: Callable[[int, FrameType | None], object] = signal.default_int_handler,
    ) -> None:
        self._loop, self._has_more, self._handle = loop, has_more, handle
        self._is_kept = False
        self.end()

    def __repr__(self) -> str:
        return f"<Interrupts {'one kept' if self._is_kept else 'none'}>"

    def begin(self) -> None:
        """Deliver SIGINT to the task that begins; raise KeyboardInterrupt if one came before it."""
        signal.signal(signal.SIGINT, self._handle)
        if self._is_kept:
            self._is_kept = False
            raise KeyboardInterrupt

    def end(self) -> None:
        """Deliver SIGINT to no task: the last one is over."""
        signal.signal(signal.SIGINT, self._keep)

    def _keep(self, *_: object) -> None:
        self._is_kept = True
        # Forget the SIGINT in the loop's turn after the next. By then tasks that arrived before it
        # have been read or are seen by `_has_more`. If there is such a task, the `SigintSent` that
        # follows decides.
        self._loop.call_soon_threadsafe(self._loop.call_soon, self._forget)

    def _forget(self) -> None:
        self._is_kept = self._is_kept and self._has_more()

    def take_sent(self, *, is_for_task: bool) -> None:
        """Keep a SIGINT that has come for a task that was read before `SigintSent`, or drop it.

        A process that had no processor for a while would else get the SIGINT later, in the next
        task.
        """
        if signal.getsignal(signal.SIGINT) != self._keep:
            return  # the running task gets it
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        is_there = bool(signal.sigtimedwait([signal.SIGINT], 0)) or self._is_kept
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._is_kept = is_there and is_for_task


def system_call() -> list[bytes]:
    """Return the number and arguments of the system call in which the main thread waits.

    Returns a list with one word, such as "running", if there is none, and [] if Linux does not say.
    """
    # Not `native_id`, which a forked process takes over from its parent (Python 3.11).
    with suppress(OSError), open(f"/proc/self/task/{os.getpid()}/syscall", mode="rb") as file:
        return file.read().split()
    return []


@contextmanager
def threads_without_sigint() -> Iterator[None]:
    """Threads that are started in this context leave SIGINT to the main thread.

    After SIGSTOP and SIGCONT any thread that does not block SIGINT may get it. Python would then
    learn of it only after the main thread has read the `SigintSent` that the agent sent later.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- children ---------------------------------------------------------------------------------


def leave_world_in_children(leave: Callable[[], None] | None) -> None:
    """Call `leave` first in each child that user code forks, unless a data loader forks it.

    The child is outside the world: `init_process_group` is torch's own there, for groups of such
    children, as in torch's tutorial "Writing distributed applications" and Lightning's
    `ddp_notebook`.
    """

    def leave_world() -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # In a data loader's worker a data set may ask for its rank, as under torchrun, and nothing
        # else.
        calls = (frame.f_globals for frame, _ in traceback.walk_stack(inspect.currentframe()))
        if leave is not None and all(each.get("__name__") != DATA_LOADER for each in calls):
            leave()

    os.register_at_fork(after_in_child=leave_world)


# --- times of the last cell, and of its waits for other ranks -------------------------------------

MOST_WAITS = 4_000  # the newest waits, kept one by one; all are counted


class CellTimes:
    """Times of the last cell, script or call, and of its waits for other ranks.

    All are nanoseconds on this machine's clock. The cell runs inside of this context.
    """

    # A class, as contextlib would set attributes of an exception, whose class can refuse that.

    def __init__(self) -> None:
        self.began_ns = self.ended_ns = 0
        self.waits: deque[tuple[int, int]] = deque(maxlen=MOST_WAITS)
        self.count = self.waited_ns = 0
        self._ident = 0

    def __enter__(self) -> None:
        self.waits.clear()
        self.count = self.waited_ns = self.ended_ns = 0
        self._ident = threading.get_ident()
        self.began_ns = time.time_ns()

    def __exit__(self, *_: object) -> None:
        self.ended_ns = time.time_ns()
        self._ident = 0

    def waited(self, since_ns: int) -> None:
        """Record a wait that ends now, if this is the thread that runs the cell."""
        if threading.get_ident() == self._ident:
            now = time.time_ns()
            self.waits.append((since_ns, now))
            self.count += 1
            self.waited_ns += now - since_ns


CELL_TIMES = CellTimes()  # one for the process, as only its main thread runs cells


# --- sys.stdout and sys.stderr, which write to the pipe that the agent reads ----------------------

_libc = ctypes.CDLL(None)
_c_stdout = ctypes.c_void_p.in_dll(_libc, "stdout")
_count_buffered = ctypes.PyDLL(None)["__fpending"]  # PyDLL keeps the GIL: the function only reads
_count_buffered.restype = ctypes.c_size_t
_write_lock = threading.RLock()


def flush_c_stdout() -> None:
    """Write out what C code has printed to stdout."""
    if _count_buffered(_c_stdout):
        _libc.fflush(_c_stdout)


def _before_fork() -> None:
    flush_c_stdout()  # else each child would print the same text again
    _write_lock.acquire()


# A child forked while another thread writes would find the lock held for ever. So the thread that
# forks, which is the child's only thread, holds the lock during the fork.
os.register_at_fork(
    before=_before_fork,
    after_in_parent=_write_lock.release,
    after_in_child=_write_lock.release,
)

FIRST_PRIVATE = 200  # above those that programs close or write to by counting through them

_kept = {1: 1, 2: 2}  # duplicates of 1 and 2 for nbdist alone: cells may close those
_own: dict[StreamName, io.TextIOWrapper] = {}


def _is_elsewhere(fd: int) -> bool:
    """Return True if a cell has redirected the descriptor, and not closed it."""
    try:
        return not os.path.sameopenfile(fd, _kept[fd])
    except OSError:  # closed
        return False


def write_all(data: bytes, fd: int = 1) -> None:
    """Write all data to a descriptor, by default the real stdout; blocks if the agent is slow."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # user code has set it to non-blocking, as asyncio and Node.js do
            is_ready(fd, event=select.POLLOUT)


def write_mark(token: str, value: Mark) -> None:
    """Write a mark to stdout, by which the agent recognizes this place in the output."""
    with _write_lock:
        write_all(mark(token, value), _kept[1])


def flush_streams() -> None:
    """Flush the streams of Python, which may be the user's, and of C; reopen what a cell closed."""
    for name, own in _own.items():
        if getattr(sys, name) is None:  # a cell has removed it: no further cell could run
            setattr(sys, name, own)
        with suppress(Exception):
            getattr(sys, name).flush()
    flush_c_streams()
    # Reopen what a cell has closed: else the next file that is opened would get that number.
    for fd, kept in _kept.items():
        try:
            os.fstat(fd)
        except OSError:
            with suppress(OSError):  # the duplicate has been closed too
                os.dup2(kept, fd)


def flush_c_streams() -> None:
    """Write out what C code has printed to any stream: libc buffers 4 KiB if stdout is a pipe."""
    _libc.fflush(None)


class _Bytes(io.RawIOBase):
    """The unbuffered bytes of `sys.stdout` or `sys.stderr`, in order with all other output.

    Both are written to the same pipe, stderr between two marks, because two pipes have no common
    order. If a cell has redirected descriptor 1 or 2, that stream's bytes go there.
    """

    def __init__(self, name: StreamName, token: str) -> None:
        self.name = f"<{name}>"
        self._fd, self._before, self._after = 1, b"", b""
        if name == "stderr":
            self._fd, self._before, self._after = 2, mark(token, "stderr"), mark(token, "stdout")

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data: Any) -> int:
        said = bytes(data)
        if self._fd == 1:
            flush_c_stdout()
        with _write_lock:
            if _is_elsewhere(self._fd):
                write_all(said, self._fd)
            elif said:
                write_all(self._before + said + self._after, _kept[1])
        return len(data)

    def close(self) -> None:
        """Do nothing: user code must not close the worker's stream, to which later output goes."""


def rank_stream(name: StreamName, token: str) -> io.TextIOWrapper:
    """Return a text stream for stdout or stderr that writes through and cannot be closed."""
    stream: Any = _Bytes(name, token)
    return io.TextIOWrapper(stream, "utf-8", "backslashreplace", newline="\n", write_through=True)


def install(token: str) -> None:
    """Replace the process's `sys.stdout` and `sys.stderr`; called before user code runs."""
    for fd in _kept:
        try:
            _kept[fd] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_PRIVATE)
        except OSError:  # the limit is below FIRST_PRIVATE
            _kept[fd] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
    sys.stdout = _own["stdout"] = rank_stream("stdout", token)
    sys.stderr = _own["stderr"] = rank_stream("stderr", token)
