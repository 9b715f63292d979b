"""Tests of `nbdist.world.states`: whose turn it is, and for whom a line is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbdist.config import Patience
from nbdist.errors import AgentLost, RanksNotStopped, RanksReleased, UsageError
from nbdist.output.events import Done, Failure, InputRequest, Moved
from nbdist.wire.messages import Silent
from nbdist.wire.views import Place
from nbdist.world.states import SETTLE_SECONDS, STAY_SECONDS, Prompts
from tests.world.test_running import WAITS, running


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


def test_nobody_asks():
    """There is nothing to say then."""
    prompts = asked(2, by_debugger=True)
    assert prompts.text == "rank 2 is in the debugger"
    prompts.drop(2, 1.0)
    assert prompts.next(2.0, unfinished={2}) is None
    assert prompts.text == ""


def test_who_waits_where() -> None:
    """It is said once it may be in vain; who has finished is named."""
    task = running(patience=Patience(hang_timeout=0.0))
    task.take_places({0: WAITS, 1: Place(line=2)}, 1.0)
    assert task.doing == task.waits == "rank 0 waits in barrier, line 1 · rank 1 is in line 2"
    task.receive(1, Done("ok", 0.1))
    assert task.waits.endswith("· rank 1 finished")


def test_machines_and_networks_that_are_silent() -> None:
    """They are named before anything else, whatever ranks do."""
    task = running()
    task.silent = Silent(("hosta",), 10.0)
    assert task.waits == "hosta does not respond and counts as lost after 10 s"
    task.silent = Silent(("hosta", "hostb"), 2.5)
    assert task.waits == "hosta and hostb do not respond and count as lost after 2.5 s"
    task.silent = Silent((), 2.5)
    task.take_places({0: replace(WAITS, stalled=(("10.0.0.1", "10.0.0.2"),))}, 1.0)
    assert task.waits == "the network between 10.0.0.2 and here is stalled"


def test_what_it_has_bound_and_moved() -> None:
    """Of all ranks together, as far as they have said."""
    task = running()
    task.moved = {0: Moved(1, 10), 1: Moved(2, 20)}
    assert task.bytes_moved == (3, 30)
    task.receive(0, Done("ok", 0.1, bound=frozenset({"x"})))
    assert (task.made, task.result().by_rank) == ({"x"}, {0: None})
    assert isinstance(task.error(), RanksNotStopped)  # the other has not ended it


def test_ranks_that_were_freed() -> None:
    """Where none has an error of its own, that is the error."""
    task, now = running(), 1.0
    task.take_places({0: WAITS, 1: Place()}, now)
    task.receive(1, Done("ok", 0.1))
    task.abort(now)
    task.receive(0, Failure("RuntimeError", "Connection closed", (), 1, connections="ended"))
    task.receive(0, Done("error", 0.1))
    error = task.error()
    assert isinstance(error, RanksReleased)
    assert error.rank == 0


def test_an_error_of_its_own_before_it_takes_too_long() -> None:
    """It is the cause, not that the others were stopped."""
    task = running(patience=Patience(timeout=1.0))
    task.receive(0, Failure("ValueError", "bad shard", (), 1))
    task.receive(0, Done("error", 0.1))
    task.timed_out = task.doing
    task.receive(1, Failure("KeyboardInterrupt", "", (), 2))
    task.receive(1, Done("error", 0.1))
    assert "ValueError: bad shard" in str(task.error())


def test_the_agent_is_lost() -> None:
    """All ranks have ended with it, and that is the error."""
    task, lost = running(), AgentLost("here", -9)
    task.take_loss(lost)
    assert task.unfinished == ()
    assert task.error() is lost
