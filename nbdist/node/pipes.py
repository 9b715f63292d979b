"""The read end of a pipe into which a worker writes."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable
from contextlib import suppress

READ_SIZE = 1 << 18
PIPE_SIZE = 1 << 18
"""Bytes a rank can write ahead of its agent; all pipes of a user share a quota."""


class OutputPipe:
    """Hands what arrives to `read`, on the running loop, until closed or at its end."""

    def __init__(self, read: Callable[[bytes], None]) -> None:
        self._read = read
        self._end, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._end, False)
        with suppress(PermissionError):  # over the quota: the usual 64 KiB serve too
            fcntl.fcntl(self._end, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._end, self.read)
        self._open = True

    def close_write_end(self) -> None:
        """Once the worker has its copy, so that its end is the pipe's end."""
        os.close(self.write_end)

    def drain(self) -> None:
        """Read what is there now, for a worker that has ended."""
        while self.read():
            pass

    def close(self) -> None:
        """Stop listening; what is still in the pipe is lost."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._end)
            os.close(self._end)

    def read(self) -> bool:
        """Read once, without waiting for the loop to find that there is something."""
        if not self._open:
            return False
        try:
            data = os.read(self._end, READ_SIZE)
        except BlockingIOError:
            return False
        if data:
            self._read(data)
        else:
            self.close()
        return bool(data)
