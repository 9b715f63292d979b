"""No ten lines stand twice."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping

import pytest

from tests.sources import nodes_of, sources

LINES = 10


def telling_lines(source: str) -> Iterator[tuple[int, str]]:
    """The lines that count, with their numbers: imports, comments and empty ones do not."""
    left_out: set[int] = set()
    for node in nodes_of(source):
        if isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for number, line in enumerate(source.splitlines(), 1):
        text = line.strip()
        if text and not text.startswith("#") and number not in left_out:
            yield number, text


def repeats(sources: Mapping[str, str]) -> list[str]:
    """All places where the same lines stand, indented as they may be."""
    places = defaultdict(list)
    for file, source in sources.items():
        lines = list(telling_lines(source))
        for start in range(len(lines) - LINES + 1):
            key = tuple(text for _, text in lines[start : start + LINES])
            places[key].append((file, lines[start][0]))
    return [
        f"{first[0]}:{first[1]} and {other[0]}:{other[1]}"
        for first, *others in places.values()
        for other in others
    ]


def test_no_lines_stand_twice():
    """What is the same is written once: as a function, a class or a table."""
    assert repeats(sources()) == []


TEN = "a = 1\nb = 2\nc = 3\nd = 4\ne = 5\nf = 6\ng = 7\nh = 8\ni = 9\nj = 10\n"
IMPORTS = "from x import (\n" + "    a,\n" * LINES + ")\nimport e\n"


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (TEN, "def f():\n    a = 1\n\n    b = 2  \n    # d\n" + TEN[12:], ["x.py:1 and y.py:2"]),
        (TEN, TEN[6:], []),
        (TEN, TEN.replace("d", "dd"), []),
        (IMPORTS, IMPORTS, []),
    ],
)
def test_a_repeat_is_told(one, other, told):
    """By file and line of both; indentation, comments and imports make no difference."""
    assert repeats({"x.py": one, "y.py": other}) == told
