"""Recognizes dicts, lists and instances that have not changed since their state was read.

`nbdist.values.scan` uses this file in the notebook.  Comparing an object's parts with its earlier
parts is much faster than reading the object's state again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from operator import attrgetter, is_, itemgetter
from typing import Any

from nbdist.values.links import LinkEntry
from nbdist.values.states import ATOMIC, MAX_PARTS, MAX_TEXT

NO_PARTS = "no parts"
"""The `sample` of the state of an object for which no `Parts` can be made.

The object has too many parts, or a part that is neither a plain value nor an object with a key.
This mark keeps scans from trying again."""

_key_of = attrgetter("key")


class Parts:
    """The parts that an object had when its state was read: keys or names, and values.

    If `entries_if_same` finds the same parts now, the object's state has not changed.  A part that
    is a plain value is stored itself, since it cannot change.  For a part that is an object with a
    key, the key is stored.  For an empty table, which has no key, the position and the class are
    stored.
    """

    __slots__ = ("_count", "_empty_kinds", "_fixed", "_keys", "_kind", "_pickers")

    def __init__(
        self,
        kind: type,
        parts: Sequence[Any],
        keys: Mapping[int, int],
        empty: Set[int],
    ) -> None:
        """Record the parts of an object of class `kind`, and the `keys` of parts by position.

        `empty` has the positions of empty tables in `parts`.
        """
        self._kind, self._count, self._keys = kind, len(parts), [*keys.values()]
        fixed = (*(at for at in range(len(parts)) if at not in keys and at not in empty),)
        self._pickers = _picker(fixed), _picker((*keys,)), _picker((*sorted(empty),))
        self._fixed = self._pickers[0](parts)
        self._empty_kinds = (*map(type, self._pickers[2](parts)),)

    def entries_if_same(
        self, value: Any, parts: Sequence[Any], by_id: Mapping[int, LinkEntry]
    ) -> list[Any] | None:
        """Return the entries of the parts with keys, or None if any part may have changed.

        `parts` are the parts that `value` has now; they are compared with the parts that it had
        when its state was read.  `by_id` has the entries of objects with keys, by their ids.
        """
        if len(parts) != self._count or type(value) is not self._kind:
            return None
        pick_fixed, pick_with_key, pick_empty = self._pickers
        if not all(map(is_, pick_fixed(parts), self._fixed)):
            return None
        if self._empty_kinds:
            # Compare the classes of empty tables, not their identity: if a table was replaced by
            # another empty table, the object counts as unchanged.
            tables = pick_empty(parts)
            if (*map(type, tables),) != self._empty_kinds or any(tables):
                return None
            if not by_id.keys().isdisjoint(map(id, tables)):
                return None
        entries: list[Any] = [*map(by_id.get, map(id, pick_with_key(parts)))]
        if None in entries or [*map(_key_of, entries)] != self._keys:
            return None
        return entries


def parts_of(
    value: Any,
    parts: Sequence[Any],
    by_id: Mapping[int, LinkEntry],
    empty: Set[int],
) -> Parts | None:
    """Return the `Parts` of an object, or None if its parts do not allow this.

    Each part must be a plain value, an object with a key, or an empty table.  At most twice
    MAX_PARTS parts are allowed.  `by_id` has the entries of objects with keys, by their ids.
    `empty` has the positions of the empty tables in `parts`.
    """
    if len(parts) > 2 * MAX_PARTS:  # twice, as names and values both count here
        return None
    keys: dict[int, int] = {}
    for at, part in enumerate(parts):
        if at in empty or _is_fixed(part):
            continue
        if (entry := by_id.get(id(part))) is None:
            return None
        keys[at] = entry.key
    return Parts(type(value), parts, keys, empty)


def _is_fixed(part: Any) -> bool:
    """Return True if a part is a plain value that is not long, or a short tuple of such values."""
    kind = type(part)
    if kind is str or kind is bytes:
        return len(part) <= MAX_TEXT
    if kind is tuple:
        return len(part) <= MAX_TEXT and all(type(e) in ATOMIC and _is_fixed(e) for e in part)
    return kind in ATOMIC


@functools.lru_cache(1024)  # most instances of a class can use the same function
def _picker(positions: tuple[int, ...]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function that picks the parts at these positions from a list of parts."""
    if not positions:
        return lambda _: ()
    if positions == (*range(positions[0], positions[-1] + 1),):
        first, end = positions[0], positions[-1] + 1
        return lambda parts: parts[first:end]
    return itemgetter(*positions)
