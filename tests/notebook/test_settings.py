"""Tests of `nbdist.notebook.settings`: what the environment says before a notebook starts."""

from __future__ import annotations

import pytest
from traitlets import TraitError

from nbdist.notebook.settings import NbDist


@pytest.mark.parametrize(
    ("value", "display"), [(None, "auto"), ("plain", "plain"), ("panel", "panel"), ("pink", "auto")]
)
def test_display(monkeypatch: pytest.MonkeyPatch, value: str | None, display: str):
    """NBDIST_DISPLAY chooses; what is no display is no reason to fail."""
    monkeypatch.delenv("NBDIST_DISPLAY", raising=False)
    if value is not None:
        monkeypatch.setenv("NBDIST_DISPLAY", value)
    assert NbDist().display == display


def test_prestart(monkeypatch: pytest.MonkeyPatch):
    """NBDIST_PRESTART=0 turns it off."""
    monkeypatch.delenv("NBDIST_PRESTART", raising=False)
    assert NbDist().prestart
    monkeypatch.setenv("NBDIST_PRESTART", "0")
    assert not NbDist().prestart


def test_a_wrong_display_is_refused():
    """`%config NbDist.display = "pink"` says which there are."""
    with pytest.raises(TraitError, match="panel"):
        NbDist().display = "pink"
