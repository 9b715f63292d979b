"""Tests of `nbdist.wire.work`, `ops` and `node_messages`: tasks, marks, big values."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from nbdist.topology import Position
from nbdist.values.payload import Payload, SegmentRef
from nbdist.wire.frames import pack
from nbdist.wire.node_messages import (
    NodeAnswer,
    node_frames,
    node_message_from,
    processes,
)
from nbdist.wire.ops import Mesh
from nbdist.wire.transfer import Piece
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
    """In the middle of text, with its value; terminals ignore it: it is one APC sequence."""
    whole = mark(TOKEN, value)
    assert len(whole) < PIPE_BUF
    assert (whole[:2], whole[-2:], whole.count(b"\x1b")) == (b"\x1b_", b"\x1b\\", 2)
    pieces = mark_pattern(TOKEN).split(b"before" + whole + b"after")
    assert pieces[::2] == [b"before", b"after"]
    assert mark_value(pieces[1]) == value


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


@pytest.mark.parametrize("names", [None, ("copies", "shards")])
def test_a_mesh_in_a_manifest(names: tuple[str, ...] | None) -> None:
    """It comes back from JSON as it was."""
    mesh = Mesh("cpu", (2, 2), (0, 1, 2, 3), names)
    assert Mesh.read(json.loads(json.dumps(asdict(mesh)))) == mesh


def test_a_mesh_in_a_world_of_another_size() -> None:
    """Its first dimension gets another length, if all ranks were in it and they divide."""
    line, table = Mesh("cpu", (4,), (0, 1, 2, 3)), Mesh("cpu", (2, 2), (0, 1, 2, 3), ("a", "b"))
    assert line.fitted(4, 3) == Mesh("cpu", (3,), (0, 1, 2))
    assert table.fitted(4, 6) == Mesh("cpu", (3, 2), (0, 1, 2, 3, 4, 5), ("a", "b"))
    assert table.fitted(4, 4) == table
    some, turned = Mesh("cpu", (2,), (0, 1)), Mesh("cpu", (2, 2), (0, 2, 1, 3))
    assert (table.fitted(4, 5), some.fitted(4, 3), turned.fitted(4, 6)) == (None, None, None)


def test_bytes_of_a_big_value() -> None:
    """They have a frame of their own, and arrive with what they are of."""
    piece = Piece(SegmentRef("/proc/1/fd/2#3", (9,)), 4, b"bytes")
    frame, data = node_frames(piece)
    assert data is piece.data
    assert node_message_from(bytes(frame), memoryview(data)) == piece
    assert node_frames(NodeAnswer(1, "x")) == [pack(NodeAnswer(1, "x"))]


def test_processes_by_rank() -> None:
    """With the node of each; without seats all are on one."""
    assert processes({0: 17, 1: 17}, (Position(0, 0), Position(1, 0))) == {0: (0, 17), 1: (1, 17)}
    assert processes({3: 17}, ()) == {3: (0, 17)}
