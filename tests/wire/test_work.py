"""Tests of `nbdist.wire.work`: what is packed once comes out equal.

And what a worker tells its agent in the middle of its output is found, and nothing else.
"""

from __future__ import annotations

import pytest

from nbdist.values.payload import Payload, SegmentRef
from nbdist.wire.frames import pack
from nbdist.wire.work import (
    LONGEST_MARK,
    Attempt,
    Call,
    Mark,
    Script,
    Source,
    Task,
    cut_off_pattern,
    mark,
    mark_pattern,
    mark_value,
    task_from,
)

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
    assert task_from(pack(task)) == task


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


TOKEN = "0123456789abcdef"
VALUES: list[Mark] = [0, 7, 123_456_789_012, "ready", "stdout", "stderr"]
PIPE_BUF = 512  # POSIX's smallest: such a write is never torn.


@pytest.mark.parametrize("value", VALUES)
def test_what_is_marked_is_found(value: Mark):
    """A mark in the middle of text is found, with its value, and the text is what is left."""
    pieces = mark_pattern(TOKEN).split(b"before" + mark(TOKEN, value) + b"after")
    assert pieces[::2] == [b"before", b"after"]
    assert mark_value(pieces[1]) == value


@pytest.mark.parametrize("value", VALUES)
def test_mark_is_written_in_one_piece(value: Mark):
    """A mark is shorter than what the kernel writes to a pipe without a break."""
    assert len(mark(TOKEN, value)) < PIPE_BUF


def test_mark_is_invisible():
    """Terminals ignore a mark, whatever its value: it is one APC sequence."""
    assert mark(TOKEN, 5).startswith(b"\x1b_")
    assert mark(TOKEN, 5).endswith(b"\x1b\\")
    assert mark(TOKEN, 5).count(b"\x1b") == 2


@pytest.mark.parametrize(
    "text",
    [
        mark("fedcba9876543210", 1),
        b"\x1b_" + TOKEN.encode() + b";1",
        b"\x1b_" + TOKEN.encode() + b";1 2\x1b\\",
        b"\x1b_" + TOKEN.encode() + b"1\x1b\\",
        b"\x1b[31mred\x1b[0m",
    ],
)
def test_other_text_is_no_mark(text: bytes):
    """Other tokens, unfinished marks and colours are text."""
    assert mark_pattern(TOKEN).split(text) == [text]


@pytest.mark.parametrize("value", VALUES)
def test_a_mark_that_is_cut_off_is_found(value: Mark):
    """Wherever a read ends in it; a whole one is not, nor text that began like one."""
    whole = mark(TOKEN, value)
    for cut in range(1, len(whole)):
        found = cut_off_pattern(TOKEN).search(b"\x1b[1mbefore" + whole[:cut])
        assert found is not None
        assert found.group() == whole[:cut]
    assert len(whole) < LONGEST_MARK
    assert not cut_off_pattern(TOKEN).search(whole + b"after")
    assert not cut_off_pattern(TOKEN).search(b"\x1b_" + TOKEN.encode() + b";" + b"7" * 100)
