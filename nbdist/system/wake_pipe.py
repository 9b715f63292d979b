"""A pipe by which one thread wakes another thread, or an event loop, of the same process."""

from __future__ import annotations

import os
from contextlib import suppress

CLOSED = -1


class WakePipe:
    """A pipe whose reading end is readable from a call of `wake` until the next call of `clear`.

    A thread that sleeps in `poll`, or an event loop, watches the descriptor that `fileno` returns.
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def __repr__(self) -> str:
        return f"<WakePipe {'closed' if self._write_end == CLOSED else self._read_end}>"

    def fileno(self) -> int:
        """Return the descriptor of the reading end."""
        return self._read_end

    def wake(self) -> None:
        """Make the reading end readable, from any thread; do nothing if the pipe is closed."""
        if self._write_end != CLOSED:
            with suppress(BlockingIOError):  # the pipe is full, so its reading end is readable
                os.write(self._write_end, b"x")

    def clear(self) -> None:
        """Read what `wake` has written: only a new `wake` makes the reading end readable again."""
        with suppress(BlockingIOError):
            os.read(self._read_end, 4096)

    def close(self) -> None:
        """Close both ends; a second call does nothing."""
        descriptors = self._read_end, self._write_end
        # Once a descriptor is closed, a file that is opened later can get its number.  A later
        # `wake` must not write to that file.
        self._read_end = self._write_end = CLOSED
        for descriptor in descriptors:
            if descriptor != CLOSED:
                os.close(descriptor)
