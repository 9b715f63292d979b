"""What the notebook has sent to this worker: whether it has been changed in place since.

`Namespace` has one.  Nothing here keeps a value alive.
"""

from __future__ import annotations

import hashlib
import mmap
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbdist.values.identity import Identity, is_atomic
from nbdist.values.payload import size_of
from nbdist.values.pickling import digest_of, pickle

READ_MOST = 4 << 20
"""Bytes of a value that are read when it arrives; of a bigger one it is asked later which pages
have been written to."""

DEFINITIONS = (types.FunctionType, type, types.ModuleType)
"""What is not looked at: they are the notebook's, which sends them when they change."""


@dataclass(frozen=True, slots=True)
class _Mapped:
    """Memory that no one has written to in this process."""

    address: int
    size: int
    edges: tuple[str, ...]


_Part = str | _Mapped


class Received:
    """Knows how each value was when it was bound."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._known: dict[str, tuple[Identity, tuple[_Part, ...] | None]] = {}

    def __repr__(self) -> str:
        return f"<Received {sorted(self._known)}>"

    def note(self, names: Iterable[str]) -> None:
        """Remember how these are now, which have just been bound."""
        for name in names:
            value = self._names[name]
            self._known.pop(name, None)
            if not (is_atomic(value) or isinstance(value, DEFINITIONS)):
                self._known[name] = Identity(value), self._parts(value)

    def changed(self, names: Iterable[str]) -> frozenset[str]:
        """Return those that have been changed, or bound to something else, since they came.

        What could not be looked at then counts as unchanged.
        """
        return frozenset(name for name in names if self._is_changed(name))

    def _is_changed(self, name: str) -> bool:
        if name not in self._known or name not in self._names:
            return False
        value, (identity, before) = self._names[name], self._known[name]
        if not identity.is_still(value):
            return True
        return before is not None and not self._is_as(before, value)

    def _is_as(self, before: tuple[_Part, ...], value: Any) -> bool:
        if any(isinstance(part, _Mapped) and _are_written(part) for part in before):
            return False
        return self._parts(value) == before

    def _parts(self, value: Any) -> tuple[_Part, ...] | None:
        """Describe a value by its pickle and the memory beside it; None where it has none."""
        try:
            pickled = pickle(value, self._names, sketch=True)
        except Exception:  # noqa: BLE001 (a user's __reduce__ can raise anything)
            return None
        first, *buffers = (memoryview(frame).cast("B") for frame in pickled.frames)
        head = hashlib.blake2b(first, digest_size=16)
        if pickled.is_sketch:
            head.update(repr(pickled.versions).encode())
        is_big = size_of(pickled.frames) > READ_MOST
        return head.hexdigest(), *(_part_of(each, is_big=is_big) for each in buffers)


def _part_of(view: memoryview, *, is_big: bool) -> _Part:
    if not is_big:
        return digest_of(view)
    mapped = _Mapped(*_place(view), ())
    if _are_written(mapped):
        return digest_of(view)
    return _Mapped(mapped.address, mapped.size, (*map(digest_of, edges(view, mapped.address)),))


def _place(view: memoryview) -> tuple[int, int]:
    return np.frombuffer(view, np.uint8).__array_interface__["data"][0], view.nbytes


def _are_written(part: _Mapped) -> bool:
    try:
        return are_own(part.address, part.size)
    except OSError:
        return True


# --- whether this process has written to memory that it maps from others ----------------------


_PRESENT, _SWAPPED, _OF_A_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))
"""Bits of `/proc/PID/pagemap`, which every process may read for itself; proc_pid_pagemap(5)."""


def are_own(address: int, size: int) -> bool:
    """Say whether any page that lies wholly in this memory is this process's own.

    So it is once written to, and from the start where the memory is no file's.  Raises OSError
    where the kernel does not say.
    """
    first, last = -(-address // mmap.PAGESIZE), (address + size) // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb", buffering=0) as pages:
        pages.seek(8 * first)
        found = np.frombuffer(pages.read(8 * max(0, last - first)), np.uint64)
    if len(found) < last - first:
        raise OSError("the kernel says nothing of these pages")
    is_there = (found & (_PRESENT | _SWAPPED)) != 0
    return bool((is_there & ((found & _OF_A_FILE) == 0)).any())


def edges(view: memoryview, address: int) -> tuple[memoryview, memoryview]:
    """Return what lies before the first whole page, and after the last one."""
    before = -address % mmap.PAGESIZE
    after = (address + view.nbytes) % mmap.PAGESIZE
    return view[:before], view[max(before, view.nbytes - after) :]
