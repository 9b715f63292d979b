"""Which names of the notebook go with a cell, and their values, packed.

Which process owns a name is in `NameTable`, what has changed and what belongs together in `_Plan`.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Collection, Container, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from nbdist.errors import UsageError, VariableNotSent
from nbdist.notebook.display import CellDisplay, moved
from nbdist.notebook.free_names import dotted_names, names_used, names_used_later
from nbdist.values.definitions import SYSTEM_NAMES, Import
from nbdist.values.payload import (
    OPTIMIZER,
    Identity,
    Payload,
    Segment,
    is_atomic,
    kind_of,
    packing,
    size_of,
)
from nbdist.values.pickling import Buffer, Pickled, content_version, is_compared_whole, pickle
from nbdist.values.unpicklable import PICKLING_ERRORS, blame, fails_in, parts
from nbdist.words import count, format_ranks, name_ranks, size_text
from nbdist.world.names import (
    WORKERS_MODULES,
    WORKERS_OWN,
    NameTable,
    Sent,
    check_are_free,
    list_names,
)

SMALL = 64 << 10  # up to this many bytes it takes some 50 µs to see whether a value has changed
BIG = 64 << 20  # from this many bytes on a notice is shown before something is sent

OLD_IN_FUNCTIONS = "cannot be sent: functions on the ranks use the one that was sent before"

_MISSING = object()


@dataclass(frozen=True, slots=True)
class Shipment:
    """Names with their values, ready to travel; without names there is something to say only.

    `notices` are lines for the user, to be shown before it is sent; `big` are others, on what is
    large of it or sent again: they follow "sending", or "sent".  `records` say what is sent.
    `frames` show the values' own memory: pack them before these change.  `replaces` says on which
    ranks it would take the place of what they were sent before, which they may have changed,
    `stays` which names a rank is not to bind, as it has them.
    """

    notices: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    frames: Sequence[Buffer] = ()
    records: Mapping[str, Sent] = field(default_factory=dict)
    replaces: Mapping[str, frozenset[int]] = field(default_factory=dict)
    stays: Mapping[int, frozenset[str]] = field(default_factory=dict)
    big: tuple[str, ...] = ()

    def packed(self, display: CellDisplay) -> tuple[Payload | None, Segment | None]:
        """Pack the names, and show what there is to say of them.

        Keep the segment open until the ranks have the payload.
        """
        for notice in self.notices:
            display.note(notice)
        if not self.names:
            return None, None
        if self.big and display.can_change:
            display.wait_for(" · ".join(f"sending {each}" for each in self.big))
        what = f"sending {list_names(self.names)}"
        made = moved(packing(self.frames), size_of(self.frames), display, what)
        for each in self.big:
            display.note(f"sent {each}")
        return made


def plan(
    source: str,
    table: NameTable,
    ranks: Iterable[int],
    hidden: Mapping[str, Any] | None = None,
    gathered: Container[str] = (),
    *,
    is_setup: bool = False,
) -> Shipment:
    """Pack what has to go to `ranks` for this cell.

    `source` is the cell after IPython's transformations, `hidden` IPython's table of
    names that are not the user's (`shell.user_ns_hidden`), `gathered` has names whose values
    are the ranks'.  With a set-up cell goes for new workers what these ranks have (`stays`).
    Raises `VariableNotSent`, and SyntaxError; nothing has been sent or recorded then.
    """
    chains = dotted_names(source)
    plan = _Plan(table, frozenset(ranks), hidden or {}, chains, gathered, is_setup)
    plan.follow(names_used(source))
    table.in_functions |= names_used_later(source)
    plan.follow_calls()
    return plan.shipment()


def push(names: Iterable[str], table: NameTable, ranks: Iterable[int]) -> Shipment:
    """Pack these names, and what their functions need, whatever the table says of them.

    Raises `VariableNotSent`, UsageError for a name that each worker has of its own, and
    KeyError for one that the notebook lacks.
    """
    names = [*names]
    check_are_free(names, "`%dist_push`")
    plan = _Plan(table, frozenset(ranks))
    plan.force(names)
    return plan.shipment()


def version_now(name: str, table: NameTable) -> Hashable:
    """Say how a name of the notebook is now, to compare with a `Sent.version` of before.

    Raises `VariableNotSent`, where it has become something that cannot travel.
    """
    return _Plan(table, frozenset())._look(name).record.version


@dataclass(slots=True)
class _Look:
    """How a name is now."""

    value: Any
    record: Sent
    changed: bool
    pickled: Pickled | None = None
    is_theirs: bool = False  # the ranks have changed it in place: it is not sent


@dataclass(slots=True)
class _Plan:
    """Follows names to the names that they need, and decides what goes."""

    _table: NameTable
    _ranks: frozenset[int]
    _hidden: Mapping[str, Any] = field(default_factory=dict)
    _chains: frozenset[tuple[str, ...]] = frozenset()
    _gathered: Container[str] = ()
    _is_setup: bool = False
    _looks: dict[str, _Look] = field(default_factory=dict)
    _forced: frozenset[str] = frozenset()
    _asked_for: list[str] = field(default_factory=list)
    _notices: list[str] = field(default_factory=list)
    _big: list[str] = field(default_factory=list)

    @property
    def _names(self) -> dict[str, Any]:
        return self._table.namespace

    # --- which names ----------------------------------------------------------------------

    # From the names that the cell uses to those that their functions and classes use, as far as
    # these are the notebook's: a name that workers own, or have of themselves, ends the way.

    def follow(self, names: Iterable[str]) -> None:
        """Look at these names, and at those that their functions need, as far as they go."""
        waiting = sorted(names, reverse=True)
        while waiting:
            name = waiting.pop()
            if name in self._names and name not in self._looks and self._is_ours(name):
                look = self._looks[name] = self._look(name)
                waiting += sorted(look.record.needs, reverse=True)

    def follow_calls(self) -> None:
        """Look at what functions on the ranks use: the cell that calls them may not name it.

        At what the notebook has bound again since it was sent, and at what is small and can have
        changed in place.
        """
        waiting, seen = [*self._table.in_functions], set[str]()
        while waiting:
            name = waiting.pop()
            record = self._table.record(name) if name in self._names else None
            if name in seen or record is None:
                continue
            seen.add(name)
            waiting += record.needs
            if name in self._gathered or self._table.ranks_that_own(name):
                continue
            value = self._names[name]
            is_fixed = is_atomic(value) or isinstance(value, types.FunctionType)
            may_differ = record.size <= SMALL and not is_fixed
            if may_differ or self._table.is_older(name, self._ranks):
                try:
                    self.follow([name])
                except VariableNotSent:  # the cell itself does not use it
                    self._note(name, f"`{name}` {OLD_IN_FUNCTIONS}")

    def force(self, names: Collection[str]) -> None:
        """Ship these whatever the table says; then follow what they need."""
        self._forced = frozenset(names)
        for name in names:
            look = self._looks[name] = self._look(name)
            look.changed = True
        for look in [*self._looks.values()]:
            self.follow(look.record.needs)

    def _is_ours(self, name: str) -> bool:
        """Return True if the notebook's value of a name is for the workers; note why not."""
        value = self._names[name]
        if SYSTEM_NAMES.fullmatch(name) or self._hidden.get(name, _MISSING) is value:
            return False
        if name in self._gathered:
            last = self._table.record(name)
            has_pushed = last and last.identity and last.identity.is_still(value)
            if last and not has_pushed:  # ranks have another one of before
                self._note(name, f"`{name}` was gathered: the cell uses the ranks' own")
            return False
        if name in WORKERS_OWN or name in WORKERS_MODULES:
            is_module = isinstance(value, types.ModuleType)
            if not (is_module and value.__name__ == WORKERS_MODULES.get(name)):
                own = WORKERS_MODULES.get(name, "its own")
                self._note(name, f"Your notebook's `{name}` was ignored: each worker has {own}")
                return False
            if not self._submodules(name, value):
                return False
        owners = self._table.ranks_that_own(name)
        without = self._ranks - owners - self._table.ranks_that_have(name)
        if self._table.changed_since(name)[0]:
            self._asked_for.append(name)
        elif owners and without:
            self._note(name, self._missing_text(name, owners, without))
        return not owners

    def _missing_text(self, name: str, owners: frozenset[int], without: frozenset[int]) -> str:
        exists, copy = "exists" if len(owners) == 1 else "exist", f"%dist_sync {name} --from"
        older = without.intersection(self._table.ranks_with(name))
        if older:
            have = f"{name_ranks(older)} {'has' if len(older) == 1 else 'have'}"
            to = f"{min(owners)} -r {format_ranks(older)}"
            return f"`{name}` is {name_ranks(owners)}'s own, {have} an older one: `{copy} {to}`"
        where = f"{exists} on {name_ranks(owners)} but not on {name_ranks(without)}"
        return f"`{name}` {where}: `{copy} {min(owners)}`"

    def _note(self, name: str, notice: str) -> None:
        """Say it, once until the notebook binds the name again."""
        if self._table.is_first_notice(name):
            self._notices.append(notice)

    # --- how they are ---------------------------------------------------------------------

    # A name goes where ranks lack this version of its value.  To know the version it is pickled
    # as a sketch: buffers stay where they are, and what is on a device is not copied from there.

    def _look(self, name: str) -> _Look:
        value, last = self._names[name], self._table.record(name)
        pickled = None
        if is_atomic(value):
            record = Sent(atomic_version(value), Identity(value))
        elif isinstance(value, types.ModuleType):
            record = self._record_of_module(name, value, last)
        elif (
            last
            and isinstance(last.version, Identity)
            and last.version.is_unchanged(value)
            and self._ranks <= self._table.ranks_that_have(name, last.version)
        ):
            record = last  # it was too big to look at; that again would show nothing new
        else:
            pickled = self._pickle({name: value}, sketch=True)
            record = _record_of(value, pickled)
        has_it = self._ranks <= self._table.ranks_that_have(name, record.version)
        in_full = record is not last and (pickled is None or is_compared_whole(pickled))
        if has_it and not in_full and self._table.is_first_notice(name):
            self._notices.append(
                f"`{name}` was taken for unchanged: it is too big to be compared as a whole; "
                f"`%dist_push {name}` sends it"
            )
        return _Look(value, record, self._is_setup or not has_it, pickled)

    def _record_of_module(self, name: str, module: types.ModuleType, last: Sent | None) -> Sent:
        submodules = self._submodules(name, module)
        match last.version if last else None:
            case ("module", known, frozenset(before)) if known == module.__name__:
                submodules |= before
        return Sent(("module", module.__name__, submodules), Identity(module))

    def _submodules(self, name: str, module: types.ModuleType) -> frozenset[str]:
        """Return modules that the cell reaches through this one: `xml` alone has no `xml.dom`."""
        found = set()
        for chain in self._chains:
            path = module.__name__
            for part in chain[1:] if chain[0] == name else ():
                path = f"{path}.{part}"
                if path not in sys.modules:
                    break
                found.add(path)
        return frozenset(found)

    def _pickle(self, values: dict[str, Any], *, sketch: bool = False) -> Pickled:
        try:
            return pickle(values, self._names, sketch=sketch)
        except PICKLING_ERRORS as problem:
            fails = fails_in(self._names)
            for name in values:
                if fails(self._names[name]):
                    found = blame(name, self._names[name], fails, problem)
                    raise VariableNotSent(name, *found) from problem
            raise

    # --- what belongs together ------------------------------------------------------------

    # Sent apart, an object that two names share would become two objects on the workers.  So a
    # changed name takes along the names that share objects with it, by their sketches: a group.
    # Whether a rank has all of a group, or has changed it, is asked of the whole group.

    def shipment(self) -> Shipment:
        """Pack what changed, with what shares objects with it, in one pickle."""
        plain = {
            name: Import(look.value, look.record.version[2])  # type: ignore[index]
            if isinstance(look.value, types.ModuleType)
            else look.value
            for name, look in self._looks.items()
            if look.changed and look.pickled is None
        }
        groups = self._groups()
        self._say_changed()
        values = {name: self._looks[name].value for group in groups for name in group}
        if not plain and not values:
            return Shipment(tuple(self._notices))
        names = (*plain, *values)
        pickled = self._looks[names[0]].pickled if len(names) == 1 else None
        if pickled is None or pickled.is_sketch:
            pickled = self._pickle({**plain, **values})
        if pickled.size >= BIG:
            self._big.append(self._big_text(pickled.size, values))
        stays = self._stays(groups)
        return Shipment(
            names=names,
            frames=pickled.frames,
            notices=tuple(self._notices),
            records={name: self._looks[name].record for name in names},
            replaces=self._replaces(values, stays),
            stays=stays,
            big=tuple(self._big),
        )

    def _big_text(self, size: int, names: Collection[str]) -> str:
        """Write `corpus (191 MiB) to 4 ranks`, with the names that make up most of it."""
        looks = {name: self._looks[name].pickled for name in names}
        heavy = [name for name, look in looks.items() if look and look.size >= BIG // 2] or names
        blame = [f", most of it in {path}" for path in map(self._heaviest, heavy) if path]
        to = count(len(self._ranks), "rank")
        return f"{', '.join(heavy)} ({size_text(size)}{''.join(blame)}) to {to}"

    def _replaces(
        self, names: Iterable[str], stays: Mapping[int, frozenset[str]]
    ) -> dict[str, frozenset[int]]:
        """Say what would be taken from which ranks; of definitions the notebook's are wanted."""
        found: dict[str, frozenset[int]] = {}
        for name in names:
            if name in self._forced:
                continue
            if isinstance(self._looks[name].value, type | types.FunctionType):
                continue
            ranks = self._table.holders(name) & self._ranks
            if self._is_setup:  # new workers get the notebook's, whatever these ranks have done
                ranks -= {rank for rank, kept in stays.items() if name in kept}
            if ranks:
                found[name] = ranks
        return found

    def _stays(self, groups: list[list[str]]) -> dict[int, frozenset[str]]:
        """Say what ranks have as it is now, with all that shares objects with it."""
        found: dict[int, frozenset[str]] = {}
        for group in groups:
            now = {name: self._looks[name].record.version for name in group}
            have = (self._table.ranks_that_have(name, version) for name, version in now.items())
            for rank in self._ranks.intersection(*have):
                found[rank] = found.get(rank, frozenset()).union(group)
        return found

    def _groups(self) -> list[list[str]]:
        """Group the changed names that were pickled, each with those that share objects with it."""
        changed = [name for name, look in self._looks.items() if look.changed and look.pickled]
        if not any(self._looks[name].record.holds_objects for name in changed):
            return [[name] for name in changed]
        self._look_at_others_with_objects()
        self._look_at_theirs()
        candidates = [name for name, look in self._looks.items() if look.pickled]
        if len(candidates) == 1:  # to know what it holds takes longer than to pickle it
            return [changed]
        groups: list[list[str]] = []
        for name in changed:
            if not any(name in group for group in groups):
                groups.append(self._connected(name, candidates))
        groups = [group for group in groups if not self._is_held_back(group, changed)]
        for group in groups:
            for look in (self._looks[name] for name in group if name not in changed):
                if look.pickled:  # It may have changed since a cell last used it.
                    look.record = _record_of(look.value, look.pickled)
            if again := [f"`{name}`" for name in group if name not in changed]:
                because = ", ".join(f"`{name}`" for name in group if name in changed)
                self._big.append(f"{', '.join(again)} again: shares objects with {because}")
        return groups

    def _look_at_others_with_objects(self) -> None:
        for name in self._table.holding_objects():
            if name not in self._looks and self._is_ours(name):
                value = self._names[name]
                # This cell does not use it; the one that does will say why it cannot be sent.
                with suppress(*PICKLING_ERRORS):
                    pickled = pickle({name: value}, self._names, sketch=True)
                    record = self._table.record(name) or _record_of(value, pickled)
                    self._looks[name] = _Look(value, record, changed=False, pickled=pickled)

    def _connected(self, name: str, candidates: list[str]) -> list[str]:
        group, objects = [name], self._shared(name)
        while more := [
            each
            for each in candidates
            if each not in group and not objects.isdisjoint(self._shared(each))
        ]:
            group += more
            objects = objects.union(*map(self._shared, more))
        return group

    def _shared(self, name: str) -> frozenset[int]:
        pickled = self._looks[name].pickled
        return pickled.shared if pickled else frozenset()

    # --- what ranks have changed in place ---------------------------------------------------

    # It is theirs, as what they have bound; and what shares objects with it stays here too: it
    # would bring its own copy of these, or take theirs along.

    def _look_at_theirs(self) -> None:
        for name in self._table.changed_names():
            if name not in self._looks and name in self._names:
                with suppress(VariableNotSent, *PICKLING_ERRORS):
                    look = self._looks[name] = self._look(name)
                    look.changed, look.is_theirs = False, True

    def _is_held_back(self, group: list[str], changed: list[str]) -> bool:
        """Return True if a group cannot go, and say why; UsageError where it was asked for."""
        theirs = [name for name in group if self._looks[name].is_theirs]
        for name in group if theirs else ():
            text = (
                f"{self._done_there(theirs[0])}; `{name}` shares objects with it and was not "
                f"sent: `%dist_push {' '.join([name, *theirs])}` sends them"
            )
            if name in self._forced:
                raise UsageError(f"`%dist_push {name}`: {text}.")
            if name in changed:
                self._note(name, text)
        return bool(theirs)

    def _say_changed(self) -> None:
        """Say of what the cell uses why the ranks keep theirs, where that makes a difference."""
        for name in self._asked_for:
            ranks, version = self._table.changed_since(name)
            without = self._ranks.difference(self._table.ranks_with(name))
            done = self._done_there(name)
            if without:
                verb = "does" if len(without) == 1 else "do"
                copy = f"`%dist_sync {name} --from {min(ranks)}` copies it"
                send = f"`%dist_push {name}` sends the notebook's"
                lack = f"{name_ranks(without)} {verb} not have it"
                self._note(name, f"{done}; {lack}: {copy}, {send}")
            elif not self._table.was_noticed(name):
                self._look_at_theirs()
                if name not in self._looks or self._looks[name].record.version == version:
                    continue
                own = self._shared(name)
                theirs = [each for each, look in self._looks.items() if look.is_theirs]
                shares = (each for each in theirs if own & self._shared(each))
                together = [*dict.fromkeys((name, *shares))]
                it = "it" if len(together) == 1 else "them"
                push = f"`%dist_push {' '.join(together)}` sends {it}"
                gather = f"`%dist_gather {name}` brings theirs"
                self._note(name, f"{done}; the notebook's change was not sent: {push}, {gather}")

    def _done_there(self, name: str) -> str:
        """Write `model was trained on the ranks since it was sent`."""
        ranks, _ = self._table.changed_since(name)
        verb = "trained" if kind_of(self._names[name]) <= OPTIMIZER else "changed"
        where = "the ranks" if {*ranks} >= self._ranks else name_ranks(ranks)
        return f"{name} was {verb} on {where} since it was sent"

    # --- what to say ----------------------------------------------------------------------

    def _heaviest(self, name: str) -> str:
        """Find the variable of a function, or of a class, that makes up most of it."""
        value = self._looks[name].value
        if not callable(value):
            return ""
        size, heaviest = 0, ""
        for step, part in parts(value):
            with suppress(*PICKLING_ERRORS):  # it was left out by what holds it
                found = pickle(part, self._names, sketch=True).size
                if found > size:
                    size, heaviest = found, name + step
        return heaviest if size >= BIG // 2 else ""


def _record_of(value: Any, pickled: Pickled) -> Sent:
    identity = Identity(value)
    # The buffers are looked at in place; what is in the pickle itself has to be pickled.
    too_big = memoryview(pickled.frames[0]).nbytes > PICKLE_LIMIT
    version = identity if too_big else content_version(pickled)
    holds_objects = not isinstance(value, type)  # which another name may share
    if isinstance(value, types.FunctionType):
        holds_objects = value.__closure__ is not None or value.__defaults__ is not None
    return Sent(version, identity, pickled.needs, holds_objects, size=pickled.size)


# --- how a value looked when it was last shipped, to find whether it has changed ------------------

PICKLE_LIMIT = 64 << 20
"""Up to this many bytes of Python objects are pickled for each cell that uses them."""


def atomic_version(value: Any) -> tuple[str, str]:
    """Return what differs whenever the value of an atomic object does."""
    return type(value).__name__, repr(value)
