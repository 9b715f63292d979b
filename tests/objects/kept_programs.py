"""The programs of `kept_programs.txt`, which the oracle compares with a plain kernel.

The first programs have found faults.  The others were chosen from some thousand random programs, so
that as many pairs of kinds of statements as possible follow each other on the same object.

A program is a heading and its statements, as the oracle prints the smallest program that differs:

    # a list under two names
    notebook  a = [1]
    ranks     b = a
    notebook! a.append(2)
    ranks     b   # then describe a b

The word `notebook!` begins a change in the notebook of an object that the ranks have changed too.
"""

from __future__ import annotations

import ast
from pathlib import Path

from tests.objects.random_programs import HELPERS, HERE, NAMES, THERE, Step

KEPT = Path(__file__).with_suffix(".txt")
_TOLD = "   # then describe "
_SIDES = {"notebook": HERE, "notebook!": HERE, "ranks": THERE}


def programs() -> dict[str, list[Step]]:
    """Return the programs by their headings."""
    text = KEPT.read_text()
    found: dict[str, list[Step]] = {}
    for part in text.split("\n# ")[1:]:
        heading, *lines = part.strip("\n").split("\n")
        assert heading not in found, heading
        found[heading] = _steps(lines)
    return found


def _steps(lines: list[str]) -> list[Step]:
    texts: list[list[str]] = []
    for line in lines:
        if line[:10].strip():
            texts.append([line])
        else:
            texts[-1].append(line[10:])
    return [_step("\n".join(text)) for text in texts]


def _step(text: str) -> Step:
    word, source = text[:10].strip(), text[10:]
    source, _, told = source.partition(_TOLD)
    binds = tuple(sorted(_bound(source) & {*NAMES, *HELPERS}))
    return Step(
        _SIDES[word], source, binds, told=tuple(told.split()), conflicts=word == "notebook!"
    )


def _bound(source: str) -> set[str]:
    """Find the names that a statement binds or deletes."""
    tree = ast.parse(source)
    own = {each.name for each in tree.body if isinstance(each, ast.FunctionDef | ast.ClassDef)}
    names = (each for each in ast.walk(tree) if isinstance(each, ast.Name))
    return own | {each.id for each in names if not isinstance(each.ctx, ast.Load)}
