"""Prepares values for sending: finds the objects that a rank lacks, and those that have changed.

A value *leads to* the objects to which it refers, directly or through other objects.  `Outgoing` is
used in the notebook's process: by `nbdist.notebook.shipping` for the variables of a cell, and by
`nbdist.world.remote_call` for the arguments of a call.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from nbdist.values.linked import ValueMessage, reducer_for, write
from nbdist.values.pickling import without_cycles
from nbdist.values.scan import Scan
from nbdist.values.states import (
    HEAD_PART,
    ChangedParts,
    ObjectState,
    Token,
    keys_in,
    reachable_keys,
)
from nbdist.values.updates import ObjectUpdate, is_replaced, update_of
from nbdist.wire.ops import Inspected
from nbdist.world.sent_objects import Parcel, SentObjects


def _has_hidden_contents(tool: str, part: Token) -> bool:
    """Return True if a part's contents can be replaced while user code sees the same object.

    For example, `model.half()` gives a tensor new memory.  `tool` is the kind of the object that
    has the part (`LinkEntry.tool`).
    """
    return tool in ("array", "opaque") or (tool == "tensor" and part == "data")


@dataclass(frozen=True, slots=True)
class SendQuestion:
    """The question to `ranks` which of the notebook's objects they have changed.

    It is asked before a task is sent, by the op `nbdist.worker.ops.values.inspect`.  `objects` has
    by key the parts that the question is about, None for the whole object.  `names` are variables
    that the task would bind to another object.
    """

    ranks: tuple[int, ...]
    objects: Mapping[int, ChangedParts]
    names: tuple[str, ...] = ()

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the op `values.inspect`, by name."""
        return {"objects": dict(self.objects), "names": self.names}


class Outgoing:
    """Finds how objects have changed since they were sent to ranks, and pickles the changes.

    The objects are those to which the given values lead, and all others that ranks have.

        outgoing = Outgoing(objects, namespace, ranks)
        token = outgoing.scan_value(value)
        outgoing.compare()
        if objects := outgoing.objects_to_inspect():
            outgoing.apply_replies(replies)  # the ranks' replies about these objects
        outgoing.renew_replaced()
        message, states = outgoing.message({"x": value}, rank)

    With `forces`, ranks get the notebook's state of all scanned objects, even if the ranks have
    changed these objects.
    """

    def __init__(
        self,
        objects: SentObjects,
        namespace: dict[str, Any],
        ranks: frozenset[int],
        *,
        forces: bool = False,
    ) -> None:
        self.objects = objects
        self.ranks = ranks
        self.states: dict[int, ObjectState] = {}
        # By rank and by key: the parts of an object that have changed since it was sent to the
        # rank, or None for the whole object.
        self.changed: dict[int, dict[int, ChangedParts]] = {}
        # By key: the parts in which the notebook has put a new object in place of an object that
        # ranks have changed.
        self.replaced_parts: dict[int, set[Token]] = {}
        # Keys of objects that a rank has deleted, and that the notebook has changed since the rank
        # got them.
        self.unreached: set[int] = set()
        self._dropped: dict[int, dict[Token, set[int]]] = {}
        self.forces = forces
        self._namespace = namespace
        self._scan: Scan | None = None

    # --- scanning -------------------------------------------------------------------------

    def scan_value(self, value: Any) -> Token:
        """Read the states of all objects to which a value leads; return the value's token.

        Raises PicklingError, and any exception of a class's own `__reduce__`.
        """
        try:
            with without_cycles():
                token = self.scan.token(value)
                self.scan.run()
        except BaseException:  # also after Stop: half a scan cannot be continued
            self._scan = None
            raise
        return token

    def drop_scan(self) -> None:
        """Forget the scan, so that `scan_value` reads all states again."""
        self._scan = None

    @property
    def scan(self) -> Scan:
        """The present scan: the states of all objects to which the scanned values lead."""
        if self._scan is None:
            self._scan = self._new_scan(before=self._sent_states.get)
        return self._scan

    @cached_property
    def _sent_states(self) -> dict[int, ObjectState]:
        """By key, the state in which an object was sent; one of them if ranks got several."""
        states: dict[int, ObjectState] = {}
        for rank in self.ranks:
            states |= self.objects.of(rank)
        return states

    def reach(self, token: Token) -> set[int]:
        """Return the keys of all objects that a value with this token leads to."""
        return self.scan.reach([token])

    def leads_to(self, top: int, key: int) -> bool:
        """Return True if the object with the key `top` now leads to the object with `key`."""
        return key in reachable_keys(self.states, [top])

    def _new_scan(self, **options: Any) -> Scan:
        return Scan(self.objects.links, reducer_for(self._namespace), self._namespace, **options)

    # --- comparing ------------------------------------------------------------------------

    def compare(self) -> None:
        """Set `changed`: for each rank, the objects that have changed since the rank got them."""
        self.states = dict(self.scan.states)
        if not self.forces and self.objects.may_differ(self.ranks):
            self._scan_others()
        self.changed = {rank: self._changed_on(rank) for rank in self.ranks}

    def _scan_others(self) -> None:
        """Read also the states of objects that ranks have, but to which no scanned value leads.

        A cell may use these objects, for example through a variable that a rank has bound.
        """
        known_states = self._sent_states
        unread = [
            entry
            for entry in self.objects.links.entries()
            if entry.key in known_states and entry.key not in self.states
        ]
        others = self._new_scan(before=known_states.get, trusts_samples=True)
        others.states.update(self.states)
        with without_cycles():
            others.read_all(unread)
        # If the new state equals the known state, keep the known `ObjectState` itself, which
        # `_changed_on` can skip without a comparison.
        known = known_states.get
        self.states = others.states
        for key, state in [*self.states.items()]:
            before = known(key)
            if before is not state and before == state:
                self.states[key] = before

    def _changed_on(self, rank: int) -> dict[int, ChangedParts]:
        changed: dict[int, ChangedParts] = {}
        known_states, ended = self.objects.of(rank), self.objects.ended.get(rank, {})
        states: Iterable[tuple[int, ObjectState]] = self.states.items()
        if not (ended or self.forces):  # to save time, skip objects that have not changed
            known = known_states.get
            states = [(key, state) for key, state in states if known(key) is not state]
        for key, state in states:
            before = known_states.get(key)
            if ended and before == state:
                self._record_unreached(state, ended)
            if before is None or (before is state and not self.forces):
                continue
            if self.forces:
                parts = state.changed_since(before)
                changed[key] = parts if parts and HEAD_PART in parts else None
            elif before != state:
                to_send = self.objects.sendable_parts(key, state.changed_since(before))
                if to_send is not False:
                    changed[key] = None if to_send is True else to_send
        return changed

    def _record_unreached(self, parent: ObjectState, ended: Mapping[int, ObjectState]) -> None:
        """Add to `unreached` objects that a rank has dropped and the notebook has changed since.

        Only objects to which `parent` refers directly are added.  `ended` has, by key, the states
        of all objects that the rank has dropped, as the rank got them.
        """
        for key in parent.children:
            if key in ended and key in self.states and self.states[key] != ended[key]:
                self.unreached.add(key)

    def objects_to_inspect(self) -> dict[int, ChangedParts]:
        """Return, by key, the parts of objects about which ranks must be asked, None for all parts.

        Sending the values would change these parts on a rank, or would make the rank drop the
        object.  The caller first asks whether ranks have changed the parts themselves
        (`SendQuestion`), since their changes would be lost.
        """
        objects: dict[int, ChangedParts] = {}
        for rank, changed in self.changed.items():
            for key, parts in changed.items():
                for part, dropped in self._dropped_by(key, parts, self.objects.of(rank)):
                    self._dropped.setdefault(key, {}).setdefault(part, set()).update(dropped)
                    objects |= dict.fromkeys(dropped)
                # If a new object would take the place of this object, all changes of the rank would
                # be lost.  So ask about the whole object (None).
                if parts is None or HEAD_PART in parts or objects.get(key, parts) is None:
                    objects[key] = None
                else:
                    objects[key] = parts | (objects.get(key) or frozenset())
        return objects

    def _dropped_by(
        self, key: int, parts: ChangedParts, known_states: Mapping[int, ObjectState]
    ) -> Iterator[tuple[Token, set[int]]]:
        """Yield each part of an object that has dropped other objects, and the keys of the latter.

        `parts` are the changed parts; None, for the whole object, is yielded as one part.  A part
        has *dropped* an object if it led to the object when it was sent, and does not now.  Ranks
        may have changed a dropped object: for example, `model.half()` gives each weight new memory,
        and the ranks may have trained the old memory.

        An object that the notebook still has elsewhere does not count as dropped, since ranks keep
        it, too.  But it does count if the part has hidden contents (`_has_hidden_contents`).
        """
        before, now, links = known_states[key], self.states[key], self.objects.links
        entry = links.by_key.get(key)
        for part in parts or [None]:
            if part is None:
                lost = {*before.children} - {*now.children}
            else:
                tokens = (s.parts.get(part) if s.parts else None for s in (before, now))
                old, new = map(keys_in, tokens)
                lost = {*old} - {*new}
            dropped = reachable_keys(known_states, lost)
            if entry is None or not _has_hidden_contents(entry.tool, part):
                dropped = {each for each in dropped if links.find(each) is None}
            if dropped:
                yield part, dropped

    def apply_replies(self, replies: Mapping[int, Inspected]) -> None:
        """Record what ranks have changed, by their replies to `objects_to_inspect`.

        Parts that both the notebook and a rank have changed are not sent: ranks keep their own.
        """
        links = self.objects.links
        for inspected in replies.values():
            for key, by_part in self._dropped.items():
                hit = {p for p, keys in by_part.items() if not keys.isdisjoint(inspected.changed)}
                entry = links.by_key.get(key)
                kept = {part for part in hit if entry and _has_hidden_contents(entry.tool, part)}
                if kept:
                    self.objects.record_kept(key, None if None in kept else frozenset(kept))
                if hit - kept:
                    self.replaced_parts.setdefault(key, set()).update(hit - kept)
        for rank, inspected in replies.items():
            self.objects.record_changed(inspected.changed)
            self.objects.drop(rank, inspected.gone)
            for key, theirs in inspected.changed.items():
                if key not in self.changed.get(rank, {}):
                    continue
                changed_here = self.changed[rank][key]
                is_by_part = (
                    changed_here is not None
                    and theirs is not None
                    and HEAD_PART not in changed_here
                )
                both: ChangedParts = changed_here & theirs if is_by_part else None  # type: ignore[operator]
                if both is None or both:
                    self.objects.record_kept(key, both)
        self.changed = {rank: self._changed_on(rank) for rank in self.ranks}

    def kept(self) -> dict[int, ChangedParts]:
        """Return, by key, the parts that the notebook has changed and that ranks do not get.

        None stands for a whole object.  Ranks have changed these parts too, or have dropped the
        object.  The caller shows a notice about them.  Each change of an object is returned only
        once.
        """
        kept: dict[int, ChangedParts] = {}
        for key in self.states.keys() & self.objects.theirs.keys():
            state, theirs = self.states[key], self.objects.theirs[key]
            sent_states = (self.objects.of(rank).get(key) for rank in self.ranks)
            for before in sent_states:
                if before is None or before == state:
                    continue
                changed = state.changed_since(before)
                if theirs is None or changed is None:
                    kept[key] = None
                elif changed & theirs:
                    kept[key] = changed & theirs
        kept |= {key: None for key in self.unreached if key not in kept}
        for key in [*kept]:
            digest = self.states[key].digest
            if self.objects.noticed_digests.get(key) == digest:
                del kept[key]
            self.objects.noticed_digests[key] = digest
        return kept

    def renew_replaced(self) -> bool:
        """Give a new key to objects whose counterpart on a rank cannot be changed in place.

        With a new key, the object is sent as a new object and replaces its counterpart.  Returns
        True if there were such objects.  Then the caller has to scan and compare all values again,
        and call this method again until it returns False: an object that contains a replaced object
        may have to be replaced, too.  No object is replaced twice, so the repetition ends.
        """
        links = self.objects.links
        replaced = {
            key
            for changed in self.changed.values()
            for key, parts in changed.items()
            if is_replaced(parts) and key in links.by_key
        }
        for key in replaced:
            links.renew(links.by_key[key])
        if replaced:
            self.drop_scan()
        return bool(replaced)

    # --- sending --------------------------------------------------------------------------

    def groups(self, lacks: Mapping[int, Collection[str]]) -> list[tuple[int, ...]]:
        """Return groups of ranks to which the same message can be sent.

        The ranks of a group lack the same names (`lacks` has them by rank), and have got all
        objects in the same states.
        """
        ranks_by_signature: dict[Hashable, list[int]] = {}
        for rank in sorted(self.ranks):
            known_states = self.objects.of(rank)
            signature = (*lacks.get(rank, ()),), (*map(id, map(known_states.get, self.states)),)
            ranks_by_signature.setdefault(signature, []).append(rank)
        return [tuple(ranks) for ranks in ranks_by_signature.values()]

    def message(
        self, values: Mapping[str, Any], rank: int
    ) -> tuple[ValueMessage, dict[int, ObjectState]]:
        """Pickle `values`, by name, and the changes of objects for a rank.

        Returns the message, and by key the new states of the objects that the message changes on
        the rank or brings to it.  Raises any exception of pickling.
        """
        known_states, links = self.objects.of(rank), self.objects.links
        updates: list[ObjectUpdate] = []
        states: dict[int, ObjectState] = {}
        scan = self._new_scan()
        for key, parts in self.changed[rank].items():
            before, now = known_states[key], self.states[key]
            if (block := links.blocks.get(key)) is not None:
                updates.append((key, "block", block))
            elif (entry := links.by_key.get(key)) is not None and entry() is not None:
                updates.append(update_of(entry, now, before, parts, scan))
            states[key] = merged(now, before, parts)
        message = write(values, updates, links, self.states, known_states.keys(), self._namespace)
        states |= self._registered(message)
        return message, states

    def whole(self, values: Mapping[str, Any]) -> tuple[ValueMessage, dict[int, ObjectState]]:
        """Pickle values as `message` does, for a rank that has none of the notebook's objects."""
        links = self.objects.links
        message = write(values, [], links, self.states, (), self._namespace)
        return message, self._registered(message)

    def _registered(self, message: ValueMessage) -> dict[int, ObjectState]:
        return {key: self.states[key] for key in message.keys if key in self.states}

    def parcels(
        self, sent: Iterable[tuple[Iterable[int], Parcel]], binds: frozenset[str] = frozenset()
    ) -> dict[int, Parcel]:
        """Return the parcel of each rank; a rank that is not in `sent` gets no names and objects.

        `sent` has pairs of ranks and the parcel that they get.  `binds` is as in `Parcel`.
        """
        compared = 0 if self.forces else self.objects.runs
        parcels = dict.fromkeys(self.ranks, Parcel(compared=compared, binds=binds))
        for ranks, parcel in sent:
            parcels |= dict.fromkeys(ranks, replace(parcel, compared=compared, binds=binds))
        return parcels


def merged(now: ObjectState, before: ObjectState, parts: ChangedParts) -> ObjectState:
    """Return the state of a rank's object after it has got some parts of the notebook's object.

    The rank's object was in the state `before`.  It has got the `parts` of the notebook's state
    `now`; None stands for the whole object.
    """
    if parts is None or now.parts is None or before.parts is None:
        return now
    if parts >= (now.changed_since(before) or frozenset()):
        return now
    return before.with_parts(now, parts)
