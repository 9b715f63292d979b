"""Tests of `nbdist.world.task_run` and `hangs`: the errors of a task, and texts about waits."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

import pytest

from nbdist.config import Patience
from nbdist.errors import (
    AgentLost,
    CellTimeout,
    RanksNotStopped,
    RanksReleased,
    WorkerDied,
    WorkerError,
)
from nbdist.output.events import Died, Done, Failure, Text, TransferProgress
from nbdist.wire.messages import Decided, Decision, Located, UnresponsiveHosts
from nbdist.wire.places import Begun, RankPosition, is_call_mismatch
from nbdist.wire.work import CellCode, Task
from nbdist.world import hangs
from nbdist.world.ending import Ending
from nbdist.world.states import Machines
from nbdist.world.stop import StopEvent
from nbdist.world.task_error import error_of
from nbdist.world.task_run import Members, TaskRun
from nbdist.world.wait_texts import activity_text, waiting_text

WAITS = RankPosition(line=1, operation="barrier", is_calm=True)
STOPPED = Failure("KeyboardInterrupt", "", (), 2)


def running(
    *, ranks: int = 2, backend: str = "gloo", heals: bool = True, patience: Patience | None = None
) -> TaskRun:
    """Return a task that runs on all ranks of a world and has no output so far."""
    pids = {rank: 100 + rank for rank in range(ranks)}
    members = Members(ranks, backend, Machines.one("here", ranks), pids, {}, heals)
    task = Task("id", tuple(range(ranks)), CellCode("dist.barrier()"))
    return TaskRun(task, patience or Patience(), members)


def test_a_task_ends_when_all_ranks_are_done() -> None:
    """A task ends when all ranks are done or the agent is lost; each output is returned once."""
    task = running()
    task.receive(0, Text("stdout", "hello\n"))
    task.reports.moved = {0: TransferProgress(1, 10), 1: TransferProgress(2, 20)}
    task.receive(0, Done("ok", 0.1, bound=frozenset({"x"})))
    assert (task.unfinished, task.waits_after(0), task.reports.bytes_moved) == ((1,), True, (3, 30))
    assert [[rank for rank, _ in task.pop_outputs()] for _ in range(2)] == [[0, 0], []]
    assert (task.made, task.result().by_rank) == ({"x"}, {0: None})
    assert isinstance(error_of(task), RanksNotStopped)
    task.receive(1, Done("ok", 0.1))
    assert (task.unfinished, error_of(task)) == ((), None)
    task, lost = running(), AgentLost("here", -9)
    task.handle_agent_loss(lost)
    assert (task.unfinished, error_of(task)) == ((), lost)


def test_a_death_is_the_error_of_the_task() -> None:
    """The error of a task in which a rank died says what was done about the death."""
    task = running()
    task.receive(1, Died(-9, time.time_ns()))
    assert isinstance(error_of(task), RanksNotStopped)  # rank 0 still runs
    task.receive(0, Done("ok", 0.1))
    task.ending = Ending(recovery_text="It was replaced.")
    error = error_of(task)
    assert isinstance(error, WorkerDied)
    assert str(error).endswith("It was replaced.")


def abort(task: TaskRun, places: dict[int, RankPosition], *failed: int) -> None:
    """Tell the task that the agent aborts the collectives in which unfinished ranks wait."""
    waiting = {rank: place for rank, place in places.items() if rank in task.unfinished}
    decided = Decided("id", Decision.ABORT, waiting, places, frozenset(failed))
    task.handle_message(decided, time.monotonic())


def test_a_released_rank_is_no_cause() -> None:
    """A rank whose collective was aborted is the cause only if no other rank has failed."""
    task = running()
    task.receive(1, Done("ok", 0.1))
    abort(task, {0: WAITS, 1: RankPosition()})
    assert task.releases.aborted == {0: WAITS}
    task.receive(0, Failure("RuntimeError", "Connection closed", (), 1, connections="ended"))
    task.receive(0, Done("error", 0.1))
    error = error_of(task)
    assert isinstance(error, RanksReleased)
    assert error.rank == 0


LOST = Failure("RuntimeError", "Connection closed", ("Cell In[1], line 4",), 9, connections="ended")


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (Failure("ValueError", "bad", ("bad",), 1), "Ranks 0-1 were waiting in barrier"),
        (LOST, "ranks 0-1 wait in barrier, line 1. The waiting ranks were released"),
    ],
)
def test_a_failure_that_comes_after_the_decision_is_known_to_it(
    failure: Failure, message: str
) -> None:
    """The error is the same whether the failure or the agent's decision arrives first."""
    failure_first, decision_first = running(ranks=3), running(ranks=3)
    places = {0: WAITS, 1: WAITS}
    failure_first.receive(2, failure)
    failure_first.receive(2, Done("error", 0.1))
    for task in (failure_first, decision_first):
        decided = Decided("id", Decision.ABORT, places, places, frozenset({2}))
        task.handle_message(decided, 1.0)
    decision_first.receive(2, failure)
    decision_first.receive(2, Done("error", 0.1))
    for task in (failure_first, decision_first):
        for rank in (0, 1):
            task.receive(rank, LOST)
            task.receive(rank, Done("error", 0.1))
    assert str(error_of(failure_first)) == str(error_of(decision_first))
    assert message in str(error_of(decision_first))


def test_a_timeout_after_stop_changes_nothing() -> None:
    """If ranks were interrupted before, the deadline stays, and the timeout is not recorded."""
    task = running(patience=Patience(timeout=500.0))
    task.stop.handle(StopEvent.INTERRUPT, 10.0)
    before = task.stop.deadline, task.stop.interrupts
    task.handle_message(Decided("id", Decision.TIME_OUT, {0: WAITS}, {0: WAITS}), 12.0)
    assert (task.stop.deadline, task.stop.interrupts) == before
    assert task.ending.timed_out is None


def test_a_decision_about_another_task_is_ignored() -> None:
    """A decision about an earlier task does not change the present task."""
    task = running()
    task.handle_message(Decided("other", Decision.TIME_OUT, {0: WAITS}, {0: WAITS}), 1.0)
    assert (task.ending.timed_out, task.stop.is_stopping) == (None, False)


TIMED_OUT = Failure("RuntimeError", "Timed out", ("Timed out",), 5, connections="timed out")


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    ("peer", "message"),
    [
        (TIMED_OUT, "waited for a rank that had timed out (cell line 4)"),
        (TIMED_OUT._replace(connections=""), "waited for a rank that had failed (cell line 4)"),
        (Died(-9, 5), "waited for a rank that died (cell line 4)"),
        (Done("ok", 1.0), "waited for a rank that had closed its connection (cell line 4)"),
    ],
)
def test_a_released_rank_says_how_its_peer_ended(
    peer: Failure | Died | Done, message: str, *, is_first: bool
) -> None:
    """The message says how the other rank ended, whichever of the two is known first."""
    task = running(ranks=3)
    for rank, output in [(1, peer), (0, LOST), (2, LOST)][:: 1 if is_first else -1]:
        task.receive(rank, output)
    errors = task.transcript.errors
    assert [errors[rank].message for rank in (0, 2)] == [message] * 2
    assert isinstance(errors.get(1, peer), type(peer))


def test_a_rank_that_interrupts_itself_is_the_cause() -> None:
    """If nobody has pressed Stop, a KeyboardInterrupt of a rank is the error of the cell."""
    task = running()
    task.receive(1, Failure("KeyboardInterrupt", "mine", ("KeyboardInterrupt: mine",), 5))
    task.receive(1, Done("error", 0.1))
    abort(task, {0: WAITS, 1: RankPosition()}, 1)
    task.receive(0, Failure("RuntimeError", "Connection closed", (), 9, connections="ended"))
    task.receive(0, Done("error", 0.1))
    error = error_of(task)
    assert isinstance(error, WorkerError)
    assert not isinstance(error, RanksReleased)
    assert (error.rank, [*error.errors]) == (1, [1])
    assert "KeyboardInterrupt: mine. Rank 0 was waiting in barrier" in str(error)


def test_a_task_that_took_too_long_says_where_its_ranks_were() -> None:
    """After a timeout the error says where ranks were; a rank's own failure is raised instead."""
    task, failed = (running(patience=Patience(timeout=500.0)) for _ in range(2))
    places = {0: WAITS, 1: RankPosition(line=1)}
    for each, first in ((task, STOPPED), (failed, Failure("ValueError", "bad shard", (), 1))):
        each.handle_message(Decided("id", Decision.TIME_OUT, places, places), 5.0)
        assert each.stop.is_stopping
        for rank, failure in enumerate((first, STOPPED)):
            each.receive(rank, failure)
            each.receive(rank, Done("error", 0.1))
    assert isinstance(error_of(task), CellTimeout)
    assert "by `--timeout 500`: rank 0 waits in barrier" in str(error_of(task))
    assert "ValueError: bad shard" in str(error_of(failed))


def test_waits_and_silent_machines_are_named() -> None:
    """The text names waiting ranks; a silent machine or a stalled network is named instead."""
    task = running(patience=Patience(hang_timeout=0.0))
    task.handle_message(Located({0: WAITS, 1: RankPosition(line=2)}), 1.0)
    text = "rank 0 waits in barrier, line 1 · rank 1 is in line 2"
    assert activity_text(task) == waiting_text(task) == text
    task.receive(1, Done("ok", 0.1))
    assert waiting_text(task).endswith("· rank 1 finished")
    task = running()
    task.reports.silent = UnresponsiveHosts(("hosta",), 10.0)
    assert waiting_text(task) == "hosta does not respond and counts as lost after 10 s"
    task.reports.silent = UnresponsiveHosts(("hosta", "hostb"), 2.5)
    assert waiting_text(task) == "hosta and hostb do not respond and count as lost after 2.5 s"
    task.reports.silent = UnresponsiveHosts((), 2.5)
    task.handle_message(Located({0: replace(WAITS, stalled=(("10.0.0.1", "10.0.0.2"),))}), 1.0)
    assert waiting_text(task) == "the network between 10.0.0.2 and here is stalled"


# --- where ranks are ---------------------------------------------------------------------------


CALM = RankPosition(line=3, operation="barrier", counts={"0": 4}, moved=100, is_calm=True)
COMPUTES = RankPosition(line=2, counts={"0": 3}, moved=100, is_calm=True)
REDUCE = Begun("0", 5, "all_reduce", "[2]", "Float", "2")
BARRIER = Begun("0", 5, "barrier")
LARGER = replace(REDUCE, sizes="[3]", elements="3")
DOUBLE = replace(REDUCE, dtypes="Double")

ALL = {0: CALM, 1: CALM}


def test_equal_places_are_named_together() -> None:
    """Ranks at the same place are named together; a stalled network is named by its machines."""
    places = {0: CALM, 1: COMPUTES, 2: CALM, 3: RankPosition(holds_gil=True)}
    assert hangs.waits_text(places, "if rank == 1:\n    time.sleep(600)\ndist.barrier()") == (
        "ranks 0,2 wait in barrier, line 3 · rank 1 is in line 2: time.sleep(600) · "
        "rank 3 is busy in C code that holds the GIL"
    )
    asks = RankPosition(line=2, asks=True)
    assert hangs.waits_text({0: asks}) == "rank 0 waits for your input, line 2"
    assert hangs.waits_text({0: asks, 1: asks}) == "ranks 0-1 wait for your input, line 2"
    machines = Machines({0: ("hosta", 0), 1: ("hostb", 0)})
    one_side = {0: replace(CALM, stalled=(("10.0.0.1", "10.0.0.2"),)), 1: CALM}
    both_sides = {**one_side, 1: replace(CALM, stalled=(("10.0.0.2", "10.0.0.1"),))}
    text = "the network between {} and {} is stalled"
    assert hangs.stalled_text(one_side, machines) == text.format("10.0.0.2", "hosta")
    assert hangs.stalled_text(both_sides, machines) == text.format("hosta", "hostb")
    assert hangs.stalled_text(ALL, machines) == ""


# --- whether collectives match ------------------------------------------------------------


def waits(*begun: Begun, line: int = 2) -> RankPosition:
    """Return the place of a rank that waits in the last of its collectives."""
    return RankPosition(line=line, operation=begun[-1].name, begun=begun)


def done(*begun: Begun) -> RankPosition:
    """Return the place of a rank that has finished the cell."""
    return RankPosition(begun=tuple(replace(each, is_done=True) for each in begun))


OVER = replace(REDUCE, is_done=True), replace(BARRIER, is_done=True)


NEVER = "these calls do not match and would wait forever"


def test_the_verdict_names_calls_that_differ() -> None:
    """Calls of one group with the same number are compared; calls without a number are not."""
    for first, other in (
        (waits(REDUCE), waits(REDUCE)),
        (waits(REDUCE), waits(replace(BARRIER, number=6))),
        (waits(REDUCE), waits(replace(BARRIER, group="1"))),
        (waits(REDUCE), RankPosition(line=1, operation="recv")),
        (waits(OVER[0], replace(REDUCE, number=6)), waits(OVER[1], replace(REDUCE, number=6))),
    ):
        assert not is_call_mismatch({0: first, 1: other})
    three = {0: waits(REDUCE, line=3), 1: waits(BARRIER), 2: waits(BARRIER)}
    text = "ranks 1-2 are in barrier (line 2), rank 0 in all_reduce (line 3)"
    assert hangs.verdict(three) == f"{text}: {NEVER}"
    # Rank 0 has finished a broadcast that rank 1 has never begun.
    began = replace(REDUCE, name="broadcast", is_done=True), replace(BARRIER, number=6)
    assert hangs.verdict({0: waits(*began, line=3), 1: waits(BARRIER, line=3)}) == (
        f"ranks 0-1 are in barrier (line 3): {NEVER}; the first that differ: rank 0 broadcast, "
        "rank 1 barrier"
    )
    all_receive = {rank: RankPosition(line=4, operation="recv") for rank in range(3)}
    text = "ranks 0-2 are in recv (line 4): all ranks wait for each other"
    assert hangs.verdict(all_receive) == text
    text = "rank 0 is in recv (a.py line 4): all ranks wait for each other"
    assert hangs.verdict({0: RankPosition(file="a.py", line=4, operation="recv")}) == text


def test_differing_sizes_and_dtypes_are_named() -> None:
    """The text names differing sizes and dtypes by rank, and wrong results; shapes may differ."""
    both_differ = "sizes and dtypes differ: rank 0 float32 [3], rank 1 bfloat16 [2]"
    for first, second, difference in (
        (REDUCE, LARGER, "sizes differ: rank 0 [2], rank 1 [3]"),
        (REDUCE, DOUBLE, "dtypes differ: rank 0 float32, rank 1 float64"),
        (LARGER, replace(DOUBLE, dtypes="BFloat16"), both_differ),
    ):
        text = f"all_reduce (line 2), {difference}"
        wrong = f"{text}; the result on rank 0 is wrong"
        assert hangs.differing({0: done(first), 1: waits(second)}) == wrong
        assert hangs.differing({0: waits(first), 1: waits(second)}) == text
    flat = waits(replace(REDUCE, sizes="[4, 1]", elements="4"))
    square = waits(replace(REDUCE, sizes="[2, 2]", elements="4"))
    for one, other in ((flat, square), (waits(REDUCE), waits(BARRIER)), (flat, RankPosition())):
        assert hangs.differing({0: one, 1: other}) == ""


def test_an_abort_says_why_ranks_waited_in_vain() -> None:
    """The text says that other ranks have finished or do not run the cell, or that calls differ."""
    waiting = waits(REDUCE)
    places, released = {0: RankPosition(), 1: waiting}, {1: waiting}
    start = "rank 1 waits in all_reduce, line 2; "
    finished = hangs.why_aborted(released, places, [0, 1], {1}, 2)
    assert finished == f"{start}rank 0 finished the cell without it"
    assert (
        hangs.why_aborted(released, places, [1], {1}, 3) == f"{start}ranks 0,2 do not run this cell"
    )
    alone = hangs.why_aborted(released, places, [0, 1], {0, 1}, 2)
    assert alone == "rank 1 waits in all_reduce, line 2"
    places = {0: waits(BARRIER), 1: waiting, 2: RankPosition()}
    assert hangs.why_aborted({0: places[0], 1: places[1]}, places, [0, 1, 2], {0, 1}, 3) == (
        f"rank 0 is in barrier (line 2), rank 1 in all_reduce (line 2): {NEVER}; "
        "rank 2 finished the cell"
    )


def test_a_death_by_a_large_message_is_explained() -> None:
    """The text says that gloo ended a rank that received too much; for other deaths it is empty."""
    died = Died(-signal.SIGABRT, 0, received_too_much=True)
    assert hangs.why_died({0: died}, {1: done(DOUBLE), 2: done(REDUCE)}) == (
        "Rank 0 received more than its tensor holds: sizes or dtypes differ between ranks in "
        "all_reduce (rank 1 float64 [2], rank 2 float32 [2]). With `--debug` that is found before."
    )
    assert hangs.why_died({0: died}, {}).startswith("Rank 0 received more")
    assert hangs.why_died({0: died._replace(received_too_much=False)}, {1: done(DOUBLE)}) == ""
