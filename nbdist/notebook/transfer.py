"""Names of the notebook on their way, and how they are packed."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

from nbdist.notebook.display import REDRAW, CellDisplay
from nbdist.values.payload import Kept, Payload, packing_changed
from nbdist.values.shared_memory import Buffer, Made, Segment, Steps
from nbdist.words import size_text
from nbdist.world.names import Shipped, list_names

BIG = 64 * 1024 * 1024  # from this many bytes on a notice is shown before something is sent


@dataclass(frozen=True, slots=True, repr=False)
class Shipment:
    """Names with their values, ready to travel.

    `notices` are lines for the user, to be shown before it is sent; `big` are others, on what is
    large of it or sent again: they follow "sending", or "sent".  `records` say what is sent.
    `frames` show the values' own memory: pack them before these change.  `known` is where some
    of them may lie, `many` are names that have several of them.  `replaces` says on which ranks
    it would take the place of what they were sent before, which they may have changed, `stays`
    which names a rank is not to bind, as it has them.
    """

    notices: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    frames: Sequence[Buffer] = ()
    bytes: int = 0
    records: Mapping[str, Shipped] = field(default_factory=dict)
    known: tuple[Kept, ...] = ()
    many: frozenset[str] = frozenset()
    replaces: Mapping[str, frozenset[int]] = field(default_factory=dict)
    stays: Mapping[int, frozenset[str]] = field(default_factory=dict)
    big: tuple[str, ...] = ()

    def packing(self, *, alone: bool = False) -> Generator[int, None, Packing]:
        """Make its payload; yields how many bytes have been copied so far.

        What the ranks were sent before, and has not changed, is not copied again, unless it is
        to stand `alone`: for as long as anybody likes.
        """
        shipped = yield from packing_changed(self.frames, () if alone else self.known)
        payload, segment = shipped.packed
        kept = shipped.kept if self.many and not alone else None
        records = {
            name: replace(record, kept=kept) if name in self.many else record
            for name, record in self.records.items()
        }
        note, left = "", shipped.size - shipped.copied
        if left >= BIG:
            note = f"{size_text(left)} of that have not changed and were not sent again"
        # It is closed with the last record that has it.
        return Packing(payload, segment if kept is None else None, records, note)


@dataclass(frozen=True, slots=True)
class Packing:
    """A shipment that is ready to travel.

    Keep `segment` open until the ranks have the payload; `records` is for `Session.submit`.
    """

    payload: Payload
    segment: Segment | None
    records: Mapping[str, Shipped]
    note: str


# --- how far values have come on their way, shown where it takes longer than a moment ---------


FIRST_SHOWN = 1.0  # seconds that a transfer has taken before anything is said of it


class Progress:
    """Shows how many bytes of how many have come, and how fast; `what` says of what."""

    def __init__(self, display: CellDisplay, what: str) -> None:
        self._display = display
        self._what = what
        self._started = time.monotonic()
        self._next = self._started + FIRST_SHOWN

    def at(self, done: int, total: int) -> None:
        """Show it, if it is time."""
        now = time.monotonic()
        if now < self._next:
            return
        taken = now - self._started
        # Where lines cannot take one another's place the time doubles.
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
