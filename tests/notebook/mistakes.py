"""What people do wrong in their first hour, and what is said: one table for all front ends.

Each row is what is typed, and a part of what is said, all of it where a person sees it.  Where
several cells are typed the first ones go well, and the last is the mistake.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mistake:
    """What is typed, and what is said; `ename` is the class's name where it is an error."""

    cells: tuple[str, ...]
    said: tuple[str, ...]

    def __str__(self) -> str:
        return self.cells[-1].replace("\n", " ⏎ ")[:60]


def _row(cells: str | tuple[str, ...], *said: str) -> Mistake:
    return Mistake((cells,) if isinstance(cells, str) else cells, said)


AHEAD = (
    "%load_ext nbdist",
    "%%writefile broken.py\ndef f(:\n    pass",
    "%%writefile ends.py\nnext(iter([]))",
    "%%distributed -n 2\nimport os, time",
)
"""Cells that go well before any of these."""

PYTHON = (
    _row(
        "%%distributed\nit = iter([1]); next(it)\nnext(it)", "2 of 2 ranks failed", "StopIteration"
    ),
    _row("%%distributed --max-restarts 1\nnext(iter([]))", "restart 1 of 1", "StopIteration"),
    _row("%%distributed --timeout 60\nnext(iter([]))", "2 of 2 ranks failed", "StopIteration"),
    _row("%dist_run ends.py", "2 of 2 ranks failed", "StopIteration"),
    _row(("%%distributed --no-wait -o ended\nnext(iter([]))", "ended.wait()"), "StopIteration"),
    _row(
        "try:\n    get_ipython().run_cell_magic('distributed', '', 'next(iter([]))')\n"
        "except StopIteration as found:\n    print('caught', found.rank in (0, 1))",
        "caught True",
    ),
    _row("%%distributed\nimport broken", "SyntaxError: invalid syntax (broken.py, line 1)"),
    _row("%dist_run broken.py", "`broken.py` is no Python: line 1: invalid syntax"),
    _row('%%distributed\neval("1+")', "SyntaxError: invalid syntax (<string>, line 1)"),
    _row('%%distributed\nexec("if 1:\\nx")', "IndentationError: expected an indented block"),
    _row("%%distributed\nreturn 5", "Nothing has run on the workers. The last line of a cell is"),
    _row("%%distributed\nyield 5", "Nothing has run on the workers. `yield` belongs in a function"),
    _row("%%distributed\nif 1:\nx = 1", "x = 1", "expected an indented block", "Nothing has run"),
    _row("%%distributed\nx = 1\n  y = 2", "unexpected indent", "Nothing has run on the workers."),
    _row("%%distributed\nif 1:\n    x\n  y", "unindent does not match", "Nothing has run on"),
    _row("%%distributed\nprint 'a'", "Missing parentheses in call to 'print'", "Nothing has run"),
    _row("%%distributed\nprint((1)", "'(' was never closed", "Nothing has run on the workers."),
)
"""Code that is none, and iterators past their end."""

MISTAKES = PYTHON
