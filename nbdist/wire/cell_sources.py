"""The source of notebook cells, which follows functions to the process that runs them.

There it goes where `inspect` and tracebacks look for it, with the number of the cell
where IPython looks for that.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CellSource:
    """A cell as it was run: its text, and the number that IPython showed beside it."""

    text: str
    number: int | None


def cell_source(filename: str) -> CellSource | None:
    """Find the cell that was compiled under this file name; None if it was a real file."""
    match linecache.cache.get(filename):
        # Without a time of modification: put there by what compiled it, not read from
        # disk.  IPython 7 gives one, of a file that is not there.
        case (_, time, list(lines), _) if time is None or not os.path.exists(filename):
            source = "".join(lines)
            return CellSource(source, _number_of(filename, source))
        case _:
            return None


def keep_cell_sources(sources: dict[str, CellSource]) -> None:
    """Make cells of another process known to this one, by file name."""
    numbers = cell_numbers()
    for filename, cell in sources.items():
        lines = cell.text.splitlines(keepends=True)
        linecache.cache[filename] = (len(cell.text), None, lines, filename)
        if cell.number is not None:
            numbers[filename] = cell.number


def function_name(name: str) -> str:
    """Name a function as people know it: IPython 7 calls a cell's own lines `<cell line: 1>`."""
    return "<module>" if name.startswith("<cell line: ") else name


def cell_numbers() -> MutableMapping[str, int]:
    """Return IPython's table of numbers by file name; a new one where there is none.

    IPython 8 and later have it in any process, IPython 7 in workers (worker/compat/ipython.py).
    Its other ways in are for names that it has made itself, and these are another process's.
    """
    numbers: MutableMapping[str, int]
    numbers = getattr(getattr(_shell(), "compile", None), "_filename_map", {})
    return numbers


def _number_of(filename: str, source: str) -> int | None:
    numbers = cell_numbers()
    if filename in numbers:
        return numbers[filename]
    # In a notebook with IPython 7, which remembers the cells alone.
    history = getattr(getattr(_shell(), "history_manager", None), "input_hist_parsed", [])
    same = (number for number in reversed(range(len(history))) if history[number] == source)
    return next(same, None)


def _shell() -> Any:
    """Return IPython's, where it runs, without importing it for that."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None
