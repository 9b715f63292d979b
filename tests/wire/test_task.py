"""Tests of `nbdist.wire.task`: what is packed once comes out equal."""

from __future__ import annotations

import pytest

from nbdist.values.payload import Payload, SegmentRef
from nbdist.wire.task import Attempt, Call, Script, Source, Task, failure_in_words, unpack

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


def test_memory_that_a_task_refers_to() -> None:
    """That of its names and of its op's arguments; in other places nothing else differs."""
    refs = [SegmentRef(f"/proc/1/fd/{number}#9", (8,)) for number in range(3)]
    parts = {0: Payload(segment=refs[1]), 1: Payload(segment=refs[2])}
    task = Task("a5", (0, 1), Call("values.scatter", {"parts": parts}), Payload(segment=refs[0]))
    assert task.segments == (*refs,)
    here = {ref.path: SegmentRef(f"/here/{ref.path}", ref.sizes) for ref in refs}
    assert task.moved(here).segments == (*here.values(),)
    assert (
        task.moved(here).moved(
            {there.path: ref for ref, there in zip(refs, here.values(), strict=True)}
        )
        == task
    )
    assert SOURCE.segments == SCRIPT.segments == CALL.segments == ()
    assert REST.moved(here) == REST


def test_a_failure_outside_the_cell() -> None:
    """One line, with no calls."""
    failure = failure_in_words("VariableError", "`net` cannot be rebuilt")
    assert failure.traceback == ("VariableError: `net` cannot be rebuilt",)
