"""Tests of `nbdist.notebook.commands.values`: what is asked wrongly."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nbdist.errors import WorldNotStarted


def test_without_workers(typed: Callable[[str], str]):
    """It says how to start some."""
    with pytest.raises(WorldNotStarted, match="`%dist_push` needs workers"):
        typed("%dist_push x")
