"""The worker's sys.stdout and sys.stderr: straight to the pipes that its agent reads."""

from __future__ import annotations

import ctypes
import fcntl
import io
import os
import select
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from nbdist.wire.work import Mark, mark

if TYPE_CHECKING:
    from nbdist.output.events import StreamName

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
