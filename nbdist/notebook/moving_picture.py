"""A table that is drawn again in its own place: in a page, and in a terminal."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.notebook.display import CellDisplay
    from nbdist.notebook.tables import Shown


class MovingPicture:
    """Shows what is newest where the one before was; in a log one below the other."""

    def __init__(self, display: CellDisplay) -> None:
        self._display = display
        self._lines = 0

    def __repr__(self) -> str:
        return f"<MovingPicture of {self._lines} lines>"

    def show(self, shown: Shown) -> None:
        """Put this in its place."""
        if self._display.can_change or not sys.stdout.isatty():
            shown.on(self._display)
            return
        width, height = shutil.get_terminal_size()
        # What has left the screen above cannot be drawn over.
        lines = [line[: width - 1] for line in shown.text.splitlines()][: height - 1]
        up = f"\x1b[{self._lines}F" if self._lines else ""
        text = "".join(f"{line}\x1b[K\n" for line in lines)
        sys.stdout.write(f"{up}{text}\x1b[J")
        sys.stdout.flush()
        self._lines = len(lines)
