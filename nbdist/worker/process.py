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
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

from nbdist.system.processes import signal_on_parents_end
from nbdist.wire.work import Mark, mark

if TYPE_CHECKING:
    from nbdist.output.events import StreamName

PLENTY = 65536
"""More than any data loader needs, and few enough for programs that go through all of them."""

RESERVE = 48
"""For reading /proc, and for gloo's sockets while a group is formed."""

SPARE = 16
"""Descriptors that are held for the same where user code has lowered the hard limit."""

DATA_LOADER = "torch.utils.data.dataloader"


class BadEnvironment(Exception):
    """A variable of the user's keeps the worker from starting.

    The message, one line, says which and what to do.
    """


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent, the agent, ends.

    A forked worker does so only when its first parent, the fork server, has ended and it has
    become the agent's child: until then the fork server ends it where the agent's guard cannot.
    """
    if not signal_on_parents_end(signal.SIGKILL, parent_pid):
        os._exit(1)


# --- descriptors ------------------------------------------------------------------------------


def set_limit() -> None:
    """Have plenty where the hard limit allows it, but keep some for what the agent asks.

    A rank whose code has used up all of them can still be stopped and healed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = PLENTY + RESERVE
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(PLENTY, soft, hard - RESERVE), hard))
    _hold_spare()


@contextmanager
def reserve() -> Iterator[None]:
    """Have all that the hard limit allows, or else the spare ones; called on the control thread."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    more = soft + RESERVE if hard == resource.RLIM_INFINITY else min(hard, soft + RESERVE)
    is_allowed = more > soft
    if is_allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
    while _spare and not is_allowed:
        os.close(_spare.pop())
    try:
        yield
    finally:
        if is_allowed:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        else:
            _hold_spare()


_spare: list[int] = []


def _hold_spare() -> None:
    with suppress(OSError):
        while len(_spare) < SPARE:
            _spare.append(os.open(os.devnull, os.O_RDONLY))


# --- SIGINT -----------------------------------------------------------------------------------


class Interrupts:
    """Has SIGINT reach the task that runs, or one that is on its way, and nothing else.

    Stop can come so soon that the task has reached the worker's socket and has not been read.
    Were it ignored then, the task would run on, and the worker be killed for not having stopped.
    All of it runs on the main thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, has_more: Callable[[], bool]) -> None:
        """`has_more` says whether a task has come that has not begun, read or not."""
        self._loop = loop
        self._has_more = has_more
        self._is_kept = False
        self.end()

    def __repr__(self) -> str:
        return f"<Interrupts {'one kept' if self._is_kept else 'none'}>"

    def begin(self) -> None:
        """Take them for the task that begins; KeyboardInterrupt where one came before it."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
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

    def take_sent(self, *, is_for_task: bool) -> None:
        """Take one that was sent before this was: it is for the task read before this, or for none.

        In a process that had no processor for a while it may not have been taken by any thread
        yet, and one that does so later would interrupt the next task.
        """
        if signal.getsignal(signal.SIGINT) != self._keep:
            return  # a task runs, and it is for that
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        is_there = bool(signal.sigtimedwait([signal.SIGINT], 0)) or self._is_kept
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._is_kept = is_there and is_for_task

    def _forget(self) -> None:
        self._is_kept = self._is_kept and self._has_more()


# --- children ---------------------------------------------------------------------------------


def leave_world_in_children(leave: Callable[[], None] | None) -> None:
    """Have each child that user code forks call `leave` before it does anything else.

    It is a process of its own, outside the world.  In it `init_process_group` is torch's own,
    for groups of such children: of torch's tutorial "Writing distributed applications", of
    Lightning's `ddp_notebook`.
    """
    os.register_at_fork(after_in_child=partial(_leave, leave))


def _leave(leave: Callable[[], None] | None) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A data set asks there for its rank, as it can under torchrun, and for nothing else.
    if leave is not None and not _forks_for_data(inspect.currentframe()):
        leave()


def _forks_for_data(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__") == DATA_LOADER:
            return True
        frame = frame.f_back
    return False


# --- when this worker's last cell ran, and when its main thread waited for other ranks meanwhile --


MOST_WAITS = 4_000
"""Kept one by one, the newest; all are counted."""


class CellTimes:
    """The last cell's, script's or call's; nanoseconds on the clock that all ranks here have."""

    def __init__(self) -> None:
        self.began_ns = self.ended_ns = 0
        self.waits: deque[tuple[int, int]] = deque(maxlen=MOST_WAITS)
        self.count = self.waited_ns = 0
        self._ident = 0

    def __enter__(self) -> None:
        """Have what runs inside be the last cell, on this thread.

        Not a generator's: contextlib sets attributes of what is raised, which a user's class
        can refuse.
        """
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


CELL_TIMES = CellTimes()
"""The worker's: there is one main thread."""


# --- sys.stdout and sys.stderr: straight to the pipes that its agent reads --------------------


_libc = ctypes.CDLL(None)
_write_lock = threading.RLock()
# A child that was forked while another thread wrote would find the lock held for ever; so the
# thread that forks, which is the child's only one, holds it meanwhile.
os.register_at_fork(
    before=_write_lock.acquire,
    after_in_parent=_write_lock.release,
    after_in_child=_write_lock.release,
)

FIRST_PRIVATE = 200
"""Above the descriptors that people count through to close or to write to them."""


class _Pipes:
    """The pipes that the agent reads, whatever becomes of descriptors 1 and 2."""

    def __init__(self) -> None:
        self._kept: dict[int, int] = {}
        self._nodes: dict[int, tuple[int, int]] = {}

    def keep(self) -> None:
        """Keep a way of our own to each; once, before a user's code runs."""
        for fd in (1, 2):
            self._kept[fd], self._nodes[fd] = _copy(fd), _node(fd)

    @property
    def stdout(self) -> int:
        """For marks, and for text that is in order with them."""
        return self._kept.get(1, 1)

    def is_elsewhere(self, fd: int) -> bool:
        """Say whether a cell has redirected it."""
        try:
            return self._nodes.get(fd, node := _node(fd)) != node
        except OSError:  # closed
            return False

    def open_again(self) -> None:
        """Give back what a cell has closed: the next file that is opened would be in its place."""
        for fd, kept in self._kept.items():
            try:
                os.fstat(fd)
            except OSError:
                with suppress(OSError):  # ours has been closed too
                    os.dup2(kept, fd)


_pipes = _Pipes()
_own: dict[StreamName, RankStream] = {}


def _node(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _copy(fd: int) -> int:
    """Make a descriptor as high as there is room for."""
    for first in (FIRST_PRIVATE, 0):
        with suppress(OSError):
            return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, first)
    return fd


def write_all(data: bytes, fd: int = 1) -> None:
    """Write to the real stdout, all of it; blocks while the agent is behind.

    Also where user code has made the pipe non-blocking, as asyncio and Node.js do.
    """
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            waiting = select.poll()
            waiting.register(fd, select.POLLOUT)
            waiting.poll()


def write_mark(token: str, value: Mark) -> None:
    """Say something to the agent at this very place of the output."""
    with _write_lock:
        write_all(mark(token, value), _pipes.stdout)


def flush_streams() -> None:
    """Push out what is left of a cell's text.

    libc buffers 4 KiB when stdout is a pipe; what stands for `sys.stdout` may be the user's.
    """
    for name, own in _own.items():
        if getattr(sys, name) is None:  # no cell could run any more
            setattr(sys, name, own)
        with suppress(Exception):
            getattr(sys, name).flush()
    flush_c_streams()
    _pipes.open_again()


def flush_c_streams() -> None:
    """Push out what C code printed."""
    _libc.fflush(None)


class _Bytes(io.RawIOBase):
    """`sys.stdout.buffer`: bytes to the same place as the text."""

    def __init__(self, stream: RankStream) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        self._stream.write_bytes(bytes(data))
        return len(data)


class RankStream(io.TextIOBase):
    """Text for one of the two streams, unbuffered, in one order with everything else.

    Both go down the same pipe, stderr between two marks: two pipes have no common
    order.  (What C code writes to file descriptor 2 arrives by a pipe of its own.)
    Where a cell has redirected the stream's descriptor, its text goes there too.
    """

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, name: StreamName, token: str) -> None:
        self.name = f"<{name}>"
        self.buffer = _Bytes(self)
        self._fd = 1 if name == "stdout" else 2
        self._before = mark(token, "stderr") if name == "stderr" else b""
        self._after = mark(token, "stdout") if name == "stderr" else b""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self.write_bytes(text.encode("utf-8", "backslashreplace"))
        return len(text)

    def write_bytes(self, data: bytes) -> None:
        if not data:
            return
        with _write_lock:
            if _pipes.is_elsewhere(self._fd):
                write_all(data, self._fd)
            else:
                write_all(self._before + data + self._after, _pipes.stdout)

    def close(self) -> None:
        """Do nothing: it is the worker's own, and what follows is to be seen."""


def install(token: str) -> None:
    """Give the process its streams; before a user's code runs."""
    _pipes.keep()
    _own.update({"stdout": RankStream("stdout", token), "stderr": RankStream("stderr", token)})
    sys.stdout, sys.stderr = _own["stdout"], _own["stderr"]
