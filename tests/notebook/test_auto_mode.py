"""Tests of `nbdist.notebook.auto_mode`: what it says of itself."""

from __future__ import annotations

from nbdist.notebook.auto_mode import AutoMode


def test_on_and_off() -> None:
    """It is on while it has a pool."""
    mode = AutoMode()
    assert (mode.is_on, repr(mode)) == (False, "<AutoMode off>")
    mode.pool = "default"
    assert (mode.is_on, repr(mode)) == (True, "<AutoMode on for default>")
