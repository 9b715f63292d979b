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
        # What people put in the place of stdout need not know what it is.
        self._is_terminal = bool(getattr(stream, "isatty", bool)())
        self._shown = ""
        self._draw_at = 0.0

    def __repr__(self) -> str:
        return f"<MovingLine {self._shown!r}>"

    def is_due(self, now: float) -> bool:
        """Say whether it may be drawn: four times a second, or again after other lines."""
        return self._is_terminal and now >= self._draw_at

    def show(self, text: str, now: float) -> None:
        """Put this in its place, where it `is_due`; `now` is monotonic seconds."""
        if not self.is_due(now):
            return
        self._draw_at = now + REDRAW_SECONDS
        # In the last column a terminal may go on to the next line.
        text = text[: max(1, shutil.get_terminal_size().columns - 1)]
        if text or self._shown:
            self._draw(text)

    def clear(self) -> None:
        """Take it away, so that what is written next begins at the line's start."""
        if self._shown:
            self._draw("")
            self._draw_at = 0.0

    def _draw(self, text: str) -> None:
        # Spaces, since not every terminal erases a line when told to.
        self._stream.write(f"\r{text.ljust(len(self._shown))}" + ("" if text else "\r"))
        self._stream.flush()
        self._shown = text
