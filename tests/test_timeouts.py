"""Tests that docs/timeouts.md has all constants of times, and that each is long enough."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from tests.sources import PACKAGE, nodes_of, sources

PAGE = PACKAGE.parent / "docs/timeouts.md"

NAMED = re.compile(
    r"(^|_)(timeout|TIMEOUT|GRACE|WAIT|LINGER|SECONDS|INTERVAL|EVERY|PATIENCE|AFTER|DELAY|PERIOD"
    r"|PAUSE|HOLD|DEFERRAL|TICK|DEADLINE|REFRESH|REDRAW|STEP|UNCHANGED|MS)$"
)
"""Matches the names of most constants of times."""

SAID = re.compile(r"\b(milli|nano)?seconds\b", re.IGNORECASE)
"""Matches the comments and docstrings of constants of times with other names."""

NOT_TIMES = {
    "agent/inspect.LARGEST_SHARE",
    "agent/stacks.MAX_PAUSE_STEPS",  # turns of a loop
    "agent/interrupts.ASLEEP",  # how little of a processor a rank uses
    "output/events.MAX_STEP",
    "output/html._COLUMN_STEP",
    "tools/timeline_data.LEAST_SHARE",
    "tools/watch.DEFAULT_WATCH_STEPS",  # steps
    "wire/spec.AGENTS_WAIT",  # times a link timeout
}
"""Constants that look like times and are none."""

UNITS = {"s": 1.0, "ms": 1e-3, "ns": 1e-9}

TERM = re.compile(r"[a-z_]+(?:/[a-z_]+)*(?:\.[A-Z]\w*)+(?:\.timeout)?")
"""A constant in an expression of the page, such as `world/agent_link.CALL_TIMEOUT`."""


class Row(NamedTuple):
    """A constant on the page: its number, its seconds, and the expressions that it must exceed."""

    number: float
    seconds: float
    exceeds: tuple[str, ...]


class Found(NamedTuple):
    """A constant in the code; `is_time` if the number is a time."""

    number: float
    is_time: bool


@cache
def rows() -> dict[str, Row]:
    """The rows of all tables of the page, by the constant's name."""
    found = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `"):
            name, value, _, exceeds = (cell.strip() for cell in line.strip("|").split("|"))
            number, unit = value.split()
            seconds = float(number) * UNITS[unit]
            found[name.strip("`")] = Row(
                float(number), seconds, tuple(re.findall(r"`([^`]+)`", exceeds))
            )
    return found


@cache
def constants() -> dict[str, Found]:
    """All numbers of the package that have a name, by module and name."""
    found = {}
    for file, source in sources().items():
        module = nodes_of(source)[0]
        assert isinstance(module, ast.Module)
        for path, body in bodies(file.removesuffix(".py"), module.body):
            for name, each in numbers_in(body, source.splitlines()):
                found[f"{path}.{name}"] = each
    return found


def bodies(path: str, body: list[ast.stmt]) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Yield the module's statements, and those of each of its classes."""
    yield path, body
    for each in body:
        if isinstance(each, ast.ClassDef):
            yield from bodies(f"{path}.{each.name}", each.body)


def numbers_in(body: list[ast.stmt], lines: list[str]) -> Iterator[tuple[str, Found]]:
    """Yield each number with a name; its name, comment and docstring show if it is a time."""
    for each, after in pairwise([*body, None]):
        if not isinstance(each, ast.Assign | ast.AnnAssign) or each.value is None:
            continue
        doc = after.value if isinstance(after, ast.Expr) else None
        text = "\n".join(lines[each.lineno - 1 : each.end_lineno])
        text += f"\n{doc.value}" if isinstance(doc, ast.Constant) else ""
        for target in each.targets if isinstance(each, ast.Assign) else [each.target]:
            is_many = isinstance(target, ast.Tuple) and isinstance(each.value, ast.Tuple)
            names = target.elts if is_many else [target]
            values = each.value.elts if is_many else [each.value]
            is_said = SAID.search(text) or (is_many and any(map(is_named, names)))
            for name, value in zip(names, values, strict=True):
                number = number_of(value)
                if number is None or not isinstance(name, ast.Name):
                    continue
                if name.id.isupper() or name.id == "timeout":
                    is_float = isinstance(number, float) or not is_many
                    yield name.id, Found(number, is_named(name) or bool(is_said and is_float))


def is_named(name: ast.expr) -> bool:
    """Whether the name of a constant is that of a time."""
    return isinstance(name, ast.Name) and bool(NAMED.search(name.id))


def number_of(value: ast.expr) -> float | None:
    """Return the value of an expression of numbers, or None for another expression."""
    kinds = (ast.BinOp, ast.Constant, ast.operator, ast.unaryop, ast.UnaryOp)
    if not all(isinstance(each, kinds) for each in ast.walk(value)):
        return None
    number = eval(compile(ast.Expression(value), "", "eval"))
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    return number if is_number else None


def times() -> dict[str, float]:
    """The constants of times."""
    found = constants().items()
    return {name: each.number for name, each in found if each.is_time and name not in NOT_TIMES}


def seconds_of(expression: str) -> float:
    """Return the value of an expression of the page; KeyError if a constant does not exist."""

    def number(found: re.Match[str]) -> str:
        row = rows().get(found[0])
        return repr(row.seconds if row else constants()[found[0]].number)

    value = number_of(ast.parse(TERM.sub(number, expression), mode="eval").body)
    assert value is not None, expression
    return value


def test_the_page_has_all_times() -> None:
    """The page has each constant of a time with its value, and no others."""
    assert {name: row.number for name, row in rows().items()} == times()
    assert constants().keys() >= NOT_TIMES


def test_each_time_exceeds_those_in_its_row() -> None:
    """Each constant exceeds the expressions that its row of the page names."""
    wrong = [
        f"{name} ({row.seconds:g} s) must exceed {each} ({seconds_of(each):g} s)"
        for name, row in rows().items()
        for each in row.exceeds
        if not row.seconds > seconds_of(each)
    ]
    assert wrong == []
