"""The table of objects: which objects of the notebook each rank has, and in which state.

Runs in the notebook's process; a world has one table, `NameTable.objects`.  Before values are sent,
`Outgoing` compares the states in the table with the notebook's objects.  A *state* is a record of
an object's parts, by which a change is noticed.
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

    `compared` is the value that `SentObjects.runs` had when all objects of the rank were compared
    with the notebook's, or 0 if they were not.  `binds` are variables to which the task certainly
    assigns if it succeeds.  The notebook needs them because a rank does not report a variable to
    which the task has assigned the same object again.
    """

    names: Mapping[str, Any] = field(default_factory=dict)
    states: Mapping[int, ObjectState] = field(default_factory=dict)
    compared: int = 0
    binds: frozenset[str] = frozenset()


NOTHING_SENT = Parcel()


class SentObjects:
    """The notebook's objects by key, and for each rank the states in which the rank got objects.

    `known` has the states by rank and key.

    `changed` has by key the parts of an object that ranks are known to have changed, None for the
    whole object.  `theirs` has by key the parts that both ranks and the notebook have changed, None
    for the whole object: ranks keep their own.

    The user gets a notice if ranks do not get the notebook's state of an object.  `noticed_digests`
    has by key the digest of the state at the last notice.

    `runs` grows each time that code of the notebook may have changed objects.  `have_run` is True
    if a rank has finished a task since `recovery.record_changes` last asked ranks.
    """

    def __init__(self) -> None:
        self.links = Links()
        self.known: dict[int, dict[int, ObjectState]] = {}
        self.theirs: dict[int, ChangedParts] = {}
        self.changed: dict[int, ChangedParts] = {}
        self.noticed_digests: dict[int, bytes] = {}
        self.runs = 1
        self.have_run = False
        # By rank and key, the states in which the rank got objects that it has deleted since.
        # Memory of tensors also has a key; it counts as deleted once no tensor of the rank uses it.
        self.ended: dict[int, dict[int, ObjectState]] = {}
        # By rank, the keys of objects that the rank has changed and then deleted.
        self.lost_changes: dict[int, set[int]] = {}
        self._compared: dict[int, int] = {}
        self._last: dict[int, ObjectState] = {}  # by key: states on the ranks before a restart
        self._dead: set[int] = set()

    def copy(self) -> SentObjects:
        """Return a copy with its own states and changes, but shared `links` and notices."""
        copied = copy(self)
        copied.known = {rank: dict(states) for rank, states in self.known.items()}
        copied.theirs, copied.changed = dict(self.theirs), dict(self.changed)
        copied.lost_changes = dict(self.lost_changes)
        copied.ended = {rank: dict(states) for rank, states in self.ended.items()}
        copied._compared = dict(self._compared)
        return copied

    def follow(self, before: SentObjects) -> None:
        """Take over the keys and last states of objects from the table before a restart."""
        self.links = before.links
        self._last = dict(before._last)
        for states in before.known.values():
            self._last |= states

    def record_gained(self, rank: int, keys: Iterable[int]) -> None:
        """Record that a rank has got objects from a file or its old process.

        `keys` are the objects' keys.  Their states are the last that are known on any rank; an
        object without a known state is not recorded.
        """
        gained = {key: self._last[key] for key in keys if key in self._last}
        for states in self.known.values():
            gained |= {key: states[key] for key in keys if key in states}
        self.of(rank).update(gained)

    def of(self, rank: int) -> dict[int, ObjectState]:
        """Return the states of the objects that a rank has, by key."""
        return self.known.setdefault(rank, {})

    def may_differ(self, ranks: Iterable[int]) -> bool:
        """Return True if objects of any of `ranks` may differ from the notebook's objects.

        This is so if the notebook has run code since these objects were last compared.
        """
        return any(self._compared.get(rank) != self.runs for rank in ranks)

    def record_finished(
        self, rank: int, received: Parcel, dead: Iterable[int], lost: Iterable[int] = ()
    ) -> None:
        """Record the objects that a rank got with a finished task, and those that it has deleted.

        `received` has the names and objects that came with the task.  `dead` has the keys of all
        objects that the rank has deleted, and `lost` the keys of deleted objects that the rank had
        changed before.
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
        """Return the keys of objects that a rank has changed and then deleted."""
        return self.lost_changes.get(rank, set())

    def drop(self, rank: int, keys: Iterable[int]) -> None:
        """Record that a rank has deleted objects."""
        for key in keys:
            if (state := self.of(rank).pop(key, None)) is not None:
                self.ended.setdefault(rank, {})[key] = state

    def record_copies(self, source: int, rank: int, keys: Iterable[int]) -> None:
        """Record that `rank` has got copies of these objects from `source`, in the same states."""
        states, source_states = self.of(rank), self.of(source)
        states.update({key: source_states[key] for key in keys if key in source_states})

    def record_kept(self, key: int, parts: ChangedParts) -> None:
        """Record that ranks keep their own `parts` of an object, or all if `parts` is None."""
        self.theirs[key] = _together(self.theirs.get(key, frozenset()), parts)

    def record_changed(self, changed: Changed) -> None:
        """Add to `changed` the objects, and the parts of them, that ranks have reported as changed.

        Whether the notebook has changed the same parts does not matter here; `record_kept` records
        that.
        """
        for key, parts in changed.items():
            self.changed[key] = _together(self.changed.get(key, frozenset()), parts)

    def renew_partly_kept(self, lent: Mapping[int, Collection[int]]) -> None:
        """Give new keys to arguments of a finished call that only some of its ranks have kept.

        A rank keeps an argument if the function has stored it, or if a thread still uses it.  In
        the next call with the same argument, that rank would use its own object, which it may have
        changed, and all other ranks a new copy of the notebook's object.  With a new key, every
        rank gets a new copy.  `lent` has by rank the keys of the objects that were new to the rank
        in the call.  Objects to which other objects of a rank refer keep their keys.
        """
        kept, deleted = set[int](), set[int]()
        for rank, keys in lent.items():
            kept |= self.of(rank).keys() & keys
            deleted |= self.ended.get(rank, {}).keys() & keys
        if not (partly_kept := kept & deleted):
            return
        for rank in lent:
            known_states = self.of(rank)
            others = [key for key in known_states if key not in partly_kept]
            partly_kept -= reachable_keys(known_states, others)
        for key in partly_kept:
            self.links.renew_key(key)

    def overwrite(self, keys: Iterable[int]) -> None:
        """Record that ranks get the notebook's state of these objects, which replaces their own."""
        for key in keys:
            self.theirs.pop(key, None)
            self.noticed_digests.pop(key, None)
            self.changed.pop(key, None)

    def sendable_parts(self, key: int, parts: ChangedParts) -> ChangedParts | bool:
        """Return those of an object's changed `parts` that may be sent to ranks.

        Parts that ranks keep as their own (`theirs`) are left out; if no part is left, returns
        False.  `parts` is None if the whole object has changed.  Then returns True if the object
        may be sent, and False if ranks keep any part of it.
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
        """Renumber the ranks: `was` has old numbers by new ones, `after` is the new world size."""
        before, self._compared = self.known, {}
        ended, lost = self.ended, self.lost_changes
        self.ended = {r: ended[was[r]] for r in range(after) if was.get(r) in ended}
        self.lost_changes = {r: lost[was[r]] for r in range(after) if was.get(r) in lost}
        self.known = {r: before.get(was[r], {}) if r in was else {} for r in range(after)}

    def reach(self, rank: int, token: Token) -> set[int]:
        """Return the keys of all objects on a rank that belong to the value with this token.

        These are the objects to which the value refers, directly or through other objects.
        """
        return reachable_keys(self.of(rank), keys_in(token))

    def ranks_with(self, key: int) -> frozenset[int]:
        """Return the ranks that have the object with this key."""
        return frozenset(rank for rank, states in self.known.items() if key in states)

    def collect_deleted(self) -> set[int]:
        """Return the keys of objects that the notebook has deleted, but that ranks still have.

        Objects that the notebook has deleted since the last call are added first.
        """
        if self.links.has_dead:
            self.links.drop_unused()
        self._dead.update(self.links.pop_dead_keys())
        return self._dead

    def pop_forgotten(self, ranks: Collection[int]) -> dict[int, tuple[int, ...]]:
        """Return, by rank, the keys of objects that the notebook has deleted and the rank has.

        The keys are removed from `known`, so each is returned once for a rank.
        """
        self.collect_deleted()
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
