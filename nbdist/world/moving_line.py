"""A line in a terminal that shows progress and is drawn again and again.

Runs in the notebook's process.  The start of workers, `World.run`, `World.map` and the panels of a
terminal use `MovingLine`.
"""

from __future__ import annotations

import shutil
from typing import TextIO

REDRAW_SECONDS = 0.25


class MovingLine:
    """A line that is drawn again and again if `stream` is a terminal; if not, nothing is drawn.

    Call `clear` before you write other lines to the stream.  `now` is in monotonic seconds.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        # An object that a user puts in the place of stdout may lack `isatty`.
        self._is_terminal = bool(getattr(stream, "isatty", bool)())
        self._shown = ""
        self._draw_at = 0.0

    def is_due(self, now: float) -> bool:
        """Return True if `show` would draw a text now.

        After a drawing the result is False for `REDRAW_SECONDS`, or until `clear` erases the text.
        Without a terminal the result is always False.
        """
        return self._is_terminal and now >= self._draw_at

    def show(self, text: str, now: float) -> None:
        """If `is_due`, draw a text in place of the last text, cut to the terminal's width."""
        if not self.is_due(now):
            return
        self._draw_at = now + REDRAW_SECONDS
        # A character in the last column can move some terminals' cursor to the next line.
        text = text[: max(1, shutil.get_terminal_size().columns - 1)]
        if text or self._shown:
            self._draw(text)

    def clear(self) -> None:
        """Erase the line, so that the next output begins at the start of the line."""
        if self._shown:
            self._draw("")
            self._draw_at = 0.0

    def _draw(self, text: str) -> None:
        # Overwrite with spaces, since not every terminal supports an escape sequence to erase.
        self._stream.write(f"\r{text.ljust(len(self._shown))}" + ("" if text else "\r"))
        self._stream.flush()
        self._shown = text
