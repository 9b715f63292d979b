"""The source of notebook cells, which follows functions to the process that runs them.

There it goes where `inspect` and tracebacks look for it, with the number of the cell
where IPython looks for that.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CellSource:
    """A cell as it was run: its text, and the number that IPython showed beside it."""

    text: str
    number: int | None


def cell_source(filename: str) -> CellSource | None:
    """The cell that was compiled under this file name; None if it was a real file."""
    # Without a modification time: put there by whoever compiled it, not read from disk.
    match linecache.cache.get(filename):
        case (_, None, list(lines), _):
            return CellSource("".join(lines), _cell_numbers().get(filename))
        case _:
            return None


def keep_cell_sources(sources: dict[str, CellSource]) -> None:
    """Make cells of another process known to this one, by file name."""
    numbers = _cell_numbers()
    for filename, cell in sources.items():
        lines = cell.text.splitlines(keepends=True)
        linecache.cache[filename] = (len(cell.text), None, lines, filename)
        if cell.number is not None:
            numbers[filename] = cell.number


def _cell_numbers() -> MutableMapping[str, int]:
    """IPython's table of numbers by file name; a new one where IPython is not running."""
    # Not imported: a process without it must not pay for it.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    # Since IPython 8; older ones have the number in the file name.
    numbers: MutableMapping[str, int] = getattr(
        getattr(shell, "compile", None), "_filename_map", {}
    )
    return numbers
