"""Tests of `nbdist.notebook.commands.values`: what is asked wrongly."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nbdist.errors import UsageError, WorldNotStarted


def test_without_workers(typed: Callable[[str], str]):
    """It says how to start some."""
    with pytest.raises(WorldNotStarted, match="`%dist_sync` needs workers"):
        typed("%dist_sync model opt --from 0")


def test_without_names(typed: Callable[[str], str]):
    """It says what is missing, and where to read more."""
    with pytest.raises(UsageError, match=r"`%dist_sync`: .*names.* `%dist_sync\?` shows"):
        typed("%dist_sync --from 1")
