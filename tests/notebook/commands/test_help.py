"""Tests of `nbdist.notebook.commands.cells`: all magics on one page, in groups."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import nbdist
from nbdist.notebook.command import Command, find_commands
from nbdist.notebook.commands.cells import GROUPS, summary

README = Path(__file__).parents[3] / "README.md"


def commands() -> dict[str, Command]:
    return {each.name: each for each in find_commands()}


def test_all_magics_have_a_line(typed: Callable[[str], str]) -> None:
    """In their groups, the everyday ones first; each says what it does."""
    text = typed("%dist_help")
    shown = [line.partition(" ") for line in text.splitlines() if line.startswith("%")]
    there = commands()
    names = [name.lstrip("%") for name, _, said in shown if not said.startswith("--")]
    assert [name for name in names if name != "dist_init"] == [
        name for group in GROUPS.values() for name in group if name != "dist_init"
    ]
    for name, _, said in shown:
        known = there[name.lstrip("%")]
        assert said.strip() == summary(known) or said.startswith("--")
        assert len(said.strip()) > 10
    assert [line for line in text.splitlines() if line in GROUPS] == [*GROUPS]


def test_each_magic_is_in_one_group() -> None:
    """Or is a short form, which says what it is short for; seven are for every day."""
    grouped = [name for group in GROUPS.values() for name in group]
    assert sorted(grouped) == sorted(n for n, each in commands().items() if not each.short_for)
    assert len(GROUPS["everyday"]) == 7


def test_short_forms_are_on_another_page(typed: Callable[[str], str]) -> None:
    """What is kept for those who know it is not on the first page, and says what it is."""
    first, every = typed("%dist_help"), typed("%dist_help --all")
    short = {n: each.short_for.strip("`") for n, each in commands().items() if each.short_for}
    assert {*short} == {"dist_stack", "dist_log", "dist_why", "dist_clean"}
    for name, means in short.items():
        assert f"%{name}" not in first
        assert re.search(rf"^%{name} +{means}$", every, re.MULTILINE)


def test_readme_and_docstring_have_the_same_everyday_magics() -> None:
    """One list of seven: in the help, in the README's first table, in the package's docstring."""
    names = [commands()[name].shown_name for name in GROUPS["everyday"]]
    table = README.read_text().partition("Seven for every day:")[2].partition("\n\n|")[2]
    rows = re.findall(r"^\| `(%%?\w+)", table.partition("\n\n")[0], re.MULTILINE)
    assert rows == names
    assert re.findall(r"^    (%%?\w+)", str(nbdist.__doc__), re.MULTILINE) == names
