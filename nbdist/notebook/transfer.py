"""How far values have come on their way, shown where it takes longer than a moment."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING

from nbdist.values.shared_memory import Made, Steps
from nbdist.words import size_text
from nbdist.world.names import list_names

if TYPE_CHECKING:
    from nbdist.notebook.display import CellDisplay
    from nbdist.notebook.shipping.shipment import Packing, Shipment

FIRST_SHOWN = 1.0
"""Seconds that a transfer has taken before anything is said of it."""

REDRAW = 0.25
"""Seconds between two lines that take one another's place; where they cannot, the time doubles."""


class Progress:
    """Shows how many bytes of how many have come, and how fast; `what` says of what."""

    def __init__(self, display: CellDisplay, what: str) -> None:
        self._display = display
        self._what = what
        self._started = time.monotonic()
        self._next = self._started + FIRST_SHOWN

    def __repr__(self) -> str:
        return f"<Progress of {self._what}>"

    def at(self, done: int, total: int) -> None:
        """Show it, if it is time."""
        now = time.monotonic()
        if now < self._next:
            return
        taken = now - self._started
        self._next = now + (REDRAW if self._display.can_change else taken)
        self._display.wait_for(progress_text(self._what, done, total, taken))


def progress_text(what: str, done: int, total: int, seconds: float) -> str:
    """Write `shipping data: 1.2 GiB of 4 GiB · 1.1 GiB/s`."""
    return f"{what}: {size_text(done)} of {size_text(total)} · {size_text(done / seconds)}/s"


def on_its_way_text(done: int, total: int, seconds: float) -> str:
    """Write how far a task's big variables are being sent between machines; "" for none."""
    what = "big variables are being sent"
    return progress_text(what, done, total, seconds) if done < total else ""


def packed(
    shipment: Shipment | None, display: CellDisplay, *, alone: bool = False
) -> Packing | None:
    """Pack names that go to the workers, and say what there is to say of them; None for none."""
    for notice in shipment.notices if shipment else ():
        display.note(notice)
    if not (shipment and shipment.names):
        return None
    if shipment.big and display.can_change:
        display.wait_for(" · ".join(f"sending {each}" for each in shipment.big))
    what = f"sending {list_names(shipment.names)}"
    packing = moved(shipment.packing(alone=alone), shipment.bytes, display, what)
    for said in (*(f"sent {each}" for each in shipment.big), packing.note):
        if said:
            display.note(said)
    return packing


def moved(steps: Generator[int, None, Made], total: int, display: CellDisplay, what: str) -> Made:
    """Take all steps of something that yields how many bytes are done, and return what it makes.

    Stop ends it between two of them, and what it has made so far is released.
    """
    progress = Progress(display, what)
    with closing(Steps(steps)) as found:
        for done in found:
            progress.at(done, total)
    return found.made
