"""Tests of `nbdist.wire.questions`: answers as front ends write and read them."""

from __future__ import annotations

from nbdist.wire.questions import Candidate, Completions


def test_a_reply_is_read_as_it_was_written() -> None:
    """Also one of a completer that says nothing of kinds and signatures."""
    found = Completions((Candidate("lr", "instance"), Candidate("lower", "function", "()")), 3, 4)
    reply = found.reply()
    assert reply["matches"] == ["lr", "lower"]
    assert (reply["cursor_start"], reply["cursor_end"], reply["status"]) == (3, 4, "ok")
    assert Completions.read(reply) == found
    bare = {**reply, "metadata": {}}
    assert Completions.read(bare) == Completions((Candidate("lr"), Candidate("lower")), 3, 4)
