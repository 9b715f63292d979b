"""Names of the notebook on their way, and how they are packed."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

from nbdist.values.payload import Kept, Payload, packing_changed
from nbdist.values.shared_memory import Buffer, Segment, Steps
from nbdist.world.names import Shipped

BIG = 64 * 1024 * 1024
"""From this many bytes on a notice is shown before something is sent."""


@dataclass(frozen=True, slots=True)
class Shipment:
    """Names with their values, ready to travel.

    `notices` are lines for the user, to be shown before it is sent; `big` are others, on what is
    large of it or sent again: they follow "sending", or "sent".  `records` say what is sent.
    `frames` show the values' own memory: pack them before these change.  `known` is where some
    of them may lie, `many` are names that have several of them.  `replaces` says on which ranks
    it would take the place of what they were sent before, which they may have changed, `stays`
    which names a rank is not to bind, as it has them.
    """

    names: tuple[str, ...]
    frames: Sequence[Buffer]
    bytes: int
    notices: tuple[str, ...]
    records: Mapping[str, Shipped]
    known: tuple[Kept, ...] = ()
    many: frozenset[str] = frozenset()
    replaces: Mapping[str, frozenset[int]] = field(default_factory=dict)
    stays: Mapping[int, frozenset[str]] = field(default_factory=dict)
    big: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<Shipment {', '.join(self.names) or 'of nothing'}, {format_size(self.bytes)}>"

    def packing(self, *, alone: bool = False) -> Generator[int, None, Packing]:
        """Make its payload; yields how many bytes have been copied so far.

        What the ranks were sent before, and has not changed, is not copied again, unless it is
        to stand `alone`: for as long as anybody likes.
        """
        with closing(Steps(packing_changed(self.frames, () if alone else self.known))) as steps:
            yield from steps
        shipped = steps.made
        payload, segment = shipped.packed
        kept = shipped.kept if self.many and not alone else None
        records = {
            name: replace(record, kept=kept) if name in self.many else record
            for name, record in self.records.items()
        }
        left = shipped.size - shipped.copied
        note = (
            f"{format_size(left)} of that have not changed and were not sent again"
            if left >= BIG
            else ""
        )
        # It is closed with the last record that has it.
        return Packing(payload, segment if kept is None else None, records, note)


def words_only(notices: Sequence[str]) -> Shipment:
    """Make one that has only something to say."""
    return Shipment((), (), 0, (*notices,), {})


@dataclass(frozen=True, slots=True)
class Packing:
    """A shipment that is ready to travel.

    Keep `segment` open until the ranks have the payload; `records` is for `Session.submit`.
    """

    payload: Payload
    segment: Segment | None
    records: Mapping[str, Shipped]
    note: str


def format_size(size: int) -> str:
    """Write a number of bytes: `200 MB`, `1.2 GB`."""
    for unit, bound in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= bound:
            return f"{size / bound:.1f} {unit}" if unit == "GB" else f"{size / bound:.0f} {unit}"
    return f"{size} bytes"
