"""What the last line of a cell gave on each rank: it stays there until it is asked for."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, ValuesView
from typing import Any

from nbdist.words import name_ranks

Bring = Callable[[tuple[int, ...]], Mapping[int, Any]]
"""Brings the values of these ranks."""


class LastValues(Mapping[int, Any]):
    """By rank; each is brought once, and all that are missing together where all are wanted."""

    def __init__(self, ranks: Iterable[int], bring: Bring) -> None:
        self._ranks = tuple(ranks)
        self._bring = bring
        self._here: dict[int, Any] = {}

    def __repr__(self) -> str:
        brought = f"those of {name_ranks(self._here)} are here" if self._here else "none is here"
        return f"<LastValues of {name_ranks(self._ranks)}, {brought}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)

    def __getitem__(self, rank: int) -> Any:
        if rank not in self._ranks:
            raise KeyError(rank)
        self._want(rank)
        return self._here[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    def values(self) -> ValuesView[Any]:
        """Bring them all."""
        self._want(*self._ranks)
        return super().values()

    def items(self) -> ItemsView[int, Any]:
        """Bring them all."""
        self._want(*self._ranks)
        return super().items()

    def _want(self, *ranks: int) -> None:
        if missing := tuple(rank for rank in ranks if rank not in self._here):
            self._here.update(self._bring(missing))
