"""Tests of `nbdist.wire.task`: what is packed once comes out equal."""

from __future__ import annotations

import pytest

from nbdist.wire.payload import Payload, SegmentRef
from nbdist.wire.task import Attempt, Call, Script, Source, Task, unpack

SOURCE = Task(
    "a1",
    (0, 1),
    Source("x = 'é\udc80'"),
    Payload(frames=(b"\x80\x05", b"")),
    ("x",),
    execution_count=7,
)
SCRIPT = Task(
    "a2",
    (1,),
    Script("file", "train.py", ("--lr", "1"), "/w/train.py", "/w", local_rank=True),
    execution_count=3,
)
CALL = Task("a3", (2,), Call("snapshot.write", {"folder": "/s", "wanted": {0: ["x"]}}))
REST = Task(
    "a4",
    (0,),
    names=Payload(segment=SegmentRef("/proc/1/fd/3#9", (1, 2))),
    attempt=Attempt(1, 3),
    log_level=20,
    imports={0: {"np": "numpy"}},
)


@pytest.mark.parametrize("task", [SOURCE, SCRIPT, CALL, REST], ids=repr)
def test_what_is_packed_comes_out_equal(task: Task) -> None:
    """A worker gets what the notebook has packed."""
    assert unpack(task.pack()) == task


def test_what_people_see_of_the_work() -> None:
    """The source, the number and the script, where there is one."""
    seen = [(task.source, task.execution_count, task.script) for task in (SOURCE, SCRIPT, CALL)]
    assert seen == [("x = 'é\udc80'", 7, None), ("", 3, SCRIPT.work), ("", None, None)]
