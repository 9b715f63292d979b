"""Tests of `nbdist.notebook.commands.gather`: what cannot be brought home or sent."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nbdist.errors import UsageError, WorldNotStarted


def test_an_expression_needs_a_name(typed: Callable[[str], str]):
    """It is asked for before the workers are."""
    with pytest.raises(UsageError, match=r"such as `%dist_gather loss.item\(\) --as values`"):
        typed("%dist_gather loss.item()")


@pytest.mark.parametrize("line", ["%dist_gather x", "%dist_push x"])
def test_without_workers(typed: Callable[[str], str], line: str):
    """Each says in its own name how to start some."""
    with pytest.raises(WorldNotStarted, match=f"`{line.split()[0]}` needs workers"):
        typed(line)
