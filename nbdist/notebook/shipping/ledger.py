"""What the workers of one world have from the notebook, and who owns which name.

The notebook's kernel keeps one ledger for a world.  The rules: a name is the
notebook's until a cell on the workers binds it; then it is theirs until the notebook
binds it again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nbdist.wire.identity import Identity, is_atomic

_NOTHING = type("_Nothing", (), {})
"""Stands for the value of a name that the notebook lacks."""


@dataclass(frozen=True, slots=True)
class Record:
    """One name as it is in a shipment."""

    version: Hashable
    identity: Identity
    needs: frozenset[str] = frozenset()
    holds_objects: bool = False


@dataclass(slots=True)
class _Shipped:
    record: Record
    ranks: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Theirs:
    identity: Identity
    ranks: set[int] = field(default_factory=set)


class Ledger:
    """Who has what, for as long as the workers live."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self._shipped: dict[str, _Shipped] = {}
        self._theirs: dict[str, _Theirs] = {}
        self._told: set[str] = set()

    # --- what happened ------------------------------------------------------------------

    def shipped(self, records: Mapping[str, Record], ranks: Iterable[int]) -> None:
        """Note that a cell with these names has reached these ranks."""
        for name, record in records.items():
            known = self._shipped.get(name)
            if known is None or known.record.version != record.version:
                # Ranks that are left out here have an older value.
                known = self._shipped[name] = _Shipped(record)
            known.record = record
            known.ranks.update(ranks)
            self._theirs.pop(name, None)

    def bound_on_workers(self, names: Iterable[str], ranks: Iterable[int]) -> None:
        """Note that a cell bound these names on these ranks: they are the workers' now."""
        ranks = set(ranks)
        for name in names:
            self._shipped.pop(name, None)
            before = self._theirs.get(name)
            identity = Identity(self.namespace.get(name, _NOTHING))
            self._theirs[name] = _Theirs(identity, ranks | (before.ranks if before else set()))

    def bound_in_notebook(self, names: Iterable[str]) -> None:
        """Note that a cell of the notebook may have bound these names: they are its own again.

        For an object with an identity of its own it counts only if it is another one now:
        a cell may not have come to `if False: model = Net()`.
        """
        for name in names:
            if name not in self.namespace:
                continue
            value = self.namespace[name]
            self._told.discard(name)
            shipped, theirs = self._shipped.get(name), self._theirs.get(name)
            if shipped and (is_atomic(value) or not shipped.record.identity.is_still(value)):
                shipped.ranks.clear()
            if theirs and (is_atomic(value) or not theirs.identity.is_still(value)):
                del self._theirs[name]

    def forget(self, ranks: Iterable[int] | None = None) -> None:
        """Note that these ranks (by default all) are new processes: they have nothing."""
        if ranks is None:
            self._shipped.clear()
            self._theirs.clear()
            self._told.clear()
            return
        gone = set(ranks)
        for shipped in self._shipped.values():
            shipped.ranks -= gone
        for name, theirs in [*self._theirs.items()]:
            theirs.ranks -= gone
            if not theirs.ranks:
                del self._theirs[name]

    # --- what is the case ---------------------------------------------------------------

    def ranks_that_own(self, name: str) -> frozenset[int]:
        """Find the ranks where a cell bound this name itself; none when it is the notebook's."""
        theirs = self._theirs.get(name)
        if theirs is None:
            return frozenset()
        if not theirs.identity.is_still(self.namespace.get(name, _NOTHING)):
            del self._theirs[name]
            return frozenset()
        return frozenset(theirs.ranks)

    def record(self, name: str) -> Record | None:
        """Return how the name was when it was last shipped to any rank."""
        shipped = self._shipped.get(name)
        return shipped.record if shipped else None

    def ranks_that_have(self, name: str, version: Hashable) -> frozenset[int]:
        """Find the ranks that have this version of the name."""
        shipped = self._shipped.get(name)
        current = shipped is not None and shipped.record.version == version
        return frozenset(shipped.ranks) if shipped and current else frozenset()

    def holding_objects(self) -> list[str]:
        """List shipped names of the notebook that may share an object with another name."""
        return [
            name
            for name, shipped in self._shipped.items()
            if shipped.record.holds_objects and shipped.ranks and name in self.namespace
        ]

    def owners(self) -> dict[str, tuple[Literal["notebook", "workers"], frozenset[int]]]:
        """List the names that were shipped or bound on workers: whose each is, and its ranks."""
        found: dict[str, tuple[Literal["notebook", "workers"], frozenset[int]]] = {}
        for name, shipped in self._shipped.items():
            found[name] = ("notebook", frozenset(shipped.ranks))
        for name in [*self._theirs]:
            if ranks := self.ranks_that_own(name):
                found[name] = ("workers", ranks)
        return found

    def tell_once(self, name: str) -> bool:
        """Say whether this is the first notice about this name since it was last bound."""
        new = name not in self._told
        self._told.add(name)
        return new

    def __repr__(self) -> str:
        owners = self.owners().values()
        ours = sum(1 for owner, _ in owners if owner == "notebook")
        return f"<Ledger {ours} names shipped, {len(owners) - ours} names of the workers>"
