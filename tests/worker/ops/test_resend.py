"""Tests of `nbdist.worker.ops.resend`: what a rank says of what it was sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from nbdist.values.payload import pack_frames
from nbdist.values.pickling import pickle
from nbdist.worker.namespace import Namespace
from nbdist.worker.op import Context
from nbdist.worker.ops import push, resend


def test_what_was_changed() -> None:
    """Whether it came with a task or was pushed; what stays on a rank is not bound again."""
    names: dict[str, Any] = {}
    namespace = Namespace(names)
    context = Context(SimpleNamespace(user_ns=names), namespace, None)
    packed, _ = pack_frames(pickle({"x": [1], "y": [2]}, {}).frames)
    namespace.receive(packed)
    assert resend.changed(context, ("x", "y")) == []
    names["y"].append(3)
    assert resend.changed(context, ("x", "y")) == ["y"]
    namespace.receive(packed, {"y", "z"})
    assert names == {"x": [1], "y": [2, 3]}
    assert resend.changed(context, ("x", "y")) == ["y"]
    push.take(context, packed)
    push.bind(context)
    assert resend.changed(context, ("x", "y")) == []
