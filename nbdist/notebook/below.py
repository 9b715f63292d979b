"""What a panel cannot embed, in displays of its own below it: Markdown, LaTeX, plotly ..."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection
from itertools import groupby
from operator import itemgetter

from IPython.display import display, update_display

from nbdist.output.events import Display
from nbdist.output.markup import bold, panel
from nbdist.output.rich import MOST_BELOW, leftovers
from nbdist.output.transcript import Transcript
from nbdist.words import format_ranks, name_ranks

NOTHING = "<span></span>"
"""What a page draws of a figure that the panel shows already."""

EMPTY = Display({"text/html": NOTHING, "text/plain": ""}, {})


class Below:
    """The displays below one panel, under captions that name their ranks."""

    def __init__(self) -> None:
        self._id = f"nbdist-{uuid.uuid4().hex}"
        self._shown: list[Display] = []

    def __repr__(self) -> str:
        return f"<Below {len(self._shown)} displays>"

    def show(self, transcript: Transcript, ranks: Collection[int] | None = None) -> None:
        """Show those of all ranks, or of some, below what the cell has shown so far."""
        self._shown = below_panel(transcript, ranks)
        for number, shown in enumerate(self._shown):
            self._draw(display, number, shown)

    def change(self, transcript: Transcript) -> None:
        """Show what has changed in its place; there is no room for more displays than before."""
        now = below_panel(transcript)
        for number, before in enumerate(self._shown):
            shown = now[number] if number < len(now) else EMPTY
            if shown != before:
                self._shown[number] = shown
                self._draw(update_display, number, shown)

    def _draw(self, draw: Callable[..., object], number: int, shown: Display) -> None:
        data, metadata = dict(shown.data), dict(shown.metadata)
        draw(data, metadata=metadata, display_id=f"{self._id}-{number}", raw=True)


def below_panel(transcript: Transcript, of: Collection[int] | None = None) -> list[Display]:
    """Give what the page has to render itself, each run of it below a caption.

    `MOST_BELOW` at most, unless it is `of` these ranks alone; a line says which have more.
    """
    found = leftovers(transcript, of)
    most = MOST_BELOW if of is None else len(found)
    shown: list[Display] = []
    for ranks, run in groupby(found[:most], key=itemgetter(0)):
        shown += [_caption(name_ranks(ranks)), *(each for _, each in run)]
    if left := found[most:]:
        ranks = sorted({rank for those, _ in left for rank in those})
        again = f"`%dist_output -r {format_ranks(ranks)}` shows them"
        shown.append(_caption(f"… {len(left)} more displays of {name_ranks(ranks)}: {again}"))
    return shown


def _caption(text: str) -> Display:
    return Display({"text/html": panel(bold(text)), "text/plain": text}, {})
