"""Last values of cells whose results have a name in the notebook: as they were at the end.

Small ones come along with the end of the cell.  Big ones are pickled there and then, tensors of
a device copied to the CPU, since a later cell may change them, and device memory is scarce; the
copy stays in the worker until the notebook has read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ipykernel.displayhook import ZMQShellDisplayHook

from nbdist.values.shared_memory import Segment
from nbdist.words import size_text

MOST = 16
MOST_BYTES = 1 << 30
"""Of all copies that a rank keeps; the newest one stays, however big it is."""

REPLACED = f"is gone: a rank keeps the newest {MOST} big results, {size_text(MOST_BYTES)} in all"
CLEANED = "is gone: `%dist_memory --free` released it"


class NotingHook(ZMQShellDisplayHook):
    """A display hook that notes the last value of a cell, also that of `x;`, while asked to."""

    _is_noting = False
    _last: object = None

    def __call__(self, result: Any = None) -> None:
        """Show the value; called for the last expression of a cell."""
        if self._is_noting:
            self._last = result
        super().__call__(result)  # type: ignore[no-untyped-call]

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note values meanwhile."""
        self._is_noting, self._last = True, None
        try:
            yield
        finally:
            self._is_noting = False

    def take(self) -> object:
        """Return the value that was noted last, None for none, and hold it no longer."""
        last, self._last = self._last, None
        return last


class KeptValues:
    """Big last values by task, packed; in place of one that is no longer there says why."""

    def __init__(self) -> None:
        self._kept: dict[str, Segment | str] = {}

    def __repr__(self) -> str:
        return f"<KeptValues {len(self._segments)}, {size_text(self.size)}>"

    @property
    def _segments(self) -> dict[str, Segment]:
        return {of: each for of, each in self._kept.items() if isinstance(each, Segment)}

    @property
    def size(self) -> int:
        """How many bytes all of them take."""
        return sum(map(_size, self._segments.values()))

    def keep(self, task_id: str, value: Segment | str) -> None:
        """Keep a value, or why it cannot be had; the oldest ones make room."""
        self._kept[task_id] = value
        for of, segment in [*self._segments.items()][:-1]:
            if len(self._segments) <= MOST and self.size <= MOST_BYTES:
                break
            segment.close()
            self._kept[of] = REPLACED
        while len(self._kept) > 16 * MOST:
            self.let_go(next(iter(self._kept)))

    def find(self, task_id: str) -> Segment | str:
        """Return one, to be read before it is let go; or why it cannot be had."""
        return self._kept.get(task_id, REPLACED)

    def let_go(self, task_id: str) -> None:
        """Release a value that has been read."""
        if isinstance(found := self._kept.pop(task_id, None), Segment):
            found.close()

    def clean(self) -> None:
        """Release all of them."""
        for of, segment in self._segments.items():
            segment.close()
            self._kept[of] = CLEANED


def _size(segment: Segment) -> int:
    return sum(segment.ref.sizes)
