"""Tests of `nbdist.agent.supervisor` and `hang_detector`: what is decided from which facts."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from nbdist.agent.hang_detector import (
    ALL_UNCHANGED,
    FIRST_LOCATE_DELAY,
    LOCATE_INTERVAL,
    SOON,
    UNCHANGED,
    HangDetector,
)
from nbdist.agent.supervisor import LOCATE, Supervision, Supervisor
from nbdist.config import HANG_TIMEOUT
from nbdist.output.events import Died, Done, Failure, InputRequest
from nbdist.wire.messages import Decided, Decision, Down, Interrupt, Located, Rules, RunTask, Up
from nbdist.wire.places import LOCATED_TIMEOUT, RankPosition
from tests.waiting import until

WAITS = RankPosition(line=1, operation="barrier", is_calm=True)
OK = Done("ok", 0.1)
FAILED = Failure("ValueError", "bad", ("bad",), 1)

Steps = list[Decision | str]


def supervisor(ranks: int = 2, backend: str = "gloo", **rules: bool | float) -> Supervisor:
    """A supervisor of a task on all ranks, begun at second 0; `rules` are fields of `Rules`."""
    return Supervisor(range(ranks), Rules(ranks, backend, **rules), 0.0)  # type: ignore[arg-type]


def looks(watched: Supervisor, now: float = 0.0) -> Steps:
    """Return what is decided at three looks, in which rank 0 waits and rank 1 does nothing."""
    steps: Steps = []
    for _ in range(3):
        now += 1.5
        steps += watched.next_steps(now)
        watched.record_places({0: WAITS, 1: RankPosition()}, now)
    return steps


@pytest.mark.parametrize(
    ("backend", "heals", "step"),
    [
        ("gloo", True, [Decision.ABORT_FOR_DEAD]),
        ("gloo", False, [Decision.END_SURVIVORS]),
        ("none", True, []),
        ("none", False, [Decision.END_SURVIVORS]),
    ],
)
def test_a_death_frees_or_ends_survivors(backend: str, *, heals: bool, step: Steps) -> None:
    """After a death other ranks are released or ended once, as the policy says."""
    watched = supervisor(backend=backend, heals=heals)
    watched.receive(1, Died(-9, 1), 0.1)
    assert [*watched.next_steps(0.1)] == step
    assert [*watched.next_steps(0.1)] == []
    watched.receive(0, OK, 0.2)
    assert not watched.unfinished
    assert [*watched.next_steps(100.0)] == []


def test_ranks_that_wait_for_a_finished_rank_are_released() -> None:
    """A rank that waits for a finished rank is released after two looks with equal places.

    The supervisor releases no rank after Stop, or if the rules have `aborts=False`.
    """
    watched, stopped, patient = supervisor(), supervisor(), supervisor(aborts=False)
    for each in (watched, stopped, patient):
        each.receive(1, OK, 0.0)
    assert looks(watched) == [LOCATE, LOCATE, Decision.ABORT]
    stopped.record_stop(0.0)
    assert looks(stopped) == [LOCATE] * 3
    assert looks(patient) == [LOCATE] * 3


@pytest.mark.parametrize("backend", ["gloo", "none"])
def test_a_task_that_is_not_watched_is_not_polled(backend: str) -> None:
    """Without a group nobody asks where ranks are."""
    watched, now = supervisor(backend=backend), FIRST_LOCATE_DELAY
    is_watched = backend != "none"
    assert (watched.seconds_to_step(now) == 0) == is_watched
    assert ([*watched.next_steps(now)] == [LOCATE]) == is_watched


def test_no_rank_is_located_during_a_prompt() -> None:
    """While a rank's prompt waits for the user, nobody asks where the ranks are."""
    watched = supervisor()
    watched.receive(1, InputRequest(1, "(Pdb) "), 0.1)
    assert watched.seconds_to_step(60.0) == float("inf")
    assert [*watched.next_steps(60.0)] == []
    watched.record_input(1, 60.0)
    assert [*watched.next_steps(60.0)] == [LOCATE]


def test_nccl_ranks_are_not_released_at_once() -> None:
    """A rank that seems to wait in nccl is released only later, as it may still be computing.

    nccl2 notices the end of a collective within a second.
    """
    watched = supervisor(backend="nccl")
    watched.receive(1, FAILED, 0.0)
    watched.receive(1, Done("error", 0.1), 0.0)
    seems = {0: RankPosition(line=2, operation="all_reduce"), 1: RankPosition()}
    for tenths in range(13):
        watched.record_places(seems, tenths / 10)
        assert Decision.ABORT not in watched.next_steps(tenths / 10)
    watched.record_places(seems, 2.0)
    assert [*watched.next_steps(2.0)] == [Decision.ABORT]


@pytest.mark.parametrize("backend", ["gloo", "none"])
def test_a_task_that_takes_too_long_is_stopped_once(backend: str) -> None:
    """A timeout first asks where the ranks are; time at a prompt does not count."""
    assert supervisor(timeout=0.5).seconds_to_step(0.0) <= 0.5
    watched = supervisor(backend=backend, hang_timeout=1000.0, timeout=500.0)
    assert Decision.TIME_OUT not in watched.next_steps(490.0)
    watched.receive(0, InputRequest(1, "name? "), 490.0)
    assert Decision.TIME_OUT not in watched.next_steps(1000.0)
    watched.record_input(0, 1000.0)
    assert watched.seconds_to_step(1009.0) <= 1.0
    assert [*watched.next_steps(1010.5)] == [LOCATE]
    assert Decision.TIME_OUT not in watched.next_steps(1010.6)
    watched.record_places({0: WAITS, 1: RankPosition(line=1)}, 1010.7)
    assert watched.seconds_to_step(1010.7) == 0
    assert Decision.TIME_OUT in watched.next_steps(1010.7)
    assert Decision.TIME_OUT not in watched.next_steps(2000.0)


def test_ranks_that_do_not_answer_are_stopped_too() -> None:
    """A timeout stops ranks even if their places are not known after `LOCATED_TIMEOUT`."""
    watched = supervisor(backend="none", timeout=5.0)
    assert [*watched.next_steps(5.0)] == [LOCATE]
    assert watched.seconds_to_step(5.0) == pytest.approx(LOCATED_TIMEOUT)
    assert [*watched.next_steps(5.0 + LOCATED_TIMEOUT)] == [Decision.TIME_OUT]


async def test_a_stop_that_crosses_a_timeout_is_no_second_stop() -> None:
    """A first Stop that arrives after a timeout has interrupted its ranks interrupts no rank."""
    has_decided = asyncio.Event()
    supervision = Supervision(lambda _: None, lambda _: has_decided.set())
    supervision.receive(RunTask("id", (0, 1), b"", rules=Rules(2, timeout=0.0)))
    assert not supervision.is_repeated(Interrupt((0,)))
    await asyncio.sleep(0)
    supervision.report(Located({0: WAITS, 1: WAITS}))
    await has_decided.wait()
    assert supervision.is_repeated(Interrupt((0,)))
    assert not supervision.is_repeated(Interrupt((0,), 2))
    assert not supervision.is_repeated(Interrupt((5,)))
    supervision.close()


@pytest.mark.parametrize("holds_stop", [False, True])
async def test_a_timeout_interrupts_the_ranks_that_still_run(*, holds_stop: bool) -> None:
    """A timeout interrupts ranks that have not finished, but none if `holds_stop` is set."""
    has_decided, carried_out = asyncio.Event(), list[Down]()
    supervision = Supervision(carried_out.append, lambda _: has_decided.set())
    rules = Rules(3, timeout=0.0, holds_stop=holds_stop)
    supervision.receive(RunTask("id", (0, 1, 2), b"", rules=rules))
    supervision.observe(2, "id", OK)
    await until(has_decided.is_set)
    interrupts = [each for each in carried_out if isinstance(each, Interrupt)]
    assert interrupts == ([] if holds_stop else [Interrupt((0, 1))])
    supervision.close()


@pytest.mark.parametrize(("backend", "ended"), [("gloo", (0,)), ("cpu:gloo,cuda:nccl", ())])
def test_a_rank_that_no_abort_wakes_is_ended(backend: str, ended: tuple[int, ...]) -> None:
    """A gloo rank that waits as before after three aborts is ended; a rank that moved is not."""
    watched, now, steps = supervisor(3, backend), 0.0, Steps()
    watched.receive(2, OK, now)
    while len(steps) < 4:
        now += 1.0
        goes_on = replace(WAITS, moved=len(steps))
        watched.record_places({0: WAITS, 1: goes_on, 2: RankPosition()}, now)
        for step in {*watched.next_steps(now)} - {LOCATE}:
            steps.append(step)
            assert watched.unwakeable == (ended if len(steps) == 4 else ())
            watched.record_abort(now)
    last = Decision.END_UNWAKEABLE if ended else Decision.ABORT
    assert steps == [Decision.ABORT] * 3 + [last]


def test_a_rank_that_exits_slowly_is_ended_once() -> None:
    """Until the process of a rank that is ended has exited, nothing else is decided."""
    watched, now, steps = supervisor(3), 0.0, Steps()
    watched.receive(2, OK, now)
    while Decision.END_UNWAKEABLE not in steps:
        now += 1.0
        watched.record_places({0: WAITS, 1: WAITS, 2: RankPosition()}, now)
        for step in watched.next_steps(now):
            steps.append(step)
            watched.record_abort(now) if step is Decision.ABORT else None
    assert LOCATE in watched.next_steps(now + 10)
    assert [*watched.next_steps(now + 10)] == []
    assert watched.seconds_to_step(now + 10) > 0


def test_a_dead_rank_is_not_among_the_waiting() -> None:
    """A rank that died in a collective was not released from it."""
    watched = supervisor(3)
    watched.receive(2, FAILED, 0.0)
    watched.record_places(dict.fromkeys(range(3), WAITS), 0.1)
    watched.receive(1, Died(-9, 1), 0.2)
    assert watched.waiting.keys() == {0, 2}


def test_decisions_are_kept_once_of_each_kind() -> None:
    """A program that waits again after each abort does not fill the memory of the agent."""
    sent: list[Up] = []

    async def supervise() -> Supervision:
        supervision = Supervision(lambda _: None, sent.append)
        supervision.receive(RunTask("task", (0, 1, 2), b"", (), Rules(3, "gloo")))
        supervision.observe(2, "task", OK)
        for number in range(40):
            goes_on = replace(WAITS, moved=len(sent))
            supervision.report(Located({0: goes_on, 1: goes_on, 2: RankPosition(line=number)}))
            await asyncio.sleep(SOON / 2)
            if len(sent) == 2:
                break
        supervision.close()
        return supervision

    supervision = asyncio.run(supervise())
    assert [each.decision for each in sent if isinstance(each, Decided)] == [Decision.ABORT] * 2
    assert supervision.decided == (sent[1],)


# --- whether ranks that wait can go on --------------------------------------------------------


CALM = RankPosition(line=3, operation="barrier", counts={"0": 4}, moved=100, is_calm=True)
COMPUTES = RankPosition(line=2, counts={"0": 3}, moved=100, is_calm=True)
Places = dict[int, RankPosition]
ONE, BOTH, ALL = {0: CALM}, {0: CALM, 2: CALM}, {0: CALM, 1: CALM}
BUSY = {0: replace(CALM, is_calm=False)}


def watch(*looks: Places, every: float = SOON) -> HangDetector:
    """Return a HangDetector that has got the places of each look, `every` seconds apart."""
    found = HangDetector(0.0, HANG_TIMEOUT)
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
    found = HangDetector(10.0, HANG_TIMEOUT)
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


def test_a_rank_at_a_breakpoint_is_no_hang() -> None:
    """While a rank stands at a breakpoint nothing is aborted, and the timeout does not go on."""
    watched = supervisor(timeout=5.0)
    watched.record_debugger(1, 1.0, is_stopped=True)
    watched.receive(0, Done("ok", 0.1), 1.0)
    assert looks(watched, 10.0) == []
    assert [*watched.next_steps(600.0)] == []
    watched.record_debugger(1, 601.0, is_stopped=False)
    assert watched.seconds_to_step(601.0) <= 4.0
    assert LOCATE in [*watched.next_steps(606.0)]
    assert Decision.TIME_OUT in [*watched.next_steps(610.0)]


def test_stop_at_a_breakpoint_is_supervised_again() -> None:
    """After Stop no rank counts as standing at a breakpoint, so that ranks are located."""
    watched = supervisor()
    watched.record_debugger(1, 1.0, is_stopped=True)
    watched.record_stop(2.0)
    assert LOCATE in [*watched.next_steps(5.0)]
