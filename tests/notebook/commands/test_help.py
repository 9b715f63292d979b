"""Tests of `nbdist.notebook.commands.help`: all magics on one page."""

from __future__ import annotations

from collections.abc import Callable

from nbdist.notebook.command import find_commands
from nbdist.notebook.commands.help import EVERYDAY, summary


def test_all_magics_have_a_line(typed: Callable[[str], str]) -> None:
    """What is used every day comes first; each says what it does."""
    _, _, *lines = typed("%dist_help").splitlines()
    names = [line.split()[0] for line in lines]
    assert sorted(names) == sorted(each.shown_name for each in find_commands())
    assert [name.lstrip("%") for name in names[: len(EVERYDAY)]] == [*EVERYDAY]
    told = {each.shown_name: summary(each) for each in find_commands()}
    for line in lines:
        name, _, text = line.partition(" ")
        assert text.strip() == told[name]
        assert len(text.strip()) > 10
