"""Tests of `nbdist.world.task_run` and `hangs`: steps during a task, its errors and texts."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

import pytest

from nbdist.config import CONTROL_TIMEOUT, Patience
from nbdist.errors import (
    AgentLost,
    CellTimeout,
    RanksNotStopped,
    RanksReleased,
    WorkerDied,
    WorkerError,
)
from nbdist.output.events import Died, Done, Failure, InputRequest, Text, TransferProgress
from nbdist.wire.messages import Located, UnresponsiveHosts
from nbdist.wire.places import Begun, RankPosition
from nbdist.wire.work import CellCode, Task
from nbdist.world import hangs
from nbdist.world.hangs import (
    ALL_UNCHANGED,
    FIRST_LOCATE_DELAY,
    LOCATE_INTERVAL,
    SOON,
    UNCHANGED,
    HangDetector,
)
from nbdist.world.states import Machines
from nbdist.world.task_run import Members, Step, TaskRun

WAITS = RankPosition(line=1, operation="barrier", is_calm=True)
STOPPED = Failure("KeyboardInterrupt", "", (), 2)


def running(
    *, ranks: int = 2, backend: str = "gloo", heals: bool = True, patience: Patience | None = None
) -> TaskRun:
    """A task on all ranks of a world, with nothing shown so far."""
    pids = {rank: 100 + rank for rank in range(ranks)}
    members = Members(ranks, backend, Machines.one("here", ranks), pids, {}, heals)
    task = Task("id", tuple(range(ranks)), CellCode("dist.barrier()"))
    return TaskRun(task, patience or Patience(), members)


def looks(task: TaskRun, now: float) -> list[Step]:
    """Return the steps of three looks, at which rank 0 waits and rank 1 does nothing."""
    steps: list[Step] = []
    for number in range(3):
        steps += task.next_steps(now + 1.5 * (number + 1))
        task.handle_message(Located({0: WAITS, 1: RankPosition()}), now + 1.5 * (number + 1))
    return steps


def test_a_task_ends_when_all_ranks_are_done() -> None:
    """Each output is returned once; the loss of the agent ends all ranks."""
    task = running()
    task.receive(0, Text("stdout", "hello\n"))
    task.moved = {0: TransferProgress(1, 10), 1: TransferProgress(2, 20)}
    task.receive(0, Done("ok", 0.1, bound=frozenset({"x"})))
    assert (task.unfinished, task.waits_after(0), task.bytes_moved) == ((1,), True, (3, 30))
    assert [[rank for rank, _ in task.pop_outputs()] for _ in range(2)] == [[0, 0], []]
    assert (task.made, task.result().by_rank) == ({"x"}, {0: None})
    assert isinstance(task.error(), RanksNotStopped)
    task.receive(1, Done("ok", 0.1))
    assert (task.unfinished, task.error()) == ((), None)
    assert [*task.next_steps(time.monotonic())] == []
    task, lost = running(), AgentLost("here", -9)
    task.handle_agent_loss(lost)
    assert (task.unfinished, task.error()) == ((), lost)


@pytest.mark.parametrize(
    ("backend", "heals", "step"),
    [
        ("gloo", True, [Step.ABORT_FOR_DEAD]),
        ("gloo", False, [Step.END_SURVIVORS]),
        ("none", True, []),
        ("none", False, [Step.END_SURVIVORS]),
    ],
)
def test_a_death_frees_or_ends_survivors(backend: str, *, heals: bool, step: list[Step]) -> None:
    """After a death other ranks are released or ended once, as the policy says."""
    now, task = time.monotonic(), running(backend=backend, heals=heals)
    task.receive(1, Died(-9, time.time_ns()))
    assert [*task.next_steps(now)] == step
    assert [*task.next_steps(now)] == []
    assert isinstance(task.error(), RanksNotStopped)  # rank 0 still runs
    task.receive(0, Done("ok", 0.1))
    task.recovery_text = "It was replaced."
    error = task.error()
    assert isinstance(error, WorkerDied)
    assert str(error).endswith("It was replaced.")


def test_ranks_that_wait_for_a_finished_rank_are_released() -> None:
    """Two looks with equal places are enough to release a rank; after Stop its agent does that."""
    task, stopped, now = running(), running(), time.monotonic()
    for each in (task, stopped):
        each.receive(1, Done("ok", 0.1))
    assert looks(task, now) == [Step.LOCATE, Step.LOCATE, Step.ABORT]
    task.abort(now + 5)
    assert task.aborted == {0: WAITS}
    stopped.stop(now)
    assert looks(stopped, now) == [Step.LOCATE] * 3
    task.receive(0, Failure("RuntimeError", "Connection closed", (), 1, connections="ended"))
    task.receive(0, Done("error", 0.1))
    error = task.error()
    assert isinstance(error, RanksReleased)
    assert error.rank == 0


@pytest.mark.parametrize("backend", ["gloo", "none"])
def test_a_task_that_is_not_watched_is_not_polled(backend: str) -> None:
    """A notebook that has nothing to ask ranks waits, and does not look again at once."""
    task, now = running(backend=backend), time.monotonic() + FIRST_LOCATE_DELAY
    is_watched = backend != "none"
    assert (task.seconds_to_poll(now) == 0) == is_watched
    assert ([*task.next_steps(now)] == [Step.LOCATE]) == is_watched
    asks = running()
    asks.receive(1, InputRequest(1, "name: "))
    assert asks.seconds_to_poll(now) == float("inf")
    assert [*asks.next_steps(now)] == []


LOST = Failure("RuntimeError", "Connection closed", ("Cell In[1], line 4",), 9, connections="ended")
LATE = Failure("RuntimeError", "Timed out", ("Timed out",), 5, connections="timed out")


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    ("peer", "said"),
    [
        (LATE, "waited for a rank that had timed out (cell line 4)"),
        (LATE._replace(connections=""), "waited for a rank that had failed (cell line 4)"),
        (Died(-9, 5), "waited for a rank that died (cell line 4)"),
        (Done("ok", 1.0), "waited for a rank that had closed its connection (cell line 4)"),
    ],
)
def test_a_released_rank_says_how_its_peer_ended(
    peer: Failure | Died | Done, said: str, *, is_first: bool
) -> None:
    """The message says how the other rank ended, whichever of the two is known first."""
    task = running(ranks=3)
    for rank, output in [(1, peer), (0, LOST), (2, LOST)][:: 1 if is_first else -1]:
        task.receive(rank, output)
    errors = task.transcript.errors
    assert [errors[rank].message for rank in (0, 2)] == [said] * 2
    assert isinstance(errors.get(1, peer), type(peer))


def test_a_rank_that_interrupts_itself_is_the_cause() -> None:
    """If nobody has pressed Stop, a KeyboardInterrupt of a rank is the error of the cell."""
    task, now = running(), time.monotonic()
    task.receive(1, Failure("KeyboardInterrupt", "mine", ("KeyboardInterrupt: mine",), 5))
    task.receive(1, Done("error", 0.1))
    assert looks(task, now)[-1] is Step.ABORT
    task.abort(now + 5)
    task.receive(0, Failure("RuntimeError", "Connection closed", (), 9, connections="ended"))
    task.receive(0, Done("error", 0.1))
    error = task.error()
    assert isinstance(error, WorkerError)
    assert not isinstance(error, RanksReleased)
    assert (error.rank, [*error.errors]) == (1, [1])
    assert "KeyboardInterrupt: mine. Rank 0 was waiting in barrier" in str(error)


def test_nccl_ranks_are_not_released_at_once() -> None:
    """nccl2 notices an end within a second; until then a computing rank seems to wait."""
    task, now = running(backend="nccl"), time.monotonic()
    task.receive(1, Failure("ValueError", "bad", ("bad",), 1))
    task.receive(1, Done("error", 0.1))
    seems = RankPosition(line=2, operation="all_reduce")
    for tenths in range(13):
        task.handle_message(Located({0: seems, 1: RankPosition()}), now + tenths / 10)
        assert Step.ABORT not in task.next_steps(now + tenths / 10)
    task.handle_message(Located({0: seems, 1: RankPosition()}), now + 2)
    assert [*task.next_steps(now + 2)] == [Step.ABORT]


def test_no_rank_is_located_during_a_prompt() -> None:
    """While a rank's prompt waits for the user, nobody asks where the ranks are."""
    task, now = running(), time.monotonic()
    task.receive(1, InputRequest(1, "(Pdb) "))
    assert [*task.next_steps(now + 60)] == []
    task.prompts.answered(1, now + 60)
    assert [*task.next_steps(now + 60)] == [Step.LOCATE]


@pytest.mark.parametrize("backend", ["gloo", "none"])
def test_a_task_that_takes_too_long_is_stopped_once(backend: str) -> None:
    """The error says where the ranks were; time at a prompt does not count."""
    assert running(patience=Patience(timeout=0.5)).seconds_to_poll(time.monotonic()) <= 0.5
    task = running(backend=backend, patience=Patience(hang_timeout=1000.0, timeout=500.0))
    now = time.monotonic()
    assert Step.TIME_OUT not in task.next_steps(now + 490)
    task.prompts.receive(0, InputRequest(1, "name? "), now)
    assert Step.TIME_OUT not in task.next_steps(now + 600)
    task.prompts.drop(0, now + 600)
    assert Step.TIME_OUT in task.next_steps(now + 1101)
    task.handle_message(Located({0: WAITS, 1: RankPosition(line=1)}), now)
    task.timed_out = task.doing
    task.stop(now + 1101)
    assert Step.TIME_OUT not in task.next_steps(now + 1200)
    failed = running(backend=backend, patience=Patience(timeout=500.0))
    failed.timed_out = task.timed_out
    for each, first in ((task, STOPPED), (failed, Failure("ValueError", "bad shard", (), 1))):
        for rank, failure in enumerate((first, STOPPED)):
            each.receive(rank, failure)
            each.receive(rank, Done("error", 0.1))
    assert isinstance(task.error(), CellTimeout)
    assert "by `--timeout 500`: rank 0 waits in barrier" in str(task.error())
    assert "ValueError: bad shard" in str(failed.error())


def test_only_keyboard_interrupts_count_as_stops() -> None:
    """Other errors are the consumer's; without a timeout Stop goes on until all ranks end."""
    task = running(patience=Patience(control_timeout=None))
    with task.counting_stops():
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="drawn"), task.counting_stops():
        raise ValueError("drawn")
    assert task.stops == 1
    other = running()
    for each in (task, other):
        each.stops = 2
        each.stop(10.0)
    assert (task.give_up_at, task.wants_control(0)) == (float("inf"), False)
    assert (other.give_up_at, other.wants_control(0)) == (10.0 + CONTROL_TIMEOUT, True)


@pytest.mark.parametrize(("backend", "ended"), [("gloo", (0,)), ("cpu:gloo,cuda:nccl", ())])
def test_a_rank_that_no_abort_wakes_is_ended(backend: str, ended: tuple[int, ...]) -> None:
    """A rank that still waits calmly after three aborts is ended, but not a rank that moved on."""
    task, now = running(ranks=3, backend=backend), time.monotonic()
    task.receive(2, Done("ok", 0.1))
    steps: list[Step] = []
    while len(steps) < 4:
        now += 1.0
        goes_on = replace(WAITS, moved=len(steps))
        task.handle_message(Located({0: WAITS, 1: goes_on, 2: RankPosition()}), now)
        for step in set(task.next_steps(now)) - {Step.LOCATE}:
            steps.append(step)
            assert task.unwakeable == (ended if len(steps) == 4 else ())
            task.abort(now)
    assert steps == [Step.ABORT] * 3 + [Step.END_UNWAKEABLE if ended else Step.ABORT]


def test_waits_and_silent_machines_are_named() -> None:
    """Ranks are named if their wait may be in vain; silent machines and networks come first."""
    task = running(patience=Patience(hang_timeout=0.0))
    task.handle_message(Located({0: WAITS, 1: RankPosition(line=2)}), 1.0)
    assert task.doing == task.waits == "rank 0 waits in barrier, line 1 · rank 1 is in line 2"
    task.receive(1, Done("ok", 0.1))
    assert task.waits.endswith("· rank 1 finished")
    task = running()
    task.silent = UnresponsiveHosts(("hosta",), 10.0)
    assert task.waits == "hosta does not respond and counts as lost after 10 s"
    task.silent = UnresponsiveHosts(("hosta", "hostb"), 2.5)
    assert task.waits == "hosta and hostb do not respond and count as lost after 2.5 s"
    task.silent = UnresponsiveHosts((), 2.5)
    task.handle_message(Located({0: replace(WAITS, stalled=(("10.0.0.1", "10.0.0.2"),))}), 1.0)
    assert task.waits == "the network between 10.0.0.2 and here is stalled"


# --- whether ranks that wait can go on --------------------------------------------------------


CALM = RankPosition(line=3, operation="barrier", counts={"0": 4}, moved=100, is_calm=True)
COMPUTES = RankPosition(line=2, counts={"0": 3}, moved=100, is_calm=True)
REDUCE = Begun("0", 5, "all_reduce", "[2]", "Float", "2")
BARRIER = Begun("0", 5, "barrier")
LARGER = replace(REDUCE, sizes="[3]", elements="3")
DOUBLE = replace(REDUCE, dtypes="Double")

Places = dict[int, RankPosition]
ONE, BOTH, ALL = {0: CALM}, {0: CALM, 2: CALM}, {0: CALM, 1: CALM}
BUSY = {0: replace(CALM, is_calm=False)}


def watch(*looks: Places, every: float = SOON) -> HangDetector:
    """Return a HangDetector that has got the places of each look, `every` seconds apart."""
    found = HangDetector(0.0)
    for number, places in enumerate(looks):
        found.record_places(places, number * every)
    return found


@pytest.mark.parametrize(
    ("looks", "every", "never"),
    [
        ([BOTH], SOON, False),
        ([BOTH, BOTH], SOON, True),
        ([{0: COMPUTES, 2: CALM}] * 2, SOON, False),
        ([BOTH, {**BOTH, 2: replace(CALM, moved=101)}], SOON, False),
        ([BOTH, {**BOTH, 2: replace(CALM, counts={"0": 5})}], SOON, False),
        ([BOTH, {**BOTH, 2: replace(CALM, line=4)}], SOON, False),
        ([BOTH, {**BOTH, 2: replace(CALM, operation="all_reduce")}], SOON, False),
        ([ONE, ONE], SOON, False),
        ([{**BOTH, **BUSY}] * 3, UNCHANGED, True),
        ([{**BOTH, **BUSY}, BOTH], SOON, True),
    ],
)
def test_equal_waits_count_as_a_deadlock(looks: list[Places], every: float, *, never: bool) -> None:
    """Two looks with equal places are enough; threads at work delay that, but not for ever."""
    now = (len(looks) - 1) * every
    assert watch(*looks, every=every).is_deadlocked((0, 2), now) is never


def test_news_on_its_way_delays_a_deadlock() -> None:
    """A rank that has just finished, or bytes in flight, which TCP repeats, may end a wait."""
    found = watch(BOTH, BOTH, BOTH)
    found.restart()
    assert found.places == BOTH
    assert not found.is_deadlocked((0,), 3 * SOON)
    for number, is_enough in ((3, False), (4, True)):
        found.record_places(ONE, number * SOON)
        assert found.is_deadlocked((0,), number * SOON) is is_enough
    found.restart()
    for now in (10 * UNCHANGED, 10 * UNCHANGED + SOON):
        found.record_places(BUSY, now)
    assert not found.is_deadlocked((0,), 10 * UNCHANGED + SOON)
    found = watch(ONE, ONE)
    for now, in_flight in ((SOON, 0), (2 * SOON, 1), (500.0, 1), (501.0, 0)):
        found.record_places(ONE, now, in_flight=in_flight)
        assert found.is_deadlocked((0,), now) is (not in_flight)


def test_ranks_are_located_sooner_if_some_wait() -> None:
    """Looks are rare while all ranks work, and come soon if a rank has finished or all wait."""
    found = HangDetector(10.0)
    assert found.seconds_to_poll(10.0) == FIRST_LOCATE_DELAY
    assert HangDetector(10.0, hang_timeout=0.5).seconds_to_poll(10.0) == 0.5
    found.poll_fast(10.5)
    assert found.seconds_to_poll(10.5) == pytest.approx(SOON)
    found.record_request(11.2)
    assert found.seconds_to_poll(11.5) > 0
    found.record_places({0: CALM}, 11.5)
    assert found.seconds_to_poll(11.5) == pytest.approx(SOON)
    found = watch(ALL)
    assert found.seconds_to_poll(0.0) == pytest.approx(SOON)
    found.record_places({0: CALM, 1: replace(CALM, counts={"0": 5})}, SOON)
    assert found.seconds_to_poll(SOON) == pytest.approx(LOCATE_INTERVAL)


def test_mutual_waits_end_if_known_or_long() -> None:
    """Mutual waits go on until calls are known not to match, or nothing has moved for long."""
    found = watch(ALL, ALL)
    assert found.is_dead_end((0, 1), SOON, is_known=True)
    assert not found.is_dead_end((0, 1), SOON, is_known=False)
    assert found.is_dead_end((0, 1), ALL_UNCHANGED, is_known=False)
    at_work = watch({**ALL, **BUSY}, {**ALL, **BUSY}, every=UNCHANGED)
    assert not at_work.is_dead_end((0, 1), UNCHANGED, is_known=True)
    assert at_work.is_dead_end((0, 1), UNCHANGED, is_known=True, runs_ahead=True)
    assert not at_work.is_dead_end((0, 1), UNCHANGED, is_known=False, runs_ahead=True)
    assert not watch({0: CALM, 1: COMPUTES}, ALL).is_dead_end((0, 1), SOON, is_known=True)
    helped = {0: CALM, 1: replace(CALM, has_help=True)}  # by a thread that may end the wait
    found = watch(helped, helped)
    assert not found.is_dead_end((0, 1), 1000.0, is_known=False)
    assert found.is_dead_end((0, 1), 1000.0, is_known=True)


def test_equal_places_are_named_together() -> None:
    """Ranks with equal places are named together, with their line; networks by their machines."""
    places = {0: CALM, 1: COMPUTES, 2: CALM, 3: RankPosition(holds_gil=True)}
    assert hangs.waits_text(places, "if rank == 1:\n    time.sleep(600)\ndist.barrier()") == (
        "ranks 0,2 wait in barrier, line 3 · rank 1 is in line 2: time.sleep(600) · "
        "rank 3 is busy in C code that holds the GIL"
    )
    asks = RankPosition(line=2, asks=True)
    assert hangs.waits_text({0: asks}) == "rank 0 waits for your input, line 2"
    assert hangs.waits_text({0: asks, 1: asks}) == "ranks 0-1 wait for your input, line 2"
    machines = Machines({0: ("hosta", 0), 1: ("hostb", 0)})
    one = {0: replace(CALM, stalled=(("10.0.0.1", "10.0.0.2"),)), 1: CALM}
    both = {**one, 1: replace(CALM, stalled=(("10.0.0.2", "10.0.0.1"),))}
    said = "the network between {} and {} is stalled"
    assert hangs.stalled_text(one, machines) == said.format("10.0.0.2", "hosta")
    assert hangs.stalled_text(both, machines) == said.format("hosta", "hostb")
    assert hangs.stalled_text(ALL, machines) == ""


# --- whether collectives meet -------------------------------------------------------------


def waits(*begun: Begun, line: int = 2) -> RankPosition:
    """Return the place of a rank that waits in the last of its collectives."""
    return RankPosition(line=line, operation=begun[-1].name, begun=begun)


def done(*begun: Begun) -> RankPosition:
    """Return the place of a rank that has finished the cell."""
    return RankPosition(begun=tuple(replace(each, is_done=True) for each in begun))


OVER = replace(REDUCE, is_done=True), replace(BARRIER, is_done=True)


NEVER = "these calls do not match and would wait forever"


def test_the_verdict_names_calls_that_differ() -> None:
    """Calls of equal number in a group are compared; if a number is unknown, nothing is decided."""
    for first, other in (
        (waits(REDUCE), waits(REDUCE)),
        (waits(REDUCE), waits(replace(BARRIER, number=6))),
        (waits(REDUCE), waits(replace(BARRIER, group="1"))),
        (waits(REDUCE), RankPosition(line=1, operation="recv")),
        (waits(OVER[0], replace(REDUCE, number=6)), waits(OVER[1], replace(REDUCE, number=6))),
    ):
        assert not hangs.is_call_mismatch({0: first, 1: other})
    three = {0: waits(REDUCE, line=3), 1: waits(BARRIER), 2: waits(BARRIER)}
    said = "ranks 1-2 are in barrier (line 2), rank 0 in all_reduce (line 3)"
    assert hangs.verdict(three) == f"{said}: {NEVER}"
    # Rank 0 has finished a broadcast that rank 1 has never begun.
    began = replace(REDUCE, name="broadcast", is_done=True), replace(BARRIER, number=6)
    assert hangs.verdict({0: waits(*began, line=3), 1: waits(BARRIER, line=3)}) == (
        f"ranks 0-1 are in barrier (line 3): {NEVER}; the first that differ: rank 0 broadcast, "
        "rank 1 barrier"
    )
    all_receive = {rank: RankPosition(line=4, operation="recv") for rank in range(3)}
    said = "ranks 0-2 are in recv (line 4): all ranks wait for each other"
    assert hangs.verdict(all_receive) == said
    said = "rank 0 is in recv (a.py line 4): all ranks wait for each other"
    assert hangs.verdict({0: RankPosition(file="a.py", line=4, operation="recv")}) == said


def test_differing_sizes_and_dtypes_are_named() -> None:
    """The text has each rank's values and wrong results; shapes of equal size do not differ."""
    both = "sizes and dtypes differ: rank 0 float32 [3], rank 1 bfloat16 [2]"
    for first, second, told in (
        (REDUCE, LARGER, "sizes differ: rank 0 [2], rank 1 [3]"),
        (REDUCE, DOUBLE, "dtypes differ: rank 0 float32, rank 1 float64"),
        (LARGER, replace(DOUBLE, dtypes="BFloat16"), both),
    ):
        said = f"all_reduce (line 2), {told}"
        wrong = f"{said}; the result on rank 0 is wrong"
        assert hangs.differing({0: done(first), 1: waits(second)}) == wrong
        assert hangs.differing({0: waits(first), 1: waits(second)}) == said
    flat = waits(replace(REDUCE, sizes="[4, 1]", elements="4"))
    square = waits(replace(REDUCE, sizes="[2, 2]", elements="4"))
    for one, other in ((flat, square), (waits(REDUCE), waits(BARRIER)), (flat, RankPosition())):
        assert hangs.differing({0: one, 1: other}) == ""


def test_an_abort_says_why_ranks_waited_in_vain() -> None:
    """Other ranks have finished or do not run the cell, or calls do not match."""
    waiting = waits(REDUCE)
    seen, freed = {0: RankPosition(), 1: waiting}, {1: waiting}
    said = "rank 1 waits in all_reduce, line 2; "
    finished = hangs.why_aborted(freed, seen, [0, 1], {1}, 2)
    assert finished == f"{said}rank 0 finished the cell without it"
    assert hangs.why_aborted(freed, seen, [1], {1}, 3) == f"{said}ranks 0,2 do not run this cell"
    alone = hangs.why_aborted(freed, seen, [0, 1], {0, 1}, 2)
    assert alone == "rank 1 waits in all_reduce, line 2"
    seen = {0: waits(BARRIER), 1: waiting, 2: RankPosition()}
    assert hangs.why_aborted({0: seen[0], 1: seen[1]}, seen, [0, 1, 2], {0, 1}, 3) == (
        f"rank 0 is in barrier (line 2), rank 1 in all_reduce (line 2): {NEVER}; "
        "rank 2 finished the cell"
    )


def test_a_death_by_a_large_message_is_explained() -> None:
    """Gloo ends a process that receives too much; for other deaths the text is empty."""
    died = Died(-signal.SIGABRT, 0, received_too_much=True)
    assert hangs.why_died(0, died, {1: done(DOUBLE), 2: done(REDUCE)}) == (
        "Rank 0 received more than its tensor holds: sizes or dtypes differ between ranks in "
        "all_reduce (rank 1 float64 [2], rank 2 float32 [2]). With `--debug` that is found before."
    )
    assert hangs.why_died(0, died, {}).startswith("Rank 0 received more")
    assert hangs.why_died(0, died._replace(received_too_much=False), {1: done(DOUBLE)}) == ""
