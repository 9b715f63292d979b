"""The table of variables: which rank has which name, and from where.

Runs in the notebook's process; the present table of a world is `Engine.names`.  A name belongs to
the notebook until a task binds the name on a rank.  Then it belongs to that rank until the notebook
binds it again.  If a rank is replaced, its imports are repeated as far as possible.  The table
keeps no big value alive.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Container, Hashable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from nbdist.errors import UsageError
from nbdist.output.events import Done
from nbdist.values.payload import OTHER, Identity, is_atomic, kind_of
from nbdist.world.sent_objects import Parcel, SentObjects

WORKERS_OWN = frozenset({"rank", "world_size", "local_rank", "device"})
"""Names that every worker binds at its start to a value of its own."""

WORKERS_MODULES = {"torch": "torch", "dist": "torch.distributed"}
"""Modules that every worker imports at its start, by the names under which it binds them."""

MAX_LISTED_NAMES = 6  # names that a message lists before it only counts the others

_NO_NOTEBOOK_VALUE = type("_Nothing", (), {})  # stands for a value that the notebook lacks


@dataclass(frozen=True, slots=True)
class Sent:
    """A variable of the notebook as it was sent to a rank.

    `version` is different for different contents.  `token` identifies the object in the notebook
    and on ranks (`nbdist.values.states`); it is None for a value such as a number, of which a copy
    cannot be told from the original.  `identity` identifies the notebook's object; it is None once
    the notebook has assigned the variable again.  `needs` are the variables that functions in the
    value use, and `size` is in bytes.  `is_last` is False once the notebook has sent another object
    under the same name to any rank.
    """

    version: Hashable
    identity: Identity | None
    needs: frozenset[str] = frozenset()
    is_last: bool = True
    size: int = 0
    token: Hashable = None

    @property
    def bound_to(self) -> Hashable:
        """The token of the object that was sent, or the version of a value without a token."""
        return self.version if self.token is None else self.token


@dataclass(frozen=True, slots=True)
class BoundByWorker:
    """A variable of a rank that counts as bound by a task.

    `import_path` is None unless the task has imported the name.  It is the path of the import, or
    "" if importing again would not give the same object.  `identity` identifies the object that the
    notebook had under the name at that time; None if the notebook has assigned the name since.
    `kind` says whether the rank's object is a module, an optimizer, a tensor or another object.
    `was_sent` is True if the notebook had sent the variable to the rank before.
    """

    identity: Identity | None
    import_path: str | None = None
    kind: int = OTHER
    was_sent: bool = False


@dataclass(frozen=True, slots=True)
class Missing:
    """A variable that a new process of a rank lacks, and that tasks had bound or changed before.

    `import_path` and `kind` are as in `BoundByWorker`.
    """

    import_path: str | None = None
    kind: int = OTHER


NameEntry = Sent | BoundByWorker | Missing
E = TypeVar("E", Sent, BoundByWorker)


class NameTable:
    """For each rank, the names that were sent to it, that tasks have bound, and that it lacks.

    A rank lacks a variable that processes have lost, for example by a restart (`Missing`).
    `namespace` has the notebook's variables.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self.objects = SentObjects()
        self._ranks: dict[int, dict[str, NameEntry]] = {}
        self._had: dict[int, Collection[str]] = {}  # names that replaced ranks may have had
        self._clock = itertools.count()
        self._bound_at: dict[str, int] = {}
        self._deleted_there: set[str] = set()
        self._noticed: set[str] = set()
        self._is_attached = False
        self.assigned: set[str] = set()
        """Names that the notebook may have assigned since this table was made."""
        self.in_functions: set[str] = set()
        """Names that functions and classes, which cells have defined on ranks, read when called."""
        # Names that functions on ranks use, and whose value in the notebook is too big to be sent
        # with a cell that does not use the name itself (`too_big`), or cannot be sent (`failed`).
        # The user has got a notice about each name.  A name is removed when the notebook assigns it
        # again.
        self.too_big: set[str] = set()
        self.failed: set[str] = set()

    def copy(self) -> NameTable:
        """Return a copy, whose entries do not change with the entries of this table.

        The records of notices to the user, and of the notebook's assignments, stay shared.
        """
        copied = copy(self)
        copied._ranks = {rank: dict(has) for rank, has in self._ranks.items()}
        copied.objects = self.objects.copy()
        copied._deleted_there = set(self._deleted_there)
        return copied

    def record_attached(
        self, bound: Mapping[int, Mapping[str, str | None]], ranks: Iterable[int] = ()
    ) -> None:
        """Fill the table of a world that was taken over from another notebook.

        `bound` has by rank and name the import path of each name that tasks have bound, None for a
        name without an import.  `ranks` are all ranks, also those without such names.
        """
        self._is_attached = True
        self._ranks = {
            rank: {
                name: BoundByWorker(Identity(self._value(name)), import_path)
                for name, import_path in bound.get(rank, {}).items()
            }
            for rank in {*ranks, *bound}
        }

    def record_sent(self, records: Mapping[str, Sent]) -> int:
        """Record that a task with these variables is being sent.

        Returns the time of sending, which the caller passes to `record_finished`.  It is a number
        of a clock that counts events.
        """
        self._deleted_there.difference_update(records)
        for name, record in records.items():
            for has in self._ranks.values():
                entry = has.get(name)
                if isinstance(entry, Sent) and entry.bound_to != record.bound_to:
                    has[name] = replace(entry, is_last=False)
        return self.take_time()

    def take_time(self) -> int:
        """Return the present time of the clock that counts events, for `record_finished`."""
        return next(self._clock)

    def record_finished(
        self, rank: int, done: Done, received: Parcel, since: int | None = None
    ) -> None:
        """Record the names that a rank has received, bound or deleted in a finished task.

        `since` is the time that `record_sent` returned for the task.  A variable that the notebook
        has assigned after this time belongs to the notebook.
        """
        has = self._ranks.setdefault(rank, {})
        has.update(received.names)
        self.objects.record_finished(rank, received, done.dead, done.lost)

        def is_later(name: str) -> bool:
            return since is not None and self._bound_at.get(name, -1) > since

        for name in done.gone:
            has.pop(name, None)
        self._deleted_there.update(name for name in done.gone if not is_later(name))
        for name in done.bound:
            identity = None if is_later(name) else Identity(self._value(name))
            kind = done.kinds.get(name, OTHER)
            before = has.get(name)
            was_sent = getattr(before, "was_sent", isinstance(before, Sent))
            has[name] = BoundByWorker(identity, done.imported.get(name), kind, was_sent)
        for name in received.binds - done.bound if done.status == "ok" else ():
            # `Done.bound` lacks a variable to which the task has assigned the same object again.
            entry = has.get(name)
            is_unknown = isinstance(entry, Sent | BoundByWorker) and entry.identity is None
            if is_unknown and not is_later(name):
                path = entry.import_path if isinstance(entry, BoundByWorker) else None
                has[name] = BoundByWorker(Identity(self._value(name)), path, was_sent=True)

    def record_assigned(self, names: Iterable[str], surely: Container[str] = ()) -> None:
        """Record names that a cell of the notebook may have bound: they belong to the notebook now.

        `surely` has the names that the cell has certainly bound.  Another name, as in
        `if False: model = Net()`, counts only if the notebook now has another object under it.  But
        the name of a plain value, such as a number or a short text, always counts, because an equal
        new value cannot be told from the old value.  Names that were sent and that the notebook
        lacks now count too: the cell may have deleted them, for example by `%xdel` or `globals()`.
        """
        self.objects.runs += 1
        for name in {*names, *self._deleted()}:
            self._noticed.discard(name)
            self._deleted_there.discard(name)
            self.too_big.discard(name)
            self.failed.discard(name)
            self.assigned.add(name)
            self._bound_at[name] = next(self._clock)
            value = self._value(name)
            for has in self._ranks.values():
                entry = has.get(name)
                if not isinstance(entry, Sent | BoundByWorker):
                    continue
                if name in surely or not _is_kept(entry.identity, value):
                    has[name] = replace(entry, identity=None)
        self.objects.links.drop_unused()

    def _deleted(self) -> list[str]:
        sent = (name for rank in self._ranks for name in self._names_of_rank(rank, Sent))
        return [name for name in sent if name not in self.namespace]

    def pop_deleted(self, ranks: Collection[int]) -> dict[int, tuple[str, ...]]:
        """Return, by rank, variables that were sent to the rank and then deleted in the notebook.

        Each variable is returned once.  From then on the table has it as bound by the rank.
        """
        deleted = {}
        for rank in ranks:
            has = self._ranks.get(rank, {})
            names = [
                name
                for name, entry in has.items()
                if isinstance(entry, Sent) and entry.identity is None and name not in self.namespace
            ]
            for name in names:  # later removed by `Done.gone` if the rank deletes the name
                has[name] = BoundByWorker(Identity(_NO_NOTEBOOK_VALUE), was_sent=True)
            if names:
                deleted[rank] = tuple(names)
        return deleted

    def pop_forgotten(self, ranks: Collection[int]) -> dict[int, tuple[int, ...]]:
        """Return, by rank, the keys of objects that ranks can forget (`SentObjects.pop_forgotten`).

        From then on the table does not know whether ranks have changed such an object.  So if the
        notebook has assigned a variable again, and ranks have changed the object that was sent
        under the name or an object to which it leads, the variable now counts as bound by the rank.
        """
        deleted, changed = self.objects.collect_deleted(), self.objects.changed.keys()
        if deleted and changed:
            for rank, has in self._ranks.items():
                for name, entry in [*has.items()]:
                    if isinstance(entry, Sent) and entry.identity is None:
                        keys = self.objects.reach(rank, entry.bound_to)
                        if keys & deleted and keys & changed:
                            self.record_changed_value(name, rank)
        return self.objects.pop_forgotten(ranks)

    def record_gathered(self, name: str, ranks: Collection[int] = ()) -> None:
        """Record that the notebook has bound a name to values that it has fetched from workers.

        The notebook only has a copy.  So the name still belongs to the ranks to which it belonged,
        and now also to `ranks`.
        """
        identity = Identity(self._value(name))
        for rank, has in self._ranks.items():
            entry = has.get(name)
            if isinstance(entry, BoundByWorker) and (entry.identity or rank in ranks):
                has[name] = replace(entry, identity=identity)
            elif rank in ranks:
                has[name] = BoundByWorker(identity)

    def record_replaced(
        self,
        ranks: Iterable[int],
        made: Iterable[str] = (),
        brought: Mapping[int, Collection[str]] | None = None,
    ) -> None:
        """Record that ranks are new processes, and which variables they lack.

        A new process lacks the variables that tasks had bound on its rank.  It also lacks variables
        of the notebook that the old process had, if any rank has changed them.

        The other arguments are about the tasks in which ranks died.  `made` are names that these
        tasks have bound on any rank; all `ranks` lack them, too.  `brought` has by rank the names
        that were sent with the tasks; `record_lost` assumes that the old process had them.
        """
        kinds = {
            name: [entry.kind for entry in self._entries(name, BoundByWorker).values()]
            for name in made
        }
        lost = {name: Missing(kind=min(bound, default=OTHER)) for name, bound in kinds.items()}
        ranks = tuple(ranks)
        changed = {*self.changed_names()}
        for rank in ranks:
            had = self._ranks.get(rank, {})
            kept = had.keys() & changed
            changes = {name: Missing(kind=kind_of(self._value(name))) for name in kept}
            self._had[rank] = {*had, *(brought or {}).get(rank, ())}
            self._ranks[rank] = {**_losses([had]), **lost, **changes}
        self.objects.record_replaced(ranks)

    def record_lost(self, ranks: Iterable[int]) -> None:
        """Record the notebook's variables that new `ranks` lack: variables that ranks have changed.

        An added rank lacks all variables that ranks have changed.  A replaced rank lacks only those
        that its earlier process had, or that were sent with the tasks in which that process died.
        """
        kind = {name: kind_of(self._value(name)) for name in self.changed_names()}
        for rank in ranks:
            has, had = self._ranks.setdefault(rank, {}), self._had.pop(rank, kind.keys())
            for name in kind.keys() & had - has.keys():
                has[name] = Missing(kind=kind[name])

    def renumber(self, was: Mapping[int, int], after: int) -> None:
        """Record that ranks have new numbers, and that there are `after` ranks now.

        `was` has the old number of each rank that stays, by its new number.  All other ranks are
        new, and lack all variables that tasks have bound on any rank.
        """
        losses, had = _losses(self._ranks.values()), self._ranks
        self.objects.renumber(was, after)
        self._ranks = {
            rank: had.get(was[rank], {}) if rank in was else {**losses} for rank in range(after)
        }

    def copy_entries(self, ranks: Iterable[int], now: NameTable) -> None:
        """Take over the entries of restarted `ranks` from the table `now` into this older copy.

        The ranks were restarted after this table was copied from `now`, so its own entries
        describe processes that have ended.
        """
        for rank in ranks:
            self._ranks[rank] = dict(now._ranks.get(rank, {}))
            self.objects.known[rank] = dict(now.objects.known.get(rank, {}))

    def pop_lost_imports(self, ranks: Iterable[int]) -> dict[int, dict[str, str]]:
        """Return, by rank, the names that a new process has to import again, with their paths.

        Each name of a rank is returned once.
        """
        imports: dict[int, dict[str, str]] = {}
        for rank in ranks:
            for name, entry in [*self._ranks.get(rank, {}).items()]:
                if isinstance(entry, Missing) and entry.import_path is not None:
                    imports.setdefault(rank, {})[name] = entry.import_path
                    del self._ranks[rank][name]
        return imports

    def ranks_that_own(self, name: str) -> frozenset[int]:
        """Return the ranks where a task bound this name after the notebook last bound it."""
        return frozenset(self._current_entries(name, BoundByWorker))

    def holders(self, name: str) -> frozenset[int]:
        """Return the ranks that may have got an object under this name from any notebook.

        An earlier notebook of a world that was attached counts, too.
        """
        if self.is_of_earlier_notebook(name):
            return frozenset(self._ranks)
        sent = self._entries(name, Sent).items()
        return frozenset(rank for rank, entry in sent if entry.token is not None)

    def is_of_earlier_notebook(self, name: str) -> bool:
        """Return True if ranks can have this variable only from an earlier notebook.

        That is, this notebook took the world over, has not assigned the variable since, and no rank
        has an entry for it.
        """
        is_known = name in self.assigned or any(name in has for has in self._ranks.values())
        return self._is_attached and not is_known

    def record_sent_before(self, name: str) -> None:
        """Record that all ranks own a variable, which an earlier notebook has sent to them."""
        identity = Identity(self._value(name))
        for has in self._ranks.values():
            has[name] = BoundByWorker(identity, was_sent=True)

    def ranks_that_bound(self, name: str) -> frozenset[int]:
        """Return the ranks where a task has bound this name, and which still have that value.

        Unlike in `ranks_that_own`, a rank counts even if the notebook has bound the name again
        since.  It counts until the notebook sends the name to the rank.
        """
        return frozenset(self._entries(name, BoundByWorker))

    def is_older(self, name: str, ranks: Container[int]) -> bool:
        """Return True if any of `ranks` got an object that the notebook no longer has as `name`."""
        return any(rank in ranks for rank in self.ranks_with_older(name))

    def ranks_with_older(self, name: str) -> list[int]:
        """Return the ranks that got an object which the notebook no longer has under this name."""
        sent, value = self._entries(name, Sent).items(), self._value(name)
        return [
            rank
            for rank, entry in sent
            if entry.identity is None or not entry.identity.is_still(value)
        ]

    def changed_names(self) -> list[str]:
        """Return the variables of the notebook whose objects ranks are known to have changed."""
        return [name for name in self._all_names() if self.is_changed(name)]

    def is_changed(self, name: str) -> bool:
        """Return True if ranks are known to have changed an object of a variable that was sent."""
        changed = self.objects.changed
        sent = self._entries(name, Sent).items() if changed else ()
        return any(
            not changed.keys().isdisjoint(self.objects.reach(rank, entry.bound_to))
            for rank, entry in sent
        )

    def is_deleted_there(self, name: str) -> bool:
        """Return True if a rank has deleted a variable, and it was not sent or assigned since."""
        return name in self._deleted_there

    def is_missing(self, name: str, rank: int) -> bool:
        """Return True if a rank lacks a variable because the rank is a new process."""
        return isinstance(self._ranks.get(rank, {}).get(name), Missing)

    def assigned_again(self) -> list[str]:
        """Return the variables that were sent, and that the notebook has assigned or deleted since.

        A variable is left out if it is bound to the object that was sent.  A value without a token,
        such as a number, counts as assigned even if the new value is equal.
        """
        key_of = self.objects.links.key_of
        return [
            name
            for name in self._all_names()
            if any(
                each.identity is None and each.token != (..., key_of(self._value(name)))
                for each in self._entries(name, Sent).values()
            )
        ]

    def record_changed_value(self, name: str, rank: int) -> None:
        """Record that a rank has changed the object that was sent to it under `name`.

        The rank then counts as having bound the name itself.  Call this only for a name that the
        notebook has assigned since then, so that the notebook keeps the name.
        """
        self._ranks[rank][name] = BoundByWorker(None, was_sent=True)

    def ranks_that_assigned(self, name: str) -> frozenset[int]:
        """Return the ranks that own a name (`ranks_that_own`), and got it from the notebook before.

        On these ranks, a task has bound a variable of the notebook again.
        """
        entries = self._current_entries(name, BoundByWorker).items()
        return frozenset(rank for rank, each in entries if each.was_sent)

    def names_of_kind(self, kind: int) -> list[str]:
        """Return the variables that have a value of this kind, such as a module, on any rank."""

        def is_one(name: str) -> bool:
            bound = self._entries(name, BoundByWorker).values()
            sent = self._entries(name, Sent) and kind_of(self._value(name)) == kind
            return bool(sent) or any(entry.kind == kind for entry in bound)

        return sorted(filter(is_one, self._all_names()))

    def ranks_with(self, name: str) -> tuple[int, ...]:
        """Return the ranks that have a variable of this name, from the notebook or their own."""
        return tuple(sorted({*self._entries(name, Sent), *self._entries(name, BoundByWorker)}))

    def import_path(self, name: str) -> str | None:
        """Return a path from which any rank has imported a name; None if no path is known."""
        paths = (entry.import_path for entry in self._entries(name, BoundByWorker).values())
        return next(filter(None, paths), None)

    def ranks_that_have(self, name: str, token: Hashable = None) -> frozenset[int]:
        """Return the ranks to which the notebook has sent a certain object or value under a name.

        `token` is the `Sent.bound_to` of the object or value.  Without a token, return the ranks
        that have the object which was sent last, if the notebook has not assigned the name since.
        """
        return frozenset(
            rank
            for rank, entry in self._entries(name, Sent).items()
            if (entry.bound_to == token if token is not None else entry.identity and entry.is_last)
        )

    def record(self, name: str) -> Sent | None:
        """Return the record of the value that was sent under a name; None if none was sent.

        If ranks got different values, prefer the value that was sent last, unless the notebook has
        assigned the name since.
        """
        shipped = self._entries(name, Sent).values()
        return max(shipped, key=lambda each: bool(each.identity and each.is_last), default=None)

    def owners(self) -> dict[str, tuple[Literal["notebook", "workers"], frozenset[int]]]:
        """Return by name who owns the variable, and the ranks that have the owner's value."""
        owners: dict[str, tuple[Literal["notebook", "workers"], frozenset[int]]] = {}
        for name in self._all_names():
            if ranks := self.ranks_that_own(name):
                owners[name] = ("workers", ranks)
            elif self.record(name) is not None:
                owners[name] = ("notebook", self.ranks_that_have(name))
        return owners

    def bound(self, rank: int) -> list[str]:
        """Return the names that tasks have bound on this rank, without imported names."""
        has = self._ranks.get(rank, {}).items()
        return sorted(
            name for name, e in has if isinstance(e, BoundByWorker) and e.import_path is None
        )

    def theirs(self, rank: int) -> list[str]:
        """Return the names of a rank's variables that tasks have bound or changed, sorted.

        These are the names in `bound`, and names that were sent to the rank and whose objects any
        rank has changed.
        """
        sent = (name for name in self._names_of_rank(rank, Sent) if self.is_changed(name))
        return sorted({*self.bound(rank), *sent})

    def _names_of_rank(self, rank: int, kind: type[E]) -> list[str]:
        has = self._ranks.get(rank, {})
        return [name for name, entry in has.items() if isinstance(entry, kind)]

    def lacking_text(self, ranks: Iterable[int]) -> str:
        """Write the variables that new ranks lack, modules first: `model, a and x`."""
        lost = self._lacking_kinds(ranks)
        return list_names(lost, order=lost)

    def sources_of_lacking(self, ranks: Iterable[int]) -> dict[int, list[str]]:
        """Return the variables that new ranks lack, by the rank from which they can be copied.

        The source of a variable is the lowest rank that has it.  Variables that no rank has are
        left out.
        """
        sources: dict[int, list[str]] = {}
        for name in sorted(self._lacking_kinds(ranks)):
            if has := self.ranks_with(name):
                sources.setdefault(has[0], []).append(name)
        return sources

    def _lacking_kinds(self, ranks: Iterable[int]) -> dict[str, int]:
        # A new worker binds names such as `rank` itself, even if a cell had bound the name before.
        predefined = WORKERS_OWN | WORKERS_MODULES.keys()
        return {
            name: entry.kind
            for rank in ranks
            for name, entry in self._ranks.get(rank, {}).items()
            if isinstance(entry, Missing) and entry.import_path is None
            if name not in predefined
        }

    def is_first_notice(self, name: str) -> bool:
        """Return True at the first call since the notebook has bound the name.

        Callers use this to show a notice about a name only once.
        """
        is_first = name not in self._noticed
        self._noticed.add(name)
        return is_first

    def _all_names(self) -> Iterable[str]:
        return dict.fromkeys(name for has in self._ranks.values() for name in has)

    def _value(self, name: str) -> Any:
        return self.namespace.get(name, _NO_NOTEBOOK_VALUE)

    def _entries(self, name: str, kind: type[E]) -> dict[int, E]:
        """Return by rank the entries of this kind for a name."""
        entries = ((rank, has.get(name)) for rank, has in self._ranks.items())
        return {rank: entry for rank, entry in entries if isinstance(entry, kind)}

    def _current_entries(self, name: str, kind: type[E]) -> dict[int, E]:
        """Return by rank the entries of this kind, if the notebook has not bound the name since.

        An entry is returned if the notebook's value is still the object that `identity` of the
        entry identifies, or if the notebook still has no such variable.
        """
        entries, value = self._entries(name, kind).items(), self._value(name)
        return {
            rank: each for rank, each in entries if each.identity and each.identity.is_still(value)
        }


def _is_kept(identity: Identity | None, value: Any) -> bool:
    """Return True if the notebook's value counts as the object of `identity`, and is not atomic.

    An atomic value, such as a number, may have been assigned again.
    """
    return identity is not None and not is_atomic(value) and identity.is_still(value)


def _losses(had: Iterable[Mapping[str, NameEntry]]) -> dict[str, Missing]:
    """Return the names that a new process lacks because tasks have bound them on other processes.

    `had` has the table entries of each of these processes.  A name that one process has bound and
    another has imported counts as bound.
    """
    bound = ((n, e) for has in had for n, e in has.items() if not isinstance(e, Sent))
    ordered = sorted(bound, key=lambda each: each[1].import_path is None)
    return {name: Missing(entry.import_path, entry.kind) for name, entry in ordered}


def check_are_free(names: Iterable[str], line: str) -> None:
    """Raise UsageError if each worker binds one of the names by itself, such as `rank`.

    `line` is the command for the message.
    """
    if meant := [each for each in names if each in WORKERS_OWN or each in WORKERS_MODULES]:
        raise UsageError(f"{line}: each worker has its own `{meant[0]}`; choose another name.")


def list_names(
    names: Iterable[str], limit: int = MAX_LISTED_NAMES, order: Mapping[str, int] | None = None
) -> str:
    """Write `a, b and c`, or `a, b, c, d, e, f and 3 more`; names with a low `order` first."""
    ordered = sorted(names, key=lambda name: ((order or {}).get(name, 0), name))
    shown, more = ordered[:limit], len(ordered) - limit
    if more > 0:
        return f"{', '.join(shown)} and {more} more"
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))
