"""The variables and changes that are sent to ranks with a cell, and lines for the user.

Runs in the notebook's process.  `nbdist.notebook.shipping` makes shipments;
`nbdist.notebook.cells` and `%dist_push` send them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nbdist.notebook.display import CellDisplay, moved
from nbdist.values.linked import ValueMessage
from nbdist.values.payload import Payload, Segment, packing, size_of
from nbdist.values.states import CLASS, ChangedParts
from nbdist.wire.ops import Replaced, type_text
from nbdist.world.name_table import list_names
from nbdist.world.sent_objects import Parcel


@dataclass(frozen=True, slots=True)
class Packet:
    """A message for `ranks`: the values of the variables `names`, and changes of objects.

    `parcel` lists the same names and objects.  The notebook records by it what the ranks have.
    """

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    message: ValueMessage
    parcel: Parcel


@dataclass(frozen=True, slots=True)
class Shipment:
    """The packets that are sent to ranks with a cell, and the lines that tell the user about them.

    There are no packets if the ranks have all that they need.  `notices` are lines that are shown
    before the packets are sent.  `big` has texts on large variables such as "corpus (191 MiB) to
    4 ranks", which are shown after the word "sending" or "sent".  `parcels` lists by rank the names
    and objects that the rank is sent.  `setup` is a packet for new workers, which have no
    variables, or None.  The packets share memory with the values, so `packed` must be called before
    the values change.
    """

    notices: tuple[str, ...] = ()
    packets: tuple[Packet, ...] = ()
    parcels: Mapping[int, Parcel] = field(default_factory=dict)
    setup: Packet | None = None
    big: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The variables in the packets for ranks, each name once."""
        return (*dict.fromkeys(name for packet in self.packets for name in packet.names),)

    def packed(self, display: CellDisplay) -> PackedByRank:
        """Copy the packets into payloads, and show the notices and the progress on the display.

        The caller must close the result after the ranks have received the payloads.
        """
        for notice in self.notices:
            display.add_note(notice)
        packed = PackedByRank()
        if self.big and display.can_change:
            display.show_status(" · ".join(f"sending {each}" for each in self.big))
        what = f"sending {list_names(self.names)}"
        try:
            for packet in [*self.packets, *filter(None, [self.setup])]:
                frames = packet.message.frames
                payload, segment = moved(packing(frames), size_of(frames), display, what)
                if packet is self.setup:
                    packed.setup = payload, segment
                else:
                    packed.segments += filter(None, [segment])
                    packed.payloads |= dict.fromkeys(packet.ranks, payload)
        except BaseException:  # also KeyboardInterrupt, by Stop
            packed.close()
            raise
        for each in self.big:
            display.add_note(f"sent {each}")
        return packed


@dataclass(slots=True)
class PackedByRank:
    """Payloads by rank, and the shared memory that holds large parts of the payloads.

    `setup` has the payload for new workers, and its shared memory; each may be None.
    """

    payloads: dict[int, Payload] = field(default_factory=dict)
    segments: list[Segment] = field(default_factory=list)
    setup: tuple[Payload | None, Segment | None] = (None, None)

    def __enter__(self) -> PackedByRank:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def pop_setup(self) -> tuple[Payload | None, Segment | None]:
        """Return the payload for new workers, and its shared memory, which the caller must close.

        Each is None if there is none.  A second call returns no payload.
        """
        setup, self.setup = self.setup, (None, None)
        return setup

    def close(self) -> None:
        """Release the shared memory; ranks that have mapped it keep it."""
        segments, self.segments = [*self.segments, *filter(None, [self.setup[1]])], []
        for segment in segments:
            segment.close()


def replaced_text(
    name: str, value: Any, replaced: Mapping[int, Replaced], verb: str = "changed"
) -> str:
    """Return a line such as "the notebook's `m` (Net) replaces the ranks' `m` (Net, trained)".

    `value` is the notebook's value, and `replaced` has by rank what is known of the rank's value.
    `verb` is the word for what ranks have done to their value, here "trained".
    """
    kinds = dict.fromkeys(each.kind for each in replaced.values())
    others = dict.fromkeys(other for each in replaced.values() for other in each.others)
    is_changed = any(each.is_changed for each in replaced.values())
    was = ", ".join([*kinds, *([verb] if is_changed else [])])
    text = f"the notebook's `{name}` ({type_text(value)}) replaces the ranks' `{name}` ({was})"
    if others:
        listed = list_names([f"`{each}`" for each in others])
        verb = "belongs" if len(others) == 1 else "belong"
        text += f"; {listed} on the ranks still {verb} to the old one"
    return text


HAVE_NAMED_PARTS = ("dict", "instance", "class", "function")
"""The kinds of objects whose parts have names that users know, such as keys or attributes."""


def path_of(name: str, root: Any, value: Any, parts: ChangedParts) -> str:
    """Return a text for messages that names a changed part, such as "cfg['lr']" or "CFG.lr".

    `name` is a variable, `root` the variable's object, and `value` the object of which `parts` have
    changed.  Returns only `name` if several parts or the whole object have changed, if the part has
    no name, or if `value` is another object than `root`, such as an item of it.
    """
    if value is not root or not parts or len(parts) != 1:
        return name
    (part,) = parts
    if isinstance(value, dict):
        return f"{name}[{part!r}]" if isinstance(part, str | int | float) else name
    return f"{name}.{part.removeprefix('.')}" if isinstance(part, str) and part != CLASS else name
