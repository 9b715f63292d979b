"""Tests of `nbdist.worker.ops.scatter`: a rank takes its own part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from nbdist.values.payload import Payload, pack_frames
from nbdist.values.pickling import pickle
from nbdist.worker.namespace import Namespace
from nbdist.worker.op import Context
from nbdist.worker.ops.scatter import bind, take


def test_its_own_part():
    """Whatever a cell has bound to `rank`; what is for others is not looked at."""
    names: dict[str, Any] = {}
    namespace = Namespace(names)
    namespace.start_with({"rank": 1})
    names["rank"] = 0
    context = Context(SimpleNamespace(user_ns=names), namespace, None)
    mine, _ = pack_frames(pickle([3, 4], {}).frames)
    take(context, "x", {0: Payload((b"not for this one",)), 1: mine})
    assert (names, context.bound) == ({"rank": 0}, set())
    bind(context)
    assert names == {"rank": 0, "x": [3, 4]}
    assert context.bound == {"x"}
