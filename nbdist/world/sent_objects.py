"""The table of objects: which objects of the notebook each rank has, and in which state.

Runs in the notebook's process; a world has one table, in `NameTable.objects`.  `NameTable` has the
names, and `Outgoing` compares the states with the present objects before a task is sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from nbdist.values.links import Links
from nbdist.values.states import ChangedParts, ObjectState, Token, keys_in, reachable_keys
from nbdist.wire.ops import Changed


@dataclass(frozen=True, slots=True)
class Parcel:
    """The names and objects that a task brings to a rank, in the states that are sent.

    `compared` is `SentObjects.runs` at the time when all objects of the rank were compared.
    `binds` are variables that the task assigns if it succeeds, even to the object that they had.
    """

    names: Mapping[str, Any] = field(default_factory=dict)
    states: Mapping[int, ObjectState] = field(default_factory=dict)
    compared: int = 0
    binds: frozenset[str] = frozenset()


NOTHING_SENT = Parcel()


class SentObjects:
    """The notebook's objects by key, and for each rank the states in which it was sent them.

    `known` has these states by rank and key.  `theirs` has objects, or parts of objects, that both
    ranks and the notebook have changed: the ranks keep their own.  `noticed_digests` has by key the
    digest of the state for which a notice has said so.  `changed` has objects that ranks are known
    to have changed, whether the notebook has changed them or not.  `runs` counts how often code of
    the notebook has run, which may have changed any object.  `have_run` is True if ranks have run a
    task since they were last asked what they have changed.
    """

    def __init__(self) -> None:
        self.links = Links()
        self.known: dict[int, dict[int, ObjectState]] = {}
        self.theirs: dict[int, ChangedParts] = {}
        self.changed: dict[int, ChangedParts] = {}
        self.noticed_digests: dict[int, bytes] = {}
        self.runs = 1
        self.have_run = False
        # By rank and key, the states in which objects were sent that have ended on the rank.  Among
        # them is memory that the rank's tensors have left.
        self.ended: dict[int, dict[int, ObjectState]] = {}
        # By rank, the keys of objects that the rank had changed and that have ended there.
        self.lost_changes: dict[int, set[int]] = {}
        self._compared: dict[int, int] = {}
        self._last: dict[int, ObjectState] = {}  # states that were sent to workers before a restart
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
        """Take over the keys of the table of the workers before a restart."""
        self.links = before.links
        self._last = dict(before._last)
        for states in before.known.values():
            self._last |= states

    def record_gained(self, rank: int, keys: Iterable[int]) -> None:
        """Record that a rank has got the objects of these keys from a file or its old process."""
        gained = {key: self._last[key] for key in keys if key in self._last}
        for states in self.known.values():
            gained |= {key: states[key] for key in keys if key in states}
        self.of(rank).update(gained)

    def of(self, rank: int) -> dict[int, ObjectState]:
        """Return the states of the objects that a rank has, by key."""
        return self.known.setdefault(rank, {})

    def may_differ(self, ranks: Iterable[int]) -> bool:
        """Return True if code of the notebook has run since the ranks' objects were compared."""
        return any(self._compared.get(rank) != self.runs for rank in ranks)

    def record_finished(
        self, rank: int, received: Parcel, dead: Iterable[int], lost: Iterable[int] = ()
    ) -> None:
        """Record the parcel that a rank has received with a finished task, and its ended objects.

        `dead` are the keys of objects that have ended on the rank, and `lost` the keys of those of
        them that the rank had changed.
        """
        known_states = self.of(rank)
        self.lost_changes[rank] = self.lost_on(rank) - received.states.keys() | {*lost}
        known_states.update(received.states)
        for key in received.states.keys() & self.ended.get(rank, {}).keys():
            del self.ended[rank][key]
        self._compared[rank] = max(received.compared, self._compared.get(rank, 0))
        self.have_run = True
        self.drop(rank, dead)

    def lost_on(self, rank: int) -> set[int]:
        """Return the keys of objects that a rank had changed and that have ended there."""
        return self.lost_changes.get(rank, set())

    def drop(self, rank: int, keys: Iterable[int]) -> None:
        """Record that objects have ended on a rank."""
        for key in keys:
            if (state := self.of(rank).pop(key, None)) is not None:
                self.ended.setdefault(rank, {})[key] = state

    def record_copies(self, source: int, rank: int, keys: Iterable[int]) -> None:
        """Record that a rank has got copies of these objects of another rank, in its states."""
        states, source_states = self.of(rank), self.of(source)
        states.update({key: source_states[key] for key in keys if key in source_states})

    def record_kept(self, key: int, parts: ChangedParts) -> None:
        """Record that ranks keep an object, or these parts of it, as they have changed it."""
        self.theirs[key] = _together(self.theirs.get(key, frozenset()), parts)

    def record_changed(self, changed: Changed) -> None:
        """Record objects that ranks have changed, whether the notebook has changed them or not."""
        for key, parts in changed.items():
            self.changed[key] = _together(self.changed.get(key, frozenset()), parts)

    def overwrite(self, keys: Iterable[int]) -> None:
        """Record that ranks get the notebook's state of these objects, instead of their own."""
        for key in keys:
            self.theirs.pop(key, None)
            self.noticed_digests.pop(key, None)
            self.changed.pop(key, None)

    def sendable_parts(self, key: int, parts: ChangedParts) -> ChangedParts | bool:
        """Return which changed parts of an object may be sent.

        False for none, and True for the whole object.
        """
        if key not in self.theirs:
            return True if parts is None else parts
        kept = self.theirs[key]
        if parts is None or kept is None:
            return False
        return parts - kept or False

    def record_replaced(self, ranks: Iterable[int]) -> None:
        """Record that ranks are new processes, which have no object of the notebook."""
        for rank in ranks:
            self.known[rank] = {}
            self.ended.pop(rank, None)
            self.lost_changes.pop(rank, None)
            self._compared.pop(rank, None)

    def renumber(self, was: Mapping[int, int], after: int) -> None:
        """Record the new numbers of ranks; `was` has the old numbers of those that stay."""
        before, self._compared = self.known, {}
        ended, lost = self.ended, self.lost_changes
        self.ended = {r: ended[was[r]] for r in range(after) if was.get(r) in ended}
        self.lost_changes = {r: lost[was[r]] for r in range(after) if was.get(r) in lost}
        self.known = {r: before.get(was[r], {}) if r in was else {} for r in range(after)}

    def reach(self, rank: int, token: Token) -> set[int]:
        """Return the keys of the objects that a value sent to a rank refers to, also indirectly."""
        return reachable_keys(self.of(rank), keys_in(token))

    def ranks_with(self, key: int) -> frozenset[int]:
        """Return the ranks that have the object with this key."""
        return frozenset(rank for rank, states in self.known.items() if key in states)

    def pop_forgotten(self, ranks: Collection[int]) -> dict[int, tuple[int, ...]]:
        """Return by rank the keys of its objects that have ended in the notebook.

        Each key is returned once for each rank, and removed from the table.
        """
        if self.links.has_dead:
            self.links.drop_unused()
        self._dead.update(self.links.pop_dead_keys())
        if not self._dead:
            return {}
        forgotten = {}
        for rank in ranks:
            known_states = self.known.get(rank, {})
            if keys := known_states.keys() & self._dead:
                forgotten[rank] = tuple(keys)
                for key in keys:
                    del known_states[key]
        for key in self._dead:
            for ended in self.ended.values():
                ended.pop(key, None)
            self.theirs.pop(key, None)
            self.noticed_digests.pop(key, None)
            self.changed.pop(key, None)
        remaining = set[int]().union(*self.known.values()) if self.known else set()
        self._dead &= remaining
        return forgotten


def _together(one: ChangedParts, other: ChangedParts) -> ChangedParts:
    return None if one is None or other is None else one | other
