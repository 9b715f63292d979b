"""The worker's sys.stdout and sys.stderr: straight to the pipes that its agent reads."""

from __future__ import annotations

import ctypes
import io
import os
import threading
from typing import TYPE_CHECKING

from nbdist.wire.marks import Mark, mark

if TYPE_CHECKING:
    from nbdist.wire.outputs import StreamName

_libc = ctypes.CDLL(None)
_write_lock = threading.RLock()
# A child that was forked while another thread wrote would find the lock held for ever.
os.register_at_fork(
    before=_write_lock.acquire,
    after_in_parent=_write_lock.release,
    after_in_child=_write_lock._at_fork_reinit,  # type: ignore[attr-defined]
)


def write_all(data: bytes) -> None:
    """Write to the real stdout, all of it; blocks while the agent is behind."""
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


def write_mark(token: str, value: Mark) -> None:
    """Say something to the agent at this very place of the output."""
    with _write_lock:
        write_all(mark(token, value))


def flush_c_streams() -> None:
    """Push out what C code printed: libc buffers 4 KiB when stdout is a pipe."""
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
        if data:
            with _write_lock:
                write_all(self._before + data + self._after)
