"""Tests of `nbdist.worker.ops.environ`: what `%dist_env` is given by a rank."""

from __future__ import annotations

import os

import pytest

from nbdist.worker.namespace import Namespace
from nbdist.worker.op import Context
from nbdist.worker.ops.environ import environ


def test_variables_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a cell has set is among them, what it has removed is not; it is a copy."""
    context = Context(None, Namespace({}), None)
    monkeypatch.setenv("NBT_SET", "1")
    found = environ(context)
    assert type(found) is dict
    assert found == {**os.environ}
    monkeypatch.delenv("NBT_SET")
    assert found["NBT_SET"] == "1"
    assert "NBT_SET" not in environ(context)
