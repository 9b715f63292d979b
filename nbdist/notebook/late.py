"""What ranks say after their cell has ended, and later changes of what it has shown."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from nbdist.notebook.display import REDRAW
from nbdist.output.ansi import strip
from nbdist.output.events import Display, Failure, Output, Text, Update, Visible, plain_of
from nbdist.output.wording import fold_ranks, traceback_text
from nbdist.words import name_ranks

if TYPE_CHECKING:
    from nbdist.notebook.display import CellDisplay
    from nbdist.output.transcript import Transcript

OUTPUTS_KEPT = 1000

CELLS_KEPT = 20
"""Cells whose displays can still change."""

MOST_CHARACTERS = 300
"""Of what one rank has said, where it cannot be shown under its cell."""


class Ended:
    """The cells that have ended, newest last, with the displays that they have."""

    def __init__(self) -> None:
        self._cells: deque[tuple[Transcript, CellDisplay]] = deque(maxlen=CELLS_KEPT)
        self._past: deque[Transcript] = deque(maxlen=CELLS_KEPT)
        self._left: deque[tuple[int, Output]] = deque(maxlen=OUTPUTS_KEPT)
        self._changed: dict[int, tuple[Transcript, CellDisplay]] = {}
        self._show_at = 0.0

    def __repr__(self) -> str:
        return f"<Ended {len(self._cells)} cells>"

    def add(self, transcript: Transcript, display: CellDisplay) -> None:
        """Keep one more that has ended."""
        self._cells.append((transcript, display))
        self._past.append(transcript)

    def past(self, last: Transcript) -> list[Transcript]:
        """Return what cells have shown, also those of workers before; `last` is the newest."""
        return [*(each for each in self._past if each is not last), last]

    def forget(self) -> None:
        """Forget all: the workers are new."""
        self._cells.clear()
        self._changed.clear()
        self._left.clear()

    def receive(self, late: Iterable[tuple[int, Output]]) -> None:
        """Take in what has come since; what belongs under no cell is for the next one."""
        for rank, output in late:
            if not isinstance(output, Visible):
                continue
            if (cell := self._cell_of(rank, output)) is None:
                self._left.append((rank, output))
            else:
                cell[0].receive(rank, output, time.monotonic())
                self._changed[id(cell)] = cell

    def again(self, transcript: Transcript) -> None:
        """Show this one once more, with what changes next."""
        for cell in self._cells:
            if cell[0] is transcript and cell[1].can_change:
                self._changed[id(cell)] = cell

    def show(self, logs: Mapping[int, str], *, at_once: bool = True) -> None:
        """Show the cells that have changed; unless `at_once`, a few times a second at most."""
        if self._changed and (at_once or time.monotonic() >= self._show_at):
            for transcript, display in self._changed.values():
                display.end_again(transcript, logs)
            self._changed.clear()
            self._show_at = time.monotonic() + REDRAW

    def take_texts(self) -> list[str]:
        """Return what could not be shown under a cell: a line for all that said the same."""
        left = [*self._left]
        self._left.clear()
        return late_texts(left)

    def _cell_of(self, rank: int, output: Output) -> tuple[Transcript, CellDisplay] | None:
        """Return the rank's last one; of an update, the one that has the display."""
        for cell in reversed(self._cells):
            if rank not in cell[0].by_rank:
                continue
            if not isinstance(output, Update) or cell[0][rank].has_display(output.display_id):
                return cell if cell[1].can_change else None
        return None


def late_texts(late: Iterable[tuple[int, Output]]) -> list[str]:
    """Write `ranks 0-1 printed after their last cell: bye`, where it cannot be shown there."""
    said: dict[int, str] = {}
    for rank, output in late:
        said[rank] = said.get(rank, "") + _text_of(output)
    lines = {rank: map(str.strip, strip(text).splitlines()) for rank, text in said.items()}
    same = fold_ranks({rank: " / ".join(filter(None, found)) for rank, found in lines.items()})
    return [_worded(ranks, text) for text, ranks in same.items() if text]


def _worded(ranks: list[int], text: str) -> str:
    whose = "its" if len(ranks) == 1 else "their"
    more = len(text) - MOST_CHARACTERS
    shown = text if more <= 0 else f"{text[:MOST_CHARACTERS]} … {more:,} more characters"
    return f"{name_ranks(ranks)} printed after {whose} last cell: {shown}"


def _text_of(output: Output) -> str:
    match output:
        case Text(text=text):
            return text
        case Display(data=data):
            return f"{plain_of(data)}\n"
        case Failure():
            return f"{traceback_text(output)}\n"
    return ""
