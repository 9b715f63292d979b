"""Tests of `nbdist.world.sent`: what is known of a task, and what became of it."""

from __future__ import annotations

from dataclasses import replace

from nbdist.config import Patience
from nbdist.errors import AgentLost, RanksNotStopped, RanksReleased
from nbdist.output.events import Done, Failure, Moved
from nbdist.wire.messages import Silent
from nbdist.wire.places import Place
from tests.world.test_running import WAITS, running


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
    task.time_out()
    task.receive(1, Failure("KeyboardInterrupt", "", (), 2))
    task.receive(1, Done("error", 0.1))
    assert "ValueError: bad shard" in str(task.error())


def test_the_agent_is_lost() -> None:
    """All ranks have ended with it, and that is the error."""
    task, lost = running(), AgentLost("here", -9)
    task.take_loss(lost)
    assert task.unfinished == ()
    assert task.error() is lost
