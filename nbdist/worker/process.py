"""Functions for the process of a worker: its parent, descriptors, SIGINT, children and streams.

`CELL_TIMES` measures the last cell. The other files of `nbdist.worker` use these functions, most of
them once, when a worker starts.
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
from nbdist.system.processes import poll_until, signal_on_parent_exit
from nbdist.wire.work import Mark, mark

PLENTY = 65536
"""The highest limit of open descriptors that `limit_descriptors` leaves to a worker.

It is enough for any data loader.  With a higher limit, programs that loop over all possible
descriptors would take long.
"""

SOCKET_READ_SIZE = 1 << 18  # bytes that are read from a socket at once
DESCRIPTOR_RESERVE = 48  # descriptors kept for reading /proc, and for gloo while a group is formed
DATA_LOADER = "torch.utils.data.dataloader"


class BadEnvironment(Exception):
    """The worker cannot start because of its environment, such as a variable that the user has set.

    The message is for the user.
    """


def die_with_parent(parent_pid: int) -> None:
    """Make Linux kill this process when its parent exits, so that no worker outlives its agent.

    `parent_pid` is the agent's process id. A forked worker first waits until the process between
    the agent and itself has exited, which makes the agent its parent. If the agent does not become
    the parent, this process exits.
    """
    poll_until(lambda: os.getppid() == parent_pid)
    if not signal_on_parent_exit(signal.SIGKILL, parent_pid):
        os._exit(1)


# --- descriptors ------------------------------------------------------------------------------


def limit_descriptors() -> None:
    """Lower the limit of descriptors to at most `PLENTY`.

    The limit also stays `DESCRIPTOR_RESERVE` below the hard limit, for `allow_more_descriptors`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = PLENTY + DESCRIPTOR_RESERVE
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(PLENTY, soft, hard - DESCRIPTOR_RESERVE), hard))


def is_ready(fd: socket.socket | int, ms: float | None = None, event: int = select.POLLIN) -> bool:
    """Wait for an event on a descriptor, by default for data to read; return True if it came.

    Wait at most `ms` milliseconds if given, and otherwise without a limit.
    """
    # Not `select`, which fails with descriptors from 1,024 on.
    poller = select.poll()
    poller.register(fd, event)
    return bool(poller.poll(ms))


@contextmanager
def allow_more_descriptors() -> Iterator[None]:
    """Within this context, the limit of open descriptors is up to `DESCRIPTOR_RESERVE` higher.

    The control thread needs this because user code may have opened all allowed descriptors.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    more = (
        soft + DESCRIPTOR_RESERVE
        if hard == resource.RLIM_INFINITY
        else min(hard, soft + DESCRIPTOR_RESERVE)
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --- SIGINT -----------------------------------------------------------------------------------


class Interrupts:
    """Delivers SIGINT to the running task, or keeps it for a task that has arrived but not begun.

    If there is neither, SIGINT has no effect. A SIGINT is kept because Stop can come while the
    worker has not read the task yet: if the SIGINT were dropped, the task would run in spite of
    Stop. `has_more` returns True if a task has arrived that has not begun, and `handle` is the
    signal handler while a task runs. Of the methods, only `settle_sigint` may be called on another
    thread than the main thread.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        has_more: Callable[[], bool],
        handle: Callable[[int, FrameType | None], object] = signal.default_int_handler,
    ) -> None:
        self._loop, self._has_more, self._handle = loop, has_more, handle
        self._has_sigint = False
        self.end()

    def __repr__(self) -> str:
        return f"<Interrupts {'one kept' if self._has_sigint else 'none'}>"

    def begin(self) -> None:
        """Handle SIGINT by `handle` from now on; called when a task begins.

        Raises KeyboardInterrupt if a SIGINT was kept for this task.
        """
        signal.signal(signal.SIGINT, self._handle)
        if self._has_sigint:
            self._has_sigint = False
            raise KeyboardInterrupt

    def end(self) -> None:
        """Stop delivering SIGINT to the task that has ended; called after each task.

        From now on a SIGINT is kept if a further task has arrived, and is dropped if none has.
        """
        signal.signal(signal.SIGINT, self._keep_sigint)

    def _keep_sigint(self, *_: object) -> None:
        self._has_sigint = True
        # Forget the SIGINT two turns of the loop later if no task has arrived. By then a task that
        # was sent before the SIGINT has been read or is seen by `_has_more`. If a task has arrived,
        # the message `SigintSent`, which the agent sends next, tells whether the SIGINT is for it.
        self._loop.call_soon_threadsafe(self._loop.call_soon, self._forget_sigint)

    def _forget_sigint(self) -> None:
        self._has_sigint = self._has_sigint and self._has_more()

    def settle_sigint(self, *, is_for_task: bool) -> None:
        """Keep or drop a SIGINT that came while no task ran; called for the message `SigintSent`.

        The agent sends `SigintSent` right after a SIGINT. If `is_for_task`, the worker has already
        read a task that is still to run, and the SIGINT is kept for this task. If not, the SIGINT
        is dropped, even if Linux has not delivered it yet: otherwise it could interrupt a later
        task.
        """
        if signal.getsignal(signal.SIGINT) != self._keep_sigint:
            return  # a task runs, and has got the SIGINT or is about to get it
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        is_pending = bool(signal.sigtimedwait([signal.SIGINT], 0)) or self._has_sigint
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._has_sigint = is_pending and is_for_task


def system_call() -> list[bytes]:
    """Return what Linux tells about the system call in which the main thread waits.

    The first item is the number of the call; its arguments follow. Returns [b"running"] if the
    thread does not wait, and [] if Linux tells nothing.
    """
    # The process id is also the number of the main thread. `native_id` may be wrong: in Python 3.11
    # a forked process inherits the `native_id` of its parent.
    with suppress(OSError), open(f"/proc/self/task/{os.getpid()}/syscall", mode="rb") as file:
        return file.read().split()
    return []


@contextmanager
def threads_without_sigint() -> Iterator[None]:
    """Within this context, threads that are started block SIGINT, so that the main thread gets it.

    After SIGSTOP and SIGCONT, Linux may deliver SIGINT to any thread that does not block it. Then
    the main thread handles the SIGINT too late: only after it has read the message `SigintSent`,
    which the agent sends after the SIGINT.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- children ---------------------------------------------------------------------------------


def leave_world_in_children(leave: Callable[[], None] | None) -> None:
    """Make each child that user code forks call `leave`; children of a data loader do not call it.

    `leave` makes the child forget the world's groups, and gives it torch's own
    `init_process_group`. So children can form groups of their own, as in torch's tutorial "Writing
    distributed applications" and Lightning's `ddp_notebook`. `leave` is None in a world without a
    process group.
    """

    def leave_world() -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # A data loader's worker keeps the groups: its data set may ask for the rank, as it may
        # under torchrun.
        calls = (frame.f_globals for frame, _ in traceback.walk_stack(inspect.currentframe()))
        if leave is not None and all(each.get("__name__") != DATA_LOADER for each in calls):
            leave()

    os.register_at_fork(after_in_child=leave_world)


# --- times of the last cell, and of its waits for other ranks -------------------------------------

MAX_WAITS = 4_000  # newest waits whose times are kept; all waits are counted


class CellTimes:
    """Times of the last cell, script or function call, and of its waits for other ranks.

    Moments are in nanoseconds since 1970. `waits` has the begin and end of the newest waits.
    `count` and `waited_ns` are the number and the total time of all waits. The kernel runs each
    cell inside of `with CELL_TIMES:`.
    """

    # Do not use `contextlib`, which sets attributes of the exceptions that pass through a context:
    # the class of a user's exception can refuse that.

    def __init__(self) -> None:
        self.began_ns = self.ended_ns = 0
        self.waits: deque[tuple[int, int]] = deque(maxlen=MAX_WAITS)
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

    def record_wait(self, since_ns: int) -> None:
        """Record a wait from `since_ns` until now, if this thread runs the cell."""
        if threading.get_ident() == self._ident:
            ended_ns = time.time_ns()
            self.waits.append((since_ns, ended_ns))
            self.count += 1
            self.waited_ns += ended_ns - since_ns


CELL_TIMES = CellTimes()  # a single object, as only the main thread of a process runs cells


# --- sys.stdout and sys.stderr, which write to the pipe that the agent reads ----------------------

_libc = ctypes.CDLL(None)
_c_stdout = ctypes.c_void_p.in_dll(_libc, "stdout")
_count_buffered = ctypes.PyDLL(None)["__fpending"]  # PyDLL is quicker, as it keeps the GIL
_count_buffered.restype = ctypes.c_size_t
_write_lock = threading.RLock()


def flush_c_stdout() -> None:
    """Write out the text that C code has printed to stdout and libc has buffered."""
    if _count_buffered(_c_stdout):
        _libc.fflush(_c_stdout)


def _before_fork() -> None:
    flush_c_stdout()  # else each child would print the same text again
    _write_lock.acquire()


# A child has only the thread that forked it. If another thread held the lock at the fork, nobody
# would release the lock in the child. So the thread that forks holds the lock during the fork. Both
# the parent and the child release the lock afterwards.
os.register_at_fork(
    before=_before_fork,
    after_in_parent=_write_lock.release,
    after_in_child=_write_lock.release,
)

# The lowest number for the duplicates of descriptors 1 and 2, if the limit allows it: programs may
# close or write to all low descriptors.
FIRST_PRIVATE = 200

# nbdist's own duplicates of the descriptors 1 and 2, which cells may close.
_duplicates = {1: 1, 2: 2}
_own_streams: dict[StreamName, io.TextIOWrapper] = {}


def _is_redirected(fd: int) -> bool:
    """Return True if a cell has redirected the descriptor, and not closed it."""
    try:
        return not os.path.sameopenfile(fd, _duplicates[fd])
    except OSError:  # a cell has closed the descriptor
        return False


def write_all(data: bytes, fd: int = 1) -> None:
    """Write all data to a descriptor, by default descriptor 1; wait while the reader is slow."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # user code has made `fd` non-blocking, as asyncio and Node.js do
            is_ready(fd, event=select.POLLOUT)


def write_mark(token: str, value: Mark) -> None:
    """Write a mark to stdout, by which the agent finds this place in the worker's output."""
    with _write_lock:
        write_all(mark(token, value), _duplicates[1])


def flush_streams() -> None:
    """Flush Python's and C's stdout and stderr, and restore those that a cell has removed.

    A cell can bind `sys.stdout` or `sys.stderr` to None, or close descriptor 1 or 2.
    """
    for name, stream in _own_streams.items():
        if getattr(sys, name) is None:  # a cell has set it to None: no later cell could run
            setattr(sys, name, stream)
        with suppress(Exception):
            getattr(sys, name).flush()
    flush_c_streams()
    # Reopen descriptor 1 or 2 if a cell has closed it. Otherwise the next file that is opened would
    # get the descriptor's number, and then the output of cells.
    for fd, duplicate in _duplicates.items():
        try:
            os.fstat(fd)
        except OSError:
            with suppress(OSError):  # the duplicate was closed too
                os.dup2(duplicate, fd)


def flush_c_streams() -> None:
    """Write out the text that C code has printed to any stream and libc has buffered."""
    _libc.fflush(None)


class _Bytes(io.RawIOBase):
    """Writes the bytes of `sys.stdout` or `sys.stderr` at once, without a buffer.

    Both streams write to one pipe, because nobody could tell the order of bytes in two pipes. A
    mark before and a mark after the bytes of stderr tell the agent that they are stderr's. If a
    cell has redirected the stream's descriptor, 1 or 2, the bytes go to the cell's file instead.
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
        output = bytes(data)
        if self._fd == 1:
            flush_c_stdout()
        with _write_lock:
            if _is_redirected(self._fd):
                write_all(output, self._fd)
            elif output:
                write_all(self._before + output + self._after, _duplicates[1])
        return len(data)

    def close(self) -> None:
        """Ignore the call: user code must not close the stream, which later cells write to."""


def rank_stream(name: StreamName, token: str) -> io.TextIOWrapper:
    """Return a text stream for `sys.stdout` or `sys.stderr`, unbuffered, that cannot be closed."""
    stream: Any = _Bytes(name, token)
    return io.TextIOWrapper(stream, "utf-8", "backslashreplace", newline="\n", write_through=True)


def duplicate_streams() -> None:
    """Duplicate the file descriptors 1 and 2 for nbdist's own use; called once.

    Call this before the process starts threads: with threads, Linux enlarges the table of file
    descriptors only after a pause, which took 20 s on a machine whose kernel threads got no time.
    """
    for fd in _duplicates:
        try:
            _duplicates[fd] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_PRIVATE)
        except OSError:  # the limit is below FIRST_PRIVATE
            _duplicates[fd] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)


def install_streams(token: str) -> None:
    """Let `sys.stdout` and `sys.stderr` write to the pipe that the agent reads.

    Called once, before user code runs and after `duplicate_streams`. `token` is the text in the
    worker's marks.
    """
    sys.stdout = _own_streams["stdout"] = rank_stream("stdout", token)
    sys.stderr = _own_streams["stderr"] = rank_stream("stderr", token)
