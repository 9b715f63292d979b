"""Tests of `nbdist.world.sent`: whose turn it is, and for whom a line is."""

from __future__ import annotations

import pytest

from nbdist.errors import UsageError
from nbdist.output.events import InputRequest
from nbdist.world.sent import SETTLE_SECONDS, STAY_SECONDS, Prompts


def asked(*ranks: int, by_debugger: bool = False) -> Prompts:
    prompts = Prompts()
    for rank in ranks:
        prompts.receive(rank, InputRequest(rank + 1, "> ", by_debugger=by_debugger), 0.0)
    return prompts


def test_in_the_order_of_the_ranks():
    """Also where a later one was faster: the others are given a moment."""
    prompts = asked(2)
    assert prompts.next(0.0, unfinished={0, 1, 2}) is None
    prompts.receive(1, InputRequest(2, "> "), SETTLE_SECONDS / 2)
    assert prompts.next(SETTLE_SECONDS, unfinished={0, 1, 2}) is None
    assert prompts.next(SETTLE_SECONDS * 2, unfinished={0, 1, 2}) == 1
    assert prompts.next(SETTLE_SECONDS / 2, unfinished={1, 2}) == 1  # nobody else is to come
    assert prompts.ranks == (1, 2)


def test_a_conversation_is_not_torn_apart():
    """Who was answered comes again first, for as long as it may ask again soon."""
    prompts = asked(0, 1)
    prompts.answered(0, 1.0)
    assert prompts.next(1.0, unfinished={0, 1}) is None
    prompts.receive(0, InputRequest(9, "> "), 1.1)
    assert prompts.next(1.1, unfinished={0, 1}) == 0
    prompts.answered(0, 2.0)
    assert prompts.next(2.0 + 2 * STAY_SECONDS, unfinished={0, 1}) == 1
    assert prompts.next(2.0, unfinished={1}) == 1  # rank 0 has finished


def test_seconds_are_counted_once():
    """While any rank waits, however many do."""
    prompts = asked(0, 1)
    prompts.answered(0, 1.0)
    prompts.drop(1, 3.0)
    assert prompts.seconds(10.0) == 3.0
    prompts.receive(1, InputRequest(5, "> "), 10.0)
    assert prompts.seconds(12.0) == 5.0
    assert prompts.next(12.0, unfinished=()) == 1


def test_a_line_is_for_one_rank():
    """As the prompt says; `-r` is the debugger's alone, any other program may be told that."""
    prompts = asked(0, 1, 3)
    assert prompts.prompt(3) == "[rank 3] > "
    assert prompts.answers(3, "-r all c", size=4) == {3: "-r all c"}
    assert prompts.text == "ranks 0-1,3 wait for your input, one at a time"


def test_a_line_for_several_debuggers():
    """Those that wait in one of the ranks that were said."""
    prompts = asked(0, 1, 3, by_debugger=True)
    assert prompts.answers(0, "-r all n", size=4) == {0: "n", 1: "n", 3: "n"}
    assert prompts.answers(0, "-r 1:3 p x + 1", size=4) == {1: "p x + 1"}
    assert prompts.answers(0, "p x", size=4) == {0: "p x"}
    assert prompts.answers(0, "-r", size=4) == {0: "-r"}
    with pytest.raises(UsageError, match="`-r 2 c`: none of these ranks is in the debugger"):
        prompts.answers(0, "-r 2 c", size=4)
    with pytest.raises(UsageError):
        prompts.answers(0, "-r 9 c", size=4)
    said = "ranks 0-1,3 are in the debugger, one at a time · `-r all c` goes to all of them"
    assert prompts.text == said
    assert repr(prompts) == "<Prompts of ranks 0-1,3>"


def test_nobody_asks():
    """There is nothing to say then."""
    prompts = asked(2, by_debugger=True)
    assert prompts.text == "rank 2 is in the debugger"
    prompts.drop(2, 1.0)
    assert prompts.next(2.0, unfinished={2}) is None
    assert prompts.text == ""
    assert repr(prompts) == "<Prompts of no rank>"
