"""Warnings in a worker: with the cell's line that led to them, which is alike on all ranks.

Python says the file and the line in which a warning was raised; of a cell that is a name with a
process id, and of a library one that its user has never seen.
"""

from __future__ import annotations

import linecache
import re
import traceback
import warnings

from nbdist.values.definitions import cell_numbers

_PACKAGES = re.compile(r".*/(?:site|dist)-packages/")


def show_cell_lines() -> None:
    """Have Python word warnings so; where no cell's line led to one, as ever."""
    usual = warnings.formatwarning

    def formatwarning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        place = cell_place(filename, lineno)
        if place is None:
            return usual(message, category, filename, lineno, line)
        cell, number = place
        code = linecache.getline(cell, number).strip()
        where = "" if (cell, number) == (filename, lineno) else f"  ({_short(filename)}:{lineno})"
        head = f"Cell In[{cell_numbers()[cell]}], line {number}: {category.__name__}: {message}"
        return f"{head}\n  {code}{where}\n"

    warnings.formatwarning = formatwarning


def cell_place(filename: str, number: int) -> tuple[str, int] | None:
    """Find the cell's file and line that led to a warning; None where no cell's did."""
    cells = cell_numbers()
    if filename in cells:
        return filename, number
    for frame, line in traceback.walk_stack(None):
        if frame.f_code.co_filename in cells:
            return frame.f_code.co_filename, line
    return None


def _short(filename: str) -> str:
    return _PACKAGES.sub("", filename)
