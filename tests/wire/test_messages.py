"""Tests of `nbdist.wire`: tasks, marks, files, answers of workers, and big values."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from nbdist.values.payload import Payload, SegmentRef
from nbdist.wire import control
from nbdist.wire.control import Candidate, Completions
from nbdist.wire.frames import BadFrame, pack
from nbdist.wire.messages import PART, AgentReply, Landmark, PutCode
from nbdist.wire.node_messages import NodeHello, node_frames, node_message_from
from nbdist.wire.ops import Mesh
from nbdist.wire.places import Begun, Collective, RankPosition, StackFrame
from nbdist.wire.transfer import SegmentPiece
from nbdist.wire.work import (
    LONGEST_MARK,
    CellCode,
    Mark,
    OpCall,
    Script,
    Task,
    cut_off_pattern,
    mark,
    mark_pattern,
    mark_value,
)
from nbdist.wire.world_facts import Renumbering

SOURCE = Task("a1", (0, 1), CellCode("x = 'é\udc80'"), names=Payload((b"",)), execution_count=7)
SCRIPT = Task("a2", (1,), Script("file", "train.py", (), "/w/train.py", "/w"), execution_count=3)
CALL = Task("a3", (2,), OpCall("snapshot.write", {"folder": "/s", "wanted": {0: ["x"]}}))


def test_a_task_knows_the_memory_it_refers_to() -> None:
    """A task knows the segments of its names and its op; in a moved task nothing else differs."""
    refs = [SegmentRef(f"/proc/1/fd/{number}#9", (8,)) for number in range(3)]
    parts = {0: Payload(segment=refs[1]), 1: Payload(segment=refs[2])}
    names = Payload(segment=refs[0])
    task = Task("a5", (0, 1), OpCall("values.scatter", {"parts": parts}), names, imports={0: {}})
    assert task.segments == (*refs,)
    here = {ref.path: SegmentRef(f"/here/{ref.path}", ref.sizes) for ref in refs}
    assert task.moved(here).segments == (*here.values(),)
    back = {there.path: ref for ref, there in zip(refs, here.values(), strict=True)}
    assert task.moved(here).moved(back) == task
    assert SOURCE.segments == SCRIPT.segments == CALL.segments == ()
    assert SOURCE.moved(here) == SOURCE


TOKEN = "0123456789abcdef"
VALUES: list[Mark] = [0, 7, 123_456_789_012, "ready", "stdout", "stderr"]


@pytest.mark.parametrize("value", VALUES)
def test_a_mark_is_found_in_text(value: Mark):
    """A mark is found in a text, whole or cut off; for terminals it is a single APC sequence."""
    whole = mark(TOKEN, value)
    assert len(whole) < LONGEST_MARK <= 512  # POSIX's smallest PIPE_BUF: a write is never torn
    assert (whole[:2], whole[-2:], whole.count(b"\x1b")) == (b"\x1b_", b"\x1b\\", 2)
    pieces = mark_pattern(TOKEN).split(b"before" + whole + b"after")
    assert pieces[::2] == [b"before", b"after"]
    assert mark_value(pieces[1]) == value
    for cut in range(1, len(whole)):
        found = cut_off_pattern(TOKEN).search(b"\x1b[1mbefore" + whole[:cut])
        assert found is not None
        assert found.group() == whole[:cut]


def test_other_text_is_no_mark():
    """Other tokens, unfinished marks, colours, and text that begins like a mark are no marks."""
    start = b"\x1b_" + TOKEN.encode()
    other = mark("fedcba9876543210", 1)
    for text in (other, start + b";1", start + b";1 2\x1b\\", start + b"1\x1b\\", b"\x1b[31mred"):
        assert mark_pattern(TOKEN).split(text) == [text]
    for text in (mark(TOKEN, 7) + b"after", start + b";" + b"7" * 100):
        assert not cut_off_pattern(TOKEN).search(text)


def test_a_mesh_fits_a_world_of_another_size() -> None:
    """A mesh of all ranks gets a first dimension for the new size, if the sizes divide."""
    line, table = Mesh("cpu", (4,), (0, 1, 2, 3)), Mesh("cpu", (2, 2), (0, 1, 2, 3), ("a", "b"))
    assert line.fitted(4, 3) == Mesh("cpu", (3,), (0, 1, 2))
    assert table.fitted(4, 6) == Mesh("cpu", (3, 2), (0, 1, 2, 3, 4, 5), ("a", "b"))
    assert table.fitted(4, 4) == table
    some, turned = Mesh("cpu", (2,), (0, 1)), Mesh("cpu", (2, 2), (0, 2, 1, 3))
    assert (table.fitted(4, 5), some.fitted(4, 3), turned.fitted(4, 6)) == (None, None, None)
    for mesh in (line, table):
        assert Mesh.read(json.loads(json.dumps(asdict(mesh)))) == mesh


def test_bytes_of_a_big_value_have_a_frame() -> None:
    """The bytes of a segment's piece have a frame of their own; other frames are refused."""
    piece = SegmentPiece("/proc/1/fd/2#3", 4, b"bytes")
    frame, data = node_frames(piece)
    assert data is piece.data
    assert node_message_from(bytes(frame), memoryview(data)) == piece
    for frames in ((), (b"",), (pack(5),), (pack(NodeHello("1", "x", None)),), (frame, data, data)):
        with pytest.raises(BadFrame):
            node_message_from(*frames)
    assert node_frames(AgentReply(1, "x")) == [pack(AgentReply(1, "x"))]


@pytest.mark.parametrize(
    ("after", "became", "new"),
    [
        (4, {0: 0, 1: 1, 2: 2, 3: 3}, ()),
        (5, {0: 0, 1: 1, 2: 2, 3: 3}, (4,)),
        (3, {0: 0, 2: 1, 3: 2}, ()),
        (3, {0: 0, 2: 1}, (2,)),
    ],
)
def test_a_renumbering_knows_moved_and_new_ranks(
    after: int, became: Mapping[int, int], new: tuple[int, ...]
) -> None:
    """Ranks that no old rank has become are new, and ranks with another number have moved."""
    change = Renumbering(4, after, became)
    assert (change.new, {now: old for old, now in change.was.items()}) == (new, became)
    assert change.moved == {old: now for old, now in became.items() if old != now}
    assert (change == Renumbering.none(4)) == (after == 4)


def test_changes_of_rank_numbers_are_combined() -> None:
    """Two changes have the effect of one; ranks that are gone have no new number."""
    both = Renumbering(4, 2, {1: 0, 3: 1}).then(Renumbering(2, 3, {1: 0}))
    assert both == Renumbering(4, 3, {3: 0})
    assert Renumbering(4, 2, {3: 0, 2: 1}).of((0, 2, 3)) == (0, 1)


def test_an_archive_is_sent_in_parts() -> None:
    """An archive is sent in parts of limited size, and the last part is marked."""
    archive = bytes(range(256)) * (PART // 128 + 1)
    puts = [*PutCode.of("digest", archive)]
    assert [len(each.part) for each in puts] == [PART, PART, 256]
    assert b"".join(each.part for each in puts) == archive
    assert [each.is_last for each in puts] == [False, False, True]
    [whole] = PutCode.of("digest", archive[:PART])
    assert whole == PutCode("digest", archive[:PART], is_last=True)


def test_a_landmark_is_the_very_same_file(tmp_path: Path) -> None:
    """A landmark differs from that of a copy with equal times, and of a file in its place."""
    file, copy = tmp_path / "a.py", tmp_path / "b.py"
    file.write_text("x = 1")
    shutil.copy2(file, copy)
    mark = Landmark.of(str(file))
    assert mark == Landmark.of(str(file)) != Landmark.of(str(copy))
    file.unlink()
    assert Landmark.of(str(file)) is None
    os.replace(copy, file)
    assert Landmark.of(str(file)) not in (mark, None)


PLACE = RankPosition(3, "all_reduce", {"0": 2}, begun=(Begun("0", 1, "all_reduce", "[2]"),))

ANSWERS: list[control.ControlReply] = [
    PLACE,
    control.Traced(PLACE, (StackFrame("Cell In[1]", 3, "<module>"),)),
    Collective("all_reduce", 3, is_done=False),
    control.HeldGroups(1, 2, {"a": (0, 1)}),
    ("torch has no x",),
    control.Failed("too late", unfit=False),
    control.Ok(),
]

HOSTILE: list[Any] = [
    os.system,
    RankPosition,
    RankPosition(line="3"),  # type: ignore[arg-type]
    RankPosition(counts={"0": "2"}),  # type: ignore[dict-item]
    Begun("0", 1, "all_reduce"),  # no answer, although a class of nbdist
    {"do": "locate"},
]


def test_answers_arrive_equal() -> None:
    """Each answer of a worker arrives equal at the agent."""
    for number, answer in enumerate(ANSWERS):
        answered = control.ControlReplyTo(number, answer)
        assert control.answer_from(pack(answered)) == answered


def test_hostile_answers_of_a_worker_are_refused() -> None:
    """The agent refuses garbage, code and fields of wrong types in a worker's answer."""
    without_fields = b"\x80\x02cnbdist.wire.places\nPlace\n)\x81."
    garbage = [b"", b"garbage", b"\x80\x05.", without_fields, pickle.dumps(ANSWERS[0])]
    hostile = (pickle.dumps(control.ControlReplyTo(1, each)) for each in HOSTILE)
    for frame in (*garbage, *hostile, pickle.dumps(control.ControlReplyTo("1", ANSWERS[0]))):
        with pytest.raises(BadFrame):
            control.answer_from(frame)


def test_completions_are_read_as_they_were_written() -> None:
    """A reply with completions is read as it was written, also without kinds and signatures."""
    found = Completions((Candidate("lr", "instance"), Candidate("lower", "function", "()")), 3, 4)
    reply = found.reply()
    assert reply["matches"] == ["lr", "lower"]
    assert (reply["cursor_start"], reply["cursor_end"], reply["status"]) == (3, 4, "ok")
    assert Completions.read(reply) == found
    bare = {**reply, "metadata": {}}
    assert Completions.read(bare) == Completions((Candidate("lr"), Candidate("lower")), 3, 4)
