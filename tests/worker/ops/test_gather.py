"""Tests of `nbdist.worker.ops.gather`: values that stay until they have been read."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.values.payload import INLINE_LIMIT, open_payload
from nbdist.values.pickling import unpickle
from nbdist.wire.ops import Brought
from nbdist.worker.namespace import Namespace
from nbdist.worker.op import Context
from nbdist.worker.ops.gather import gather


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
