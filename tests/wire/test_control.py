"""Tests of `nbdist.wire.control`: what is asked and answered crosses over, and nothing else."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest

from nbdist.wire import control
from nbdist.wire.control import Candidate, Completions
from nbdist.wire.frames import BadFrame, pack
from nbdist.wire.views import Begun, Collective, Place, StackFrame

PLACE = Place(3, "all_reduce", {"0": 2}, begun=(Begun("0", 1, "all_reduce", "[2]"),))

ANSWERS: list[control.Answer] = [
    PLACE,
    control.Traced(PLACE, (StackFrame("Cell In[1]", 3, "<module>"),)),
    Collective("all_reduce", 3, is_done=False),
    control.HeldGroups(1, 2, {"a": (0, 1)}),
    ("torch has no x",),
    control.Failed("too late", unfit=False),
    control.Ok(),
]

HOSTILE: dict[str, Any] = {
    "a function": os.system,
    "a class": Place,
    "a field of another type": Place(line="3"),  # type: ignore[arg-type]
    "another type deep inside": Place(counts={"0": "2"}),  # type: ignore[dict-item]
    "something of no use there": Begun("0", 1, "all_reduce"),
    "no message": {"do": "locate"},
}


@pytest.mark.parametrize("answer", ANSWERS, ids=repr)
def test_answers_arrive_equal(answer: control.Answer) -> None:
    """The agent gets what a worker has answered."""
    assert control.answer_from([memoryview(pack(answer))]) == answer


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_nothing_else_is_made_of_a_workers_bytes(hostile: Any) -> None:
    """No code runs, and every field has its type."""
    with pytest.raises(BadFrame):
        control.answer_from([pickle.dumps(hostile)])


WITHOUT_FIELDS = b"\x80\x02cnbdist.wire.views\nPlace\n)\x81."


@pytest.mark.parametrize("buffers", [[], [b""], [b"garbage"], [b"\x80\x05."], [WITHOUT_FIELDS]])
def test_garbage_is_no_answer(buffers: list[bytes]) -> None:
    """Whatever unpickling makes of it."""
    with pytest.raises(BadFrame):
        control.answer_from(buffers)


def test_a_reply_is_read_as_it_was_written() -> None:
    """Also one of a completer that says nothing of kinds and signatures."""
    found = Completions((Candidate("lr", "instance"), Candidate("lower", "function", "()")), 3, 4)
    reply = found.reply()
    assert reply["matches"] == ["lr", "lower"]
    assert (reply["cursor_start"], reply["cursor_end"], reply["status"]) == (3, 4, "ok")
    assert Completions.read(reply) == found
    bare = {**reply, "metadata": {}}
    assert Completions.read(bare) == Completions((Candidate("lr"), Candidate("lower")), 3, 4)
