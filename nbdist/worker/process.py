"""A worker as a process: parent, descriptors, signals, children, streams, its cells' times."""

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
"""Descriptors: enough for any data loader, and few for programs that go through all of them."""

RESERVE = 48  # for reading /proc, and for gloo's sockets while a group is formed
DATA_LOADER = "torch.utils.data.dataloader"


class BadEnvironment(Exception):
    """A variable of the user's keeps the worker from starting; the message is one line."""


def die_with_parent(parent_pid: int) -> None:
    """End by the kernel's SIGKILL when the agent ends, whose child a fork becomes in a moment."""
    await_end(lambda: os.getppid() == parent_pid)
    if not signal_on_parents_end(signal.SIGKILL, parent_pid):
        os._exit(1)


# --- descriptors ------------------------------------------------------------------------------


def set_limit() -> None:
    """Set a limit that leaves some: a rank without any more can still be stopped and healed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = PLENTY + RESERVE
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(PLENTY, soft, hard - RESERVE), hard))


def is_ready(end: socket.socket | int, ms: float | None = None, event: int = select.POLLIN) -> bool:
    """Wait at most `ms` milliseconds for this event; return True if it has come."""
    # Not `select`, which knows no descriptors from 1,024 on.
    waiting = select.poll()
    waiting.register(end, event)
    return bool(waiting.poll(ms))


@contextmanager
def reserve() -> Iterator[None]:
    """Allow more descriptors, as far as the hard limit does; called on the control thread."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    more = soft + RESERVE if hard == resource.RLIM_INFINITY else min(hard, soft + RESERVE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --- SIGINT -----------------------------------------------------------------------------------


class Interrupts:
    """Lets SIGINT reach the task that runs, or one that is on its way, and nothing else.

    Stop can come when the task is in the worker's socket and has not been read: were it ignored,
    the task would run on, and the worker be killed.  `has_more` returns True while a task has come
    that has not begun, read or not; `handle` is the handler of SIGINT while a task runs.  All of
    it runs on the main thread.
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
        """Take them for the task that begins; KeyboardInterrupt if one came before it."""
        signal.signal(signal.SIGINT, self._handle)
        if self._is_kept:
            self._is_kept = False
            raise KeyboardInterrupt

    def end(self) -> None:
        """Take them for no task, now that this one is over."""
        signal.signal(signal.SIGINT, self._keep)

    def _keep(self, *_: object) -> None:
        self._is_kept = True
        # In the turn after the next: what arrived before the signal has been read by then, or
        # is seen to wait; then the mark that follows it decides.
        self._loop.call_soon_threadsafe(self._loop.call_soon, self._forget)

    def _forget(self) -> None:
        self._is_kept = self._is_kept and self._has_more()

    def take_sent(self, *, is_for_task: bool) -> None:
        """Take one that was sent before this: for the task read before this, or for none.

        Taken later, as by a process that had no processor for a while, it would hit the next task.
        """
        if signal.getsignal(signal.SIGINT) != self._keep:
            return  # a task runs, and it is for that
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        is_there = bool(signal.sigtimedwait([signal.SIGINT], 0)) or self._is_kept
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._is_kept = is_there and is_for_task


@contextmanager
def threads_without_sigint() -> Iterator[None]:
    """Start threads inside that leave SIGINT to the main thread.

    In a process that goes on after SIGSTOP any thread may get it, and note it only when the main
    thread has read that it was sent before.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- children ---------------------------------------------------------------------------------


def leave_world_in_children(leave: Callable[[], None] | None) -> None:
    """Call `leave` in each child that user code forks, before it does anything else.

    It is outside the world: in it `init_process_group` is torch's own, for groups of such children,
    as in torch's tutorial "Writing distributed applications" and Lightning's `ddp_notebook`.
    """

    def leave_world() -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # A data set asks there for its rank, as it can under torchrun, and for nothing else.
        calls = (frame.f_globals for frame, _ in traceback.walk_stack(inspect.currentframe()))
        if leave is not None and all(each.get("__name__") != DATA_LOADER for each in calls):
            leave()

    os.register_at_fork(after_in_child=leave_world)


# --- when this worker's last cell ran, and when its main thread waited for other ranks meanwhile --

MOST_WAITS = 4_000  # kept one by one, the newest; all are counted


class CellTimes:
    """The last cell's, script's or call's; in nanoseconds on the clock of this machine."""

    # Not a generator's: contextlib sets attributes of what is raised, which a class can refuse.

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
        """Note a wait that ends now; of another thread than the cell's not."""
        if threading.get_ident() == self._ident:
            now = time.time_ns()
            self.waits.append((since_ns, now))
            self.count += 1
            self.waited_ns += now - since_ns


CELL_TIMES = CellTimes()  # the worker's: there is one main thread


# --- sys.stdout and sys.stderr: straight to the pipes that its agent reads --------------------

_libc = ctypes.CDLL(None)
_c_stdout = ctypes.c_void_p.in_dll(_libc, "stdout")
_count_buffered = ctypes.PyDLL(None)["__fpending"]  # it only reads: the GIL is kept
_count_buffered.restype = ctypes.c_size_t
_write_lock = threading.RLock()


def flush_c_stdout() -> None:
    """Write out what C code has printed to stdout before."""
    if _count_buffered(_c_stdout):
        _libc.fflush(_c_stdout)


def _before_fork() -> None:
    flush_c_stdout()  # else each child would print it once more
    _write_lock.acquire()


# A child that was forked while another thread wrote would find the lock held for ever; so the
# thread that forks, which is the child's only one, holds it meanwhile.
os.register_at_fork(
    before=_before_fork,
    after_in_parent=_write_lock.release,
    after_in_child=_write_lock.release,
)

FIRST_PRIVATE = 200  # above the descriptors that people count through to close or to write to them

_kept = {1: 1, 2: 2}  # by descriptor: ours of the same pipe, whatever a cell does to that one
_own: dict[StreamName, io.TextIOWrapper] = {}


def _is_elsewhere(fd: int) -> bool:
    """Return True if a cell has redirected it."""
    try:
        return not os.path.sameopenfile(fd, _kept[fd])
    except OSError:  # closed
        return False


def write_all(data: bytes, fd: int = 1) -> None:
    """Write all of it, by default to the real stdout; blocks while the agent is behind."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # user code has made it so, as asyncio and Node.js do
            is_ready(fd, event=select.POLLOUT)


def write_mark(token: str, value: Mark) -> None:
    """Mark this place of the output for the agent."""
    with _write_lock:
        write_all(mark(token, value), _kept[1])


def flush_streams() -> None:
    """Write out what Python's streams, which may be the user's, and C's still buffer."""
    for name, own in _own.items():
        if getattr(sys, name) is None:  # no cell could run any more
            setattr(sys, name, own)
        with suppress(Exception):
            getattr(sys, name).flush()
    flush_c_streams()
    # What a cell has closed: else the next file that it opens would be in its place.
    for fd, kept in _kept.items():
        try:
            os.fstat(fd)
        except OSError:
            with suppress(OSError):  # ours has been closed too
                os.dup2(kept, fd)


def flush_c_streams() -> None:
    """Write out what C code has printed: libc buffers 4 KiB if stdout is a pipe."""
    _libc.fflush(None)


class _Bytes(io.RawIOBase):
    """The bytes of one of the two streams, unbuffered, in one order with everything else.

    Both go down the same pipe, stderr between two marks: two pipes have no common order.
    Where a cell has redirected the stream's descriptor, they go there.
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
        """Do nothing: it is the worker's own, and what follows is to be seen."""


def rank_stream(name: StreamName, token: str) -> io.TextIOWrapper:
    """Make the text of one of the two streams, written through; as its bytes it stays open."""
    stream: Any = _Bytes(name, token)
    return io.TextIOWrapper(stream, "utf-8", "backslashreplace", newline="\n", write_through=True)


def install(token: str) -> None:
    """Replace the process's streams; before a user's code runs."""
    for fd in _kept:
        try:
            _kept[fd] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_PRIVATE)
        except OSError:  # the limit is below
            _kept[fd] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
    sys.stdout = _own["stdout"] = rank_stream("stdout", token)
    sys.stderr = _own["stderr"] = rank_stream("stderr", token)
