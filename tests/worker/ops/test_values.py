"""Tests of `nbdist.worker.ops.values`: values that stay until they have been read."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.values.payload import INLINE_LIMIT, Payload, open_payload, pack_frames
from nbdist.values.pickling import pickle, unpickle
from nbdist.wire.ops import Brought
from nbdist.worker.namespace import Context, Namespace
from nbdist.worker.ops.values import (
    bind_pushed,
    bind_scattered,
    changed,
    gather,
    push,
    scatter,
)


@pytest.fixture
def context() -> Context:
    names: dict[str, Any] = {"x": [1], "lock": {"of": threading.Lock()}}
    names["both"] = [names["x"]]
    return Context(SimpleNamespace(user_ns=names), Namespace(names), None, task_id="t")


def test_values_travel_together(context: Context):
    """What two of them share they share afterwards."""
    brought = gather(context, ("x", "both", "len(x)"))
    assert brought.packed is not None
    x, both, length = unpickle(open_payload(brought.packed))
    assert (x, length) == ([1], 1)
    assert both[0] is x


def test_a_big_one_stays_until_it_has_been_read(context: Context):
    """In shared memory, which whoever lets go of the task releases."""
    context.names["big"] = bytes(INLINE_LIMIT)
    brought = gather(context, ("big",))
    assert brought.packed is not None
    assert unpickle(open_payload(brought.packed)) == [bytes(INLINE_LIMIT)]
    context.namespace.let_go("t")
    with pytest.raises(OSError, match="shared memory"):
        open_payload(brought.packed)


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("nope", Brought("nope", missing="nope")),
        ("x + [nope]", Brought("x + [nope]", missing="nope")),
        ("x.y", Brought("x.y", problem="AttributeError: 'list' object has no attribute 'y'")),
        (
            "lock",
            Brought(
                "lock",
                problem="`lock['of']` (thread lock) cannot be sent to the notebook: "
                "a lock works within one process",
            ),
        ),
    ],
)
def test_what_has_no_value(context: Context, expression: str, said: Brought):
    """It is told, and no error of the task's."""
    assert gather(context, ("x", expression)) == said


def test_what_is_pushed():
    """Is bound when that is asked for, and is not the rank's own."""
    names: dict[str, Any] = {"x": "as it was"}
    context = Context(SimpleNamespace(user_ns=names), Namespace(names), None)
    packed, _ = pack_frames(pickle({"x": 1, "y": 2}, {}).frames)
    push(context, packed)
    assert names == {"x": "as it was"}
    bind_pushed(context)
    assert names == {"x": 1, "y": 2}
    assert context.bound == set()


def test_its_own_part():
    """Whatever a cell has bound to `rank`; what is for others is not looked at."""
    names: dict[str, Any] = {}
    namespace = Namespace(names)
    namespace.start_with({"rank": 1})
    names["rank"] = 0
    context = Context(SimpleNamespace(user_ns=names), namespace, None)
    mine, _ = pack_frames(pickle([3, 4], {}).frames)
    scatter(context, "x", {0: Payload((b"not for this one",)), 1: mine})
    assert (names, context.bound) == ({"rank": 0}, set())
    bind_scattered(context)
    assert names == {"rank": 0, "x": [3, 4]}
    assert context.bound == {"x"}


def test_what_was_changed():
    """Whether it came with a task or was pushed; what stays on a rank is not bound again."""
    names: dict[str, Any] = {}
    namespace = Namespace(names)
    context = Context(SimpleNamespace(user_ns=names), namespace, None)
    packed, _ = pack_frames(pickle({"x": [1], "y": [2]}, {}).frames)
    namespace.receive(packed)
    assert changed(context, ("x", "y")) == []
    names["y"].append(3)
    assert changed(context, ("x", "y")) == ["y"]
    namespace.receive(packed, {"y", "z"})
    assert names == {"x": [1], "y": [2, 3]}
    assert changed(context, ("x", "y")) == ["y"]
    push(context, packed)
    bind_pushed(context)
    assert changed(context, ("x", "y")) == []
