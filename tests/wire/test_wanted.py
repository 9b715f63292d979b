"""Tests of `nbdist.wire.wanted`: what crosses to the process that starts agents."""

from __future__ import annotations

import pickle

from nbdist.hosts import Host
from nbdist.wire.wanted import Wanted


def test_it_crosses_and_its_text_has_no_secret() -> None:
    """The environment that goes along is in no log."""
    wanted = Wanted(launcher="ssh", hosts=(Host("a", 4),), environ={"HF_TOKEN": "very-secret"})
    assert pickle.loads(pickle.dumps(wanted)) == wanted
    assert "address='a'" in repr(wanted)
    assert "secret" not in repr(wanted)
