"""No six lines stand twice."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "nbdist"

LINES = 6

# Pairs of files that share so many lines.  Only to become fewer.
SHARED = {
    ("errors.py", "errors.py"),
    ("wire/shared_memory.py", "world/world.py"),
}


def telling_lines(source: str) -> Iterator[tuple[int, str]]:
    """The lines that count, with their numbers: imports, comments and empty ones do not."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for number, line in enumerate(source.splitlines(), 1):
        text = line.strip()
        if text and not text.startswith("#") and number not in left_out:
            yield number, text


def repeats(sources: Mapping[str, str]) -> dict[tuple[str, str], list[str]]:
    """Where the same lines stand, indented as they may be: by the two files, all places."""
    places = defaultdict(list)
    for file, source in sources.items():
        lines = list(telling_lines(source))
        for start in range(len(lines) - LINES + 1):
            key = tuple(text for _, text in lines[start : start + LINES])
            places[key].append((file, lines[start][0]))
    found = defaultdict(list)
    for first, *others in places.values():
        for other in others:
            pair = f"{first[0]}:{first[1]} and {other[0]}:{other[1]}"
            found[first[0], other[0]].append(pair)
    return dict(found)


def test_no_lines_stand_twice():
    """What is the same is written once: as a function, a class or a table."""
    paths = sorted(PACKAGE.rglob("*.py"))
    found = repeats({path.relative_to(PACKAGE).as_posix(): path.read_text() for path in paths})
    assert [each for pair, told in found.items() if pair not in SHARED for each in told] == []
    assert SHARED - set(found) == set(), "they share no more: take them out of SHARED"


SIX = "a = 1\nb = 2\nc = 3\nd = 4\ne = 5\nf = 6\n"


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (SIX, ["x.py:1 and y.py:1"]),
        (
            "def f():\n    a = 1\n\n    b = 2\n    c = 3  \n    # d\n" + SIX[18:],
            ["x.py:1 and y.py:2"],
        ),
        (SIX[6:], []),
        (SIX.replace("d", "dd"), []),
    ],
)
def test_a_repeat_is_told(other, told):
    """By file and line of both; neither indentation nor comments make a difference."""
    found = repeats({"x.py": SIX, "y.py": other})
    assert [each for pairs in found.values() for each in pairs] == told


def test_imports_may_be_the_same():
    """They are what they are."""
    imports = "from x import (\n    a,\n    b,\n    c,\n    d,\n)\nimport e\nimport f\n"
    assert repeats({"x.py": imports, "y.py": imports}) == {}
