"""A line at the end of a terminal that is written over: where the ranks' progress bars are."""

from __future__ import annotations

import shutil
from typing import TextIO

REDRAW_SECONDS = 0.25


class MovingLine:
    """Shows one line at a time, and nothing where the stream is no terminal but a log.

    Whoever writes other lines clears it before.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = ""
        self._draw_at = 0.0

    def __repr__(self) -> str:
        return f"<MovingLine {self._shown!r}>"

    def show(self, text: str, now: float) -> None:
        """Put this in its place, at most four times a second; `now` is monotonic seconds."""
        if not text:
            self.clear()
        elif self._stream.isatty() and (now >= self._draw_at or not self._shown):
            self._draw_at = now + REDRAW_SECONDS
            # In the last column a terminal may go on to the next line.
            self._draw(text[: max(1, shutil.get_terminal_size().columns - 1)])

    def clear(self) -> None:
        """Take it away, so that what is written next begins at the line's start."""
        if self._shown:
            self._draw("")

    def _draw(self, text: str) -> None:
        # Spaces, since not every terminal erases a line when told to.
        self._stream.write(f"\r{text.ljust(len(self._shown))}" + ("" if text else "\r"))
        self._stream.flush()
        self._shown = text
