"""Which objects of the notebook each rank has, in which state, and which ranks have changed.

In the notebook's process, one table of a world; `NameTable` has the names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from nbdist.values.links import Links
from nbdist.values.states import Parts, State, Token, keys_in, reached
from nbdist.wire.ops import Changed


@dataclass(frozen=True, slots=True)
class Parcel:
    """The names and objects that a task brings to a rank, in the states that are sent.

    `compared` is `SentObjects.runs` at the time when all objects of the rank were compared.
    `binds` are variables that the task has assigned if it ends well, be it to what they were.
    """

    names: Mapping[str, Any] = field(default_factory=dict)
    states: Mapping[int, State] = field(default_factory=dict)
    compared: int = 0
    binds: frozenset[str] = frozenset()


NOTHING_SENT = Parcel()


class SentObjects:
    """The notebook's objects by key, and for each rank the states in which it was sent them.

    `have_run` is True once ranks have run a task since they were last asked what they have changed.
    `theirs` has objects, or parts of them, that ranks have changed and the notebook too: the ranks
    keep their own; `told` has by key the state of which a line has said so.  `changed` has what
    ranks are known to have changed, whether the notebook has changed it or not.
    `runs` counts how often code of the notebook has run: it may have changed any object.
    """

    def __init__(self) -> None:
        self.links = Links()
        self.known: dict[int, dict[int, State]] = {}
        self.theirs: dict[int, Parts] = {}
        self.changed: dict[int, Parts] = {}
        self.told: dict[int, bytes] = {}
        self.runs = 1
        self.have_run = False
        # Objects that have ended on a rank, memory that its tensors have left among them, and how
        # they were sent.
        self.ended: dict[int, dict[int, State]] = {}
        # Keys of objects that a rank had changed and that have ended there.
        self.lost_changes: dict[int, set[int]] = {}
        self._compared: dict[int, int] = {}
        self._last: dict[int, State] = {}  # states that were sent to workers before a restart
        self._dead: set[int] = set()

    def copy(self) -> SentObjects:
        """Copy the states by rank; the keys of objects are shared with the original."""
        copied = copy(self)
        copied.known = {rank: dict(states) for rank, states in self.known.items()}
        copied.theirs, copied.changed = dict(self.theirs), dict(self.changed)
        copied.lost_changes = dict(self.lost_changes)
        copied.ended = {rank: dict(states) for rank, states in self.ended.items()}
        copied._compared = dict(self._compared)
        return copied

    def follow(self, before: SentObjects) -> None:
        """Go on with the keys of a table whose workers were restarted."""
        self.links = before.links
        self._last = dict(before._last)
        for states in before.known.values():
            self._last |= states

    def gained(self, rank: int, keys: Iterable[int]) -> None:
        """Note that a rank has got objects of these keys from a file, or from its old process."""
        found = {key: self._last[key] for key in keys if key in self._last}
        for states in self.known.values():
            found |= {key: states[key] for key in keys if key in states}
        self.of(rank).update(found)

    def of(self, rank: int) -> dict[int, State]:
        """Return the states of the objects that a rank has, by key."""
        return self.known.setdefault(rank, {})

    def may_differ(self, ranks: Iterable[int]) -> bool:
        """Return True if objects may have changed since they were compared for these ranks."""
        return any(self._compared.get(rank) != self.runs for rank in ranks)

    def finished(
        self, rank: int, received: Parcel, dead: Iterable[int], lost: Iterable[int] = ()
    ) -> None:
        """Note a parcel that a rank has received, and which of its objects have ended.

        `lost` are the keys of ended objects that the rank had changed.
        """
        known = self.of(rank)
        self.lost_changes[rank] = self.lost_on(rank) - received.states.keys() | {*lost}
        known.update(received.states)
        for key in received.states.keys() & self.ended.get(rank, {}).keys():
            del self.ended[rank][key]
        self._compared[rank] = max(received.compared, self._compared.get(rank, 0))
        self.have_run = True
        self.drop(rank, dead)

    def lost_on(self, rank: int) -> set[int]:
        """Return the keys of objects that a rank had changed and that have ended there."""
        return self.lost_changes.get(rank, set())

    def drop(self, rank: int, keys: Iterable[int]) -> None:
        """Note that objects have ended on a rank."""
        for key in keys:
            if (state := self.of(rank).pop(key, None)) is not None:
                self.ended.setdefault(rank, {})[key] = state

    def copied_from(self, source: int, rank: int, keys: Iterable[int]) -> None:
        """Note that a rank has got the objects of these keys as another rank has them."""
        known, there = self.of(rank), self.of(source)
        known.update({key: there[key] for key in keys if key in there})

    def keep_theirs(self, key: int, parts: Parts) -> None:
        """Note that ranks keep an object, or these parts of it, as they have changed it."""
        self.theirs[key] = _together(self.theirs.get(key, frozenset()), parts)

    def note_changed(self, changed: Changed) -> None:
        """Note objects that ranks have changed, whether the notebook has changed them or not."""
        for key, parts in changed.items():
            self.changed[key] = _together(self.changed.get(key, frozenset()), parts)

    def overwrite(self, keys: Iterable[int]) -> None:
        """Note that ranks get the notebook's state of these objects, whatever they have done."""
        for key in keys:
            self.theirs.pop(key, None)
            self.told.pop(key, None)
            self.changed.pop(key, None)

    def left_to_send(self, key: int, parts: Parts) -> Parts | bool:
        """Return which changed parts of an object may be sent; False for none."""
        if key not in self.theirs:
            return True if parts is None else parts
        kept = self.theirs[key]
        if parts is None or kept is None:
            return False
        return parts - kept or False

    def replaced(self, ranks: Iterable[int]) -> None:
        """Note that ranks are new processes, which have no object of the notebook."""
        for rank in ranks:
            self.known[rank] = {}
            self.ended.pop(rank, None)
            self.lost_changes.pop(rank, None)
            self._compared.pop(rank, None)

    def renumbered(self, was: Mapping[int, int], after: int) -> None:
        """Note the new numbers of ranks; `was` has the old numbers of those that stay."""
        before, self._compared = self.known, {}
        ended, lost = self.ended, self.lost_changes
        self.ended = {r: ended[was[r]] for r in range(after) if was.get(r) in ended}
        self.lost_changes = {r: lost[was[r]] for r in range(after) if was.get(r) in lost}
        self.known = {r: before.get(was[r], {}) if r in was else {} for r in range(after)}

    def reach(self, rank: int, token: Token) -> set[int]:
        """Return the keys of the objects that a value led to, as it was sent to a rank."""
        return reached(self.of(rank), keys_in(token))

    def ranks_with(self, key: int) -> frozenset[int]:
        """Return the ranks that have the object with this key."""
        return frozenset(rank for rank, states in self.known.items() if key in states)

    def take_forgotten(self, ranks: Collection[int]) -> dict[int, tuple[int, ...]]:
        """Return by rank the keys of objects that have ended in the notebook, once for each."""
        if self.links.has_dead:
            self.links.drop_unused()
        self._dead.update(self.links.take_dead())
        if not self._dead:
            return {}
        found = {}
        for rank in ranks:
            known = self.known.get(rank, {})
            if gone := known.keys() & self._dead:
                found[rank] = tuple(gone)
                for key in gone:
                    del known[key]
        for key in self._dead:
            for ended in self.ended.values():
                ended.pop(key, None)
            self.theirs.pop(key, None)
            self.told.pop(key, None)
            self.changed.pop(key, None)
        left = set[int]().union(*self.known.values()) if self.known else set()
        self._dead &= left
        return found


def _together(one: Parts, other: Parts) -> Parts:
    return None if one is None or other is None else one | other
