"""Which rank has which name: one table of a world.

A name is the notebook's until a task binds it on the workers; then it is theirs until the
notebook binds it again.  What was imported on a rank is not lost with it: it is imported again.
Nothing here keeps a big value alive.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Hashable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from nbdist.errors import UsageError
from nbdist.output.events import Done
from nbdist.values.payload import OTHER, Identity, is_atomic, kind_of

WORKERS_OWN = frozenset({"rank", "world_size", "local_rank", "device"})
"""Names that every worker binds to its own from its start."""

WORKERS_MODULES = {"torch": "torch", "dist": "torch.distributed"}
"""Modules that every worker has imported from its start, by the names that it has them under."""

MOST_NAMES = 6  # names that a message lists before it only counts the others

_NOTHING = type("_Nothing", (), {})  # stands for the value of a name that the notebook lacks
_OF_ANOTHER = "of another notebook"  # the version of what that has sent


@dataclass(frozen=True, slots=True)
class Sent:
    """The notebook's value of a name as it was shipped; `identity` None: it is bound anew since.

    Not `is_last`: other ranks have got a later version.
    """

    version: Hashable
    identity: Identity | None
    needs: frozenset[str] = frozenset()
    holds_objects: bool = False
    is_last: bool = True
    size: int = 0


@dataclass(frozen=True, slots=True)
class BoundByWorker:
    """A task has bound the name on the rank; `import_path` says what it imported, None for nothing.

    `identity` is what the notebook had under the name then, None if it has bound it anew since.
    With a `version` the rank was sent that one, and this or another rank `has_changed` it in place.
    """

    identity: Identity | None
    import_path: str | None = None
    version: Hashable = None
    has_changed: bool = False
    kind: int = OTHER


@dataclass(frozen=True, slots=True)
class Missing:
    """A task had bound the name, but the rank is a new process; the rest as before."""

    import_path: str | None = None
    kind: int = OTHER


Entry = Sent | BoundByWorker | Missing
E = TypeVar("E", Sent, BoundByWorker)


class NameTable:
    """Which ranks have a name from the notebook, or bound it themselves, or have lost it."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self._ranks: dict[int, dict[str, Entry]] = {}
        self._noticed: set[str] = set()
        self._is_found = False
        self._bound_since: set[str] = set()
        self.in_functions: set[str] = set()
        """Names that functions and classes of cells on the ranks read when they are called."""

    def copy(self) -> NameTable:
        """Copy it as it is now; a notice that is given by one is given by both."""
        copied = copy(self)
        copied._ranks = {rank: dict(has) for rank, has in self._ranks.items()}
        return copied

    def found(
        self, bound: Mapping[int, Mapping[str, str | None]], ranks: Iterable[int] = ()
    ) -> None:
        """Note what tasks of another notebook have bound on the ranks, with what they imported."""
        self._is_found = True
        self._ranks = {
            rank: {
                name: BoundByWorker(Identity(self._value(name)), import_path)
                for name, import_path in bound.get(rank, {}).items()
            }
            for rank in {*ranks, *bound}
        }

    def sent(self, records: Mapping[str, Sent]) -> None:
        """Note that a task goes out with these: of older versions ranks lack the last."""
        for name, record in records.items():
            for has in self._ranks.values():
                entry = has.get(name)
                if isinstance(entry, Sent) and entry.version != record.version:
                    has[name] = replace(entry, is_last=False)

    def finished(self, rank: int, done: Done, received: Mapping[str, Sent]) -> None:
        """Note what a rank has received with a task, and what this has bound there."""
        has = self._ranks.setdefault(rank, {})
        has.update(received)
        for name in done.gone:
            has.pop(name, None)
        for name in done.bound:
            identity, kind = Identity(self._value(name)), done.kinds.get(name, OTHER)
            has[name] = BoundByWorker(identity, done.imported.get(name), kind=kind)

    def bound_in_notebook(self, names: Iterable[str]) -> None:
        """Note that a cell of the notebook may have bound these names: they are its own again.

        An object with an identity counts only if it is another one now: `if False: model = Net()`.
        """
        for name in self.namespace.keys() & set(names):
            self._noticed.discard(name)
            self._bound_since.add(name)
            value = self.namespace[name]
            for has in self._ranks.values():
                entry = has.get(name)
                if isinstance(entry, Sent | BoundByWorker) and not _is_kept(entry.identity, value):
                    has[name] = replace(entry, identity=None)

    def gathered(self, name: str, ranks: Collection[int] = ()) -> None:
        """Note that the notebook has bound what these ranks have; what any rank bound stays its."""
        identity = Identity(self._value(name))
        for rank, has in self._ranks.items():
            entry = has.get(name)
            if isinstance(entry, BoundByWorker) and (entry.identity or rank in ranks):
                has[name] = replace(entry, identity=identity)
            elif rank in ranks:
                has[name] = BoundByWorker(identity)

    def changed_in_place(self, changed: Mapping[int, Collection[str]]) -> None:
        """Note which ranks have changed what they were sent: it is theirs, as if bound there."""
        for name in {name for names in changed.values() for name in names}:
            self._noticed.discard(name)
            for rank in self.holders(name):
                entry, value = self._ranks[rank].get(name), self._value(name)
                self._ranks[rank][name] = BoundByWorker(
                    Identity(value),
                    version=entry.version if isinstance(entry, Sent) else _OF_ANOTHER,
                    has_changed=name in changed.get(rank, ()),
                    kind=kind_of(value),
                )

    def replaced(self, ranks: Iterable[int], made: Iterable[str] = ()) -> None:
        """Note that these ranks are new processes, without what the last cell `made` either."""
        kinds = {
            name: [own.kind for own in self._of(name, BoundByWorker).values()] for name in made
        }
        lost = {name: Missing(kind=min(found, default=OTHER)) for name, found in kinds.items()}
        for rank in ranks:
            had = self._ranks.get(rank, {})
            self._ranks[rank] = {**_losses([had]), **lost}

    def renumbered(self, was: Mapping[int, int], after: int) -> None:
        """Note that there are `after` ranks now; `was` has the old numbers of those that stay.

        The others are new, and lack what any rank has had.
        """
        losses, had = _losses(self._ranks.values()), self._ranks
        self._ranks = {
            rank: had.get(was[rank], {}) if rank in was else {**losses} for rank in range(after)
        }

    def taken_over(self, ranks: Iterable[int], now: NameTable) -> None:
        """Take over what these ranks have `now`, which were restarted since this was copied."""
        for rank in ranks:
            self._ranks[rank] = dict(now._ranks.get(rank, {}))

    def take_lost_imports(self, ranks: Iterable[int]) -> dict[int, dict[str, str]]:
        """Return, once, what had been imported where these ranks are new, and from where."""
        found: dict[int, dict[str, str]] = {}
        for rank in ranks:
            for name, entry in [*self._ranks.get(rank, {}).items()]:
                if isinstance(entry, Missing) and entry.import_path is not None:
                    found.setdefault(rank, {})[name] = entry.import_path
                    del self._ranks[rank][name]
        return found

    def ranks_that_own(self, name: str) -> frozenset[int]:
        """Find the ranks where a task bound this name itself; none when it is the notebook's."""
        return frozenset(self._current(name, BoundByWorker))

    def holders(self, name: str) -> frozenset[int]:
        """Find the ranks that this or another notebook has sent the object of this name."""
        is_known = name in self._bound_since or any(name in has for has in self._ranks.values())
        if self._is_found and not is_known:
            return frozenset(self._ranks)
        return frozenset(self._current(name, Sent))

    def is_older(self, name: str, ranks: Container[int]) -> bool:
        """Return True if one of these ranks has what the notebook sent before it bound it again."""
        sent, value = self._of(name, Sent).items(), self._value(name)
        had = (each.identity for rank, each in sent if rank in ranks)
        return not all(identity and identity.is_still(value) for identity in had)

    def changed_since(self, name: str) -> tuple[frozenset[int], Hashable]:
        """Find the ranks that have changed what they were sent, and which version that was."""
        own = {
            rank: each for rank, each in self._current(name, BoundByWorker).items() if each.version
        }
        ranks = frozenset(rank for rank, entry in own.items() if entry.has_changed)
        return ranks, next((entry.version for entry in own.values()), None)

    def changed_names(self) -> list[str]:
        """List the names of the notebook whose objects ranks have changed since they were sent."""
        return [name for name in self._all() if self.changed_since(name)[0]]

    def ranks_with(self, name: str) -> tuple[int, ...]:
        """Find the ranks that have something under this name, whosever it is."""
        return tuple(sorted({*self._of(name, Sent), *self._of(name, BoundByWorker)}))

    def import_path(self, name: str) -> str | None:
        """Return what the name was imported from on the ranks, None if it was not."""
        found = (entry.import_path for entry in self._of(name, BoundByWorker).values())
        return next(filter(None, found), None)

    def ranks_that_have(self, name: str, version: Hashable = None) -> frozenset[int]:
        """Find the ranks that have this version of the notebook's name, or its last one."""
        return frozenset(
            rank
            for rank, entry in self._of(name, Sent).items()
            if entry.identity and entry.is_last and version in (None, entry.version)
        )

    def record(self, name: str) -> Sent | None:
        """Return how the name was when it was last shipped to a rank that has it."""
        shipped = self._of(name, Sent).values()
        return max(shipped, key=lambda each: bool(each.identity and each.is_last), default=None)

    def holding_objects(self) -> list[str]:
        """List shipped names of the notebook that may share an object with another name."""
        owners = self.owners().items()
        here = [n for n, (owner, ranks) in owners if owner == "notebook" and ranks]
        records = {name: self.record(name) for name in here if name in self.namespace}
        return [name for name, record in records.items() if record and record.holds_objects]

    def owners(self) -> dict[str, tuple[Literal["notebook", "workers"], frozenset[int]]]:
        """List the names that were shipped or bound on workers: whose each is, and its ranks."""
        found: dict[str, tuple[Literal["notebook", "workers"], frozenset[int]]] = {}
        for name in self._all():
            if ranks := self.ranks_that_own(name):
                found[name] = ("workers", ranks)
            elif self.record(name) is not None:
                found[name] = ("notebook", self.ranks_that_have(name))
        return found

    def bound(self, rank: int) -> list[str]:
        """List the names that tasks have bound on this rank, without those that they imported."""
        has = self._ranks.get(rank, {}).items()
        return sorted(
            name for name, e in has if isinstance(e, BoundByWorker) and e.import_path is None
        )

    def lacking(self, ranks: Iterable[int]) -> str:
        """List what these ranks lack since they are new: `model, x and 3 more`; modules first."""
        lost = {
            name: entry.kind
            for rank in ranks
            for name, entry in self._ranks.get(rank, {}).items()
            if isinstance(entry, Missing) and entry.import_path is None
        }
        return list_names(lost, order=lost)

    def was_noticed(self, name: str) -> bool:
        """Return True if `is_first_notice` was asked for since it was last bound."""
        return name in self._noticed

    def is_first_notice(self, name: str) -> bool:
        """Return True, once, until the name is bound again."""
        is_first = name not in self._noticed
        self._noticed.add(name)
        return is_first

    def _all(self) -> Iterable[str]:
        return dict.fromkeys(name for has in self._ranks.values() for name in has)

    def _value(self, name: str) -> Any:
        return self.namespace.get(name, _NOTHING)

    def _of(self, name: str, kind: type[E]) -> dict[int, E]:
        """Return the entries of this kind that ranks have for a name."""
        found = ((rank, has.get(name)) for rank, has in self._ranks.items())
        return {rank: entry for rank, entry in found if isinstance(entry, kind)}

    def _current(self, name: str, kind: type[E]) -> dict[int, E]:
        """Return those of them that are of the object that the notebook has under the name."""
        found, value = self._of(name, kind).items(), self._value(name)
        return {
            rank: each for rank, each in found if each.identity and each.identity.is_still(value)
        }


def _is_kept(identity: Identity | None, value: Any) -> bool:
    """Return True if the notebook's value is what it was, as far as that can be seen."""
    return identity is not None and not is_atomic(value) and identity.is_still(value)


def _losses(had: Iterable[Mapping[str, Entry]]) -> dict[str, Missing]:
    """List what is lost with processes that had this; what one has made goes before an import."""
    bound = ((n, e) for has in had for n, e in has.items() if not isinstance(e, Sent))
    ordered = sorted(bound, key=lambda each: each[1].import_path is None)
    return {name: Missing(entry.import_path, entry.kind) for name, entry in ordered}


def check_are_free(names: Iterable[str], line: str) -> None:
    """Raise UsageError where one of these names is each worker's own: none can be put there."""
    if meant := [each for each in names if each in WORKERS_OWN or each in WORKERS_MODULES]:
        raise UsageError(f"{line}: each worker has its own `{meant[0]}`; choose another name.")


def list_names(
    names: Iterable[str], most: int = MOST_NAMES, order: Mapping[str, int] | None = None
) -> str:
    """Write `a, b and c`, or `a, b, c, d, e, f and 3 more`; those first that `order` says."""
    ordered = sorted(names, key=lambda name: ((order or {}).get(name, 0), name))
    shown, more = ordered[:most], len(ordered) - most
    if more > 0:
        return f"{', '.join(shown)} and {more} more"
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))
