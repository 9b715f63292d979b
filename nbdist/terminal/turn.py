"""One of several processes on a node works, the others wait and end as it did.

They meet in a file of this machine, which the one that works holds locked while it does.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nbdist import folders
from nbdist.errors import UsageError

LEADER_TIMEOUT = 60.0
"""Seconds for the process that works to begin: each imports Python's modules over a network."""

STEP = 0.1

RUNNING = "running"


class Turn:
    """The file in which processes of the same `key` meet; `ended` is said by the one that works."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def begin(self) -> None:
        """Be the one that works."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        self._write(RUNNING)

    def ended(self, code: int) -> None:
        """Have the others end with this exit code."""
        self._write(str(code))
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def outcome(self, since: float) -> int:
        """Wait until the one that works has ended; return its exit code, 1 where it was killed.

        What has been written before that time, in seconds since 1970, was an earlier one's.
        Raises UsageError where none begins.
        """
        deadline = time.monotonic() + LEADER_TIMEOUT
        while not self._has_begun(since):
            if time.monotonic() > deadline:
                raise UsageError(
                    f"no process with local rank 0 connected within {LEADER_TIMEOUT:.0f} s: "
                    "run the command at least once on each node, alone or with LOCAL_RANK 0."
                )
            time.sleep(STEP)
        fcntl.flock(self._fd, fcntl.LOCK_SH)
        code = self._read()
        return int(code) if code.isdigit() else 1

    def _has_begun(self, since: float) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return bool(self._read()) and os.fstat(self._fd).st_mtime >= since

    def _write(self, text: str) -> None:
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text.encode(), 0)

    def _read(self) -> str:
        return os.pread(self._fd, 16, 0).decode()


@contextmanager
def turn_of(key: str) -> Iterator[Turn]:
    """Open the file of this key; what no process uses any more is removed at the end.

    That is the file itself where this was the last, and those of processes that were killed.
    """
    folder = Path(tempfile.gettempdir()) / f"nbdist-join-{os.geteuid()}"
    try:
        folders.make_private(folder)
        folders.check_private(folder)
        fd = _open_used(folder / key)
    except OSError as error:
        raise UsageError(f"{folder} cannot be used: {error.strerror or error}.") from None
    try:
        yield Turn(fd)
    finally:
        os.close(fd)
        for file in folder.glob("*"):
            _remove_unused(file)
        with suppress(OSError):  # others meet there
            folder.rmdir()


def _open_used(file: Path) -> int:
    """Open it, and hold it: by a lock of the other kind than the one of the process that works."""
    while True:
        fd = folders.open_private(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        fcntl.lockf(fd, fcntl.LOCK_SH)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)  # another process has removed it in between


def _remove_unused(file: Path) -> None:
    with suppress(OSError), file.open("r+b") as opened:
        fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.unlink()
