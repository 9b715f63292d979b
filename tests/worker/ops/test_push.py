"""Tests of `nbdist.worker.ops.push`: a rank binds names of the notebook."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from nbdist.values.payload import pack_frames
from nbdist.values.pickling import pickle
from nbdist.worker.namespace import Namespace
from nbdist.worker.op import Context
from nbdist.worker.ops.push import bind, take


def test_the_notebooks_names():
    """Once it is told to, and they are not the rank's own."""
    names: dict[str, Any] = {"x": "as it was"}
    context = Context(SimpleNamespace(user_ns=names), Namespace(names), None)
    packed, _ = pack_frames(pickle({"x": 1, "y": 2}, {}).frames)
    take(context, packed)
    assert names == {"x": "as it was"}
    bind(context)
    assert names == {"x": 1, "y": 2}
    assert context.bound == set()
