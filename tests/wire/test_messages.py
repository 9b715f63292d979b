"""Tests of `nbdist.wire.messages`: every message crosses the link and comes out equal."""

from __future__ import annotations

import pytest

from nbdist.output.events import Clear, Died, Display, Done, Failure, Skipped, Text, Update
from nbdist.values.payload import Payload
from nbdist.wire.frames import pack, unpack
from nbdist.wire.messages import (
    Answer,
    Ask,
    Down,
    Leave,
    Outputs,
    Run,
    StartFailure,
    StartWorld,
    Up,
)
from nbdist.wire.spec import WorldSpec
from nbdist.wire.views import WorkerStatus

SPEC = WorldSpec(2, "gloo", {"HOME": "/root"}, "/tmp", ("", "/lib"), 1, "/usr/bin/python3")

DOWN: list[Down] = [
    Ask(1, StartWorld(SPEC)),
    Run("a1", (0, 1), b"\x80\x05"),
    Leave(),
]

UP: list[Up] = [
    Answer(3, StartFailure(1, "node01", "python", "it exited with code 1", ("Traceback",))),
    Answer(4, (WorkerStatus(0, 10, "node01", "busy", 1.5, 1 << 40, "cuda:0"),)),
    Outputs(
        (
            (0, "a1", Text("stdout", "é\x00\x1b[31m")),
            (0, "a1", Skipped(100, 3)),
            (
                1,
                "a1",
                Display({"image/png": "iVBO"}, {"image/png": {"width": 3}}, "id", is_result=True),
            ),
            (1, "a1", Update({"text/plain": "5"}, {}, "id")),
            (1, "a1", Clear(wait=True)),
            (0, "a1", Failure("ValueError", "bad", ("line 1", "line 2"), 1 << 60)),
            (1, "", Died(-9, 5)),
            (0, "a1", Done("ok", 0.25, frozenset({"x"}), values=Payload(frames=(b"1",)))),
        )
    ),
]


@pytest.mark.parametrize("message", DOWN, ids=repr)
def test_what_goes_down_arrives_equal(message: Down):
    """The agent gets what the notebook sent."""
    assert unpack(pack(message)) == message


@pytest.mark.parametrize("message", UP, ids=repr)
def test_what_comes_up_arrives_equal(message: Up):
    """The notebook gets what an agent sent."""
    assert unpack(pack(message)) == message
