"""Forgets the names of a program on a rank, so that the next program can use the same workers.

The ranks import this module, so that the programs do not see what it keeps.
"""

from __future__ import annotations

from typing import Any

_kept: dict[str, Any] = {}


def keep(names: dict[str, Any]) -> None:
    """Keep the names that the namespace of a rank has now."""
    _kept.update(names)


def forget(names: dict[str, Any]) -> bool:
    """Delete all names that were not kept; return False if a kept name has another object now.

    On a new worker, which has kept no names, delete none and return False.
    """
    if not _kept:
        return False
    for name in {*names} - {*_kept}:
        del names[name]
    return all(names.get(name) is _kept[name] for name in _kept if name[0] != "_")
