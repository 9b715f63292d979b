"""Tests of `nbdist.world.hangs`: when ranks that wait can never go on, and what is said of it."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from nbdist.output.events import Died
from nbdist.wire.views import Begun, Place
from nbdist.world.hangs import (
    ALL_UNCHANGED,
    FIRST_LOOK,
    LOOK_EVERY,
    SOON,
    UNCHANGED,
    Watch,
    differing,
    never_meet,
    stalled_text,
    verdict,
    waits_text,
    why_aborted,
    why_died,
)
from nbdist.world.states import Machines

WAITS = Place(line=3, operation="barrier", counts={"0": 4}, moved=100, is_calm=True)
COMPUTES = Place(line=2, counts={"0": 3}, moved=100, is_calm=True)
REDUCE = Begun("0", 5, "all_reduce", "[2]", "Float", "2")
BARRIER = Begun("0", 5, "barrier")
LARGER = replace(REDUCE, sizes="[3]", elements="3")
DOUBLE = replace(REDUCE, dtypes="Double")


def watch(*looks: dict[int, Place], every: float = SOON) -> Watch:
    """A watch that has been told these places, one after the other."""
    found = Watch(0.0)
    for number, places in enumerate(looks):
        found.take(places, number * every)
    return found


def test_all_wait_and_nothing_moves() -> None:
    """Two looks that show the same are enough, one is not."""
    both = {0: WAITS, 2: WAITS}
    assert not watch(both).never((0, 2), 0.0)
    assert watch(both, both).never((0, 2), SOON)


@pytest.mark.parametrize(
    "other",
    [
        COMPUTES,
        replace(WAITS, moved=101),
        replace(WAITS, counts={"0": 5}),
        replace(WAITS, line=4),
        replace(WAITS, operation="all_reduce"),
        Place(holds_gil=True),
    ],
)
def test_one_goes_on(other: Place) -> None:
    """As long as one of them does anything, nobody is freed."""
    found = watch({0: WAITS, 2: WAITS}, {0: WAITS, 2: other})
    assert not found.never((0, 2), SOON)
    assert not watch({0: COMPUTES}, {0: COMPUTES}).never((0,), SOON)


def test_a_rank_that_was_not_seen() -> None:
    """What is not known is not decided upon."""
    assert not watch({0: WAITS}, {0: WAITS}).never((0, 2), SOON)


def test_another_rank_has_finished() -> None:
    """What was seen before that says nothing: the others' ends may be on their way."""
    both = {0: WAITS, 2: WAITS}
    found = watch(both, both, both)
    found.finished()
    assert found.places == both
    assert not found.never((0,), 3 * SOON)
    found.take({0: WAITS}, 3 * SOON)
    assert not found.never((0,), 3 * SOON)
    found.take({0: WAITS}, 4 * SOON)
    assert found.never((0,), 4 * SOON)
    busy = {0: replace(WAITS, is_calm=False)}
    found.finished()
    found.take(busy, 10 * UNCHANGED)
    found.take(busy, 10 * UNCHANGED + SOON)
    assert not found.never((0,), 10 * UNCHANGED + SOON)


def test_threads_that_are_always_at_work() -> None:
    """They hold the decision up, but not for ever."""
    busy = {0: replace(WAITS, is_calm=False)}
    assert not watch(busy, busy).never((0,), SOON)
    assert watch(busy, busy, busy, every=UNCHANGED).never((0,), 2 * UNCHANGED)
    assert watch(busy, {0: WAITS}).never((0,), SOON)


def test_what_is_on_its_way() -> None:
    """It may bring on who waits, for as long as TCP sends it again, which takes minutes."""
    found = watch({0: WAITS}, {0: WAITS})
    assert found.never((0,), SOON)
    found.take({0: WAITS}, 2 * SOON, in_flight=1)
    assert not found.never((0,), 2 * SOON)
    found.take({0: WAITS}, 500.0, in_flight=1)
    assert not found.never((0,), 500.0)
    found.take({0: WAITS}, 501.0)
    assert found.never((0,), 501.0)


def test_when_to_look() -> None:
    """Late while all are at work, soon once one has finished, not while an answer is due."""
    found = Watch(10.0)
    assert found.wait(10.0) == FIRST_LOOK
    assert Watch(10.0, hang_timeout=0.5).wait(10.0) == 0.5
    found.hurry(10.5)
    assert found.wait(10.5) == pytest.approx(SOON)
    found.asked(11.2)
    assert found.wait(11.5) > 0
    found.take({0: WAITS}, 11.5)
    assert found.wait(11.5) == pytest.approx(SOON)


def test_all_wait_for_one_another() -> None:
    """They are let be until it is known that they never meet, or nothing moves for long."""
    both = {0: WAITS, 1: WAITS}
    found = watch(both, both)
    assert found.is_dead_end((0, 1), SOON, is_known=True)
    assert not found.is_dead_end((0, 1), SOON, is_known=False)
    assert found.is_dead_end((0, 1), ALL_UNCHANGED, is_known=False)
    busy = {0: WAITS, 1: replace(WAITS, is_calm=False)}
    at_work = watch(busy, busy, every=UNCHANGED)
    assert not at_work.is_dead_end((0, 1), UNCHANGED, is_known=True)
    assert at_work.is_dead_end((0, 1), UNCHANGED, is_known=True, runs_ahead=True)
    assert not at_work.is_dead_end((0, 1), UNCHANGED, is_known=False, runs_ahead=True)
    assert not watch({0: WAITS, 1: COMPUTES}, both).is_dead_end((0, 1), SOON, is_known=True)


def test_a_thread_may_bring_them_on() -> None:
    """Nobody is freed for waiting long while a rank has another thread at work."""
    helped = {0: WAITS, 1: replace(WAITS, has_help=True)}
    found = watch(helped, helped)
    assert not found.is_dead_end((0, 1), 1000.0, is_known=False)
    assert found.is_dead_end((0, 1), 1000.0, is_known=True)


def test_one_look_more_where_all_wait() -> None:
    """Soon, and only once: who meets all the time is looked at no more often than others."""
    both = {0: WAITS, 1: WAITS}
    found = watch(both)
    assert found.wait(0.0) == pytest.approx(SOON)
    found.take({0: WAITS, 1: replace(WAITS, counts={"0": 5})}, SOON)
    assert found.wait(SOON) == pytest.approx(LOOK_EVERY)


def test_a_network_that_is_stalled() -> None:
    """Its ends have the names of their machines, where ranks there say that it is."""
    machines = Machines({0: ("hosta", 0), 1: ("hostb", 0)})
    one = {0: replace(WAITS, stalled=(("10.0.0.1", "10.0.0.2"),)), 1: WAITS}
    said = "the network between {} and hosta is stalled"
    assert stalled_text(one, machines) == said.format("10.0.0.2")
    both = {**one, 1: replace(WAITS, stalled=(("10.0.0.2", "10.0.0.1"),))}
    assert stalled_text(both, machines) == "the network between hosta and hostb is stalled"
    assert stalled_text({0: WAITS, 1: WAITS}, machines) == ""


def test_words() -> None:
    """Ranks that do the same are named together, with the line that they are in."""
    places = {0: WAITS, 1: COMPUTES, 2: WAITS, 3: Place(holds_gil=True)}
    assert waits_text(places, "if rank == 1:\n    time.sleep(600)\ndist.barrier()") == (
        "ranks 0,2 wait in barrier, line 3 · rank 1 is in line 2: time.sleep(600) · "
        "rank 3 is busy in C code that holds the GIL"
    )
    asks = Place(line=2, asks=True)
    assert waits_text({0: asks}) == "rank 0 waits for your input, line 2"
    assert waits_text({0: asks, 1: asks}) == "ranks 0-1 wait for your input, line 2"


# --- whether collectives meet -------------------------------------------------------------


def waits(*begun: Begun, line: int = 2) -> Place:
    """A rank that waits in the last of these."""
    return Place(line=line, operation=begun[-1].name, begun=begun)


def done(*begun: Begun) -> Place:
    """A rank that has finished the cell."""
    return Place(begun=tuple(replace(each, is_done=True) for each in begun))


def test_different_collectives() -> None:
    """The fifth of one is another than the fifth of the others."""
    places = {0: waits(REDUCE, line=3), 1: waits(BARRIER), 2: waits(BARRIER)}
    assert never_meet(places)
    assert verdict(places) == (
        "ranks 1-2 are in barrier (line 2), rank 0 in all_reduce (line 3): these calls do not "
        "match and would wait forever"
    )


@pytest.mark.parametrize(
    "others",
    [
        waits(REDUCE),
        waits(replace(BARRIER, number=6)),
        waits(replace(BARRIER, group="1")),
        Place(line=1, operation="recv"),
        Place(line=1),
    ],
    ids=["the same", "another number", "another group", "from rank to rank", "at work"],
)
def test_what_may_meet(others: Place) -> None:
    """What is not known is not decided upon."""
    assert not never_meet({0: waits(REDUCE), 1: others})


def test_what_did_not_meet_before() -> None:
    """A root has sent and gone on; the others wait in what it never began."""
    root = (replace(REDUCE, name="broadcast", is_done=True), replace(BARRIER, number=6))
    places = {0: waits(*root, line=3), 1: waits(BARRIER, line=3)}
    assert verdict(places) == (
        "ranks 0-1 are in barrier (line 3): these calls do not match and would wait forever; the "
        "first that differ: rank 0 "
        "broadcast, rank 1 barrier"
    )


def test_what_is_over_is_no_proof() -> None:
    """Different names that have met after all."""
    over = replace(REDUCE, is_done=True), replace(BARRIER, is_done=True)
    next_one = replace(REDUCE, number=6)
    assert not never_meet({0: waits(over[0], next_one), 1: waits(over[1], next_one)})


def test_nobody_sends() -> None:
    """No more is known than that all wait."""
    places = {rank: Place(line=4, operation="recv") for rank in range(3)}
    assert verdict(places) == "ranks 0-2 are in recv (line 4): all ranks wait for each other"
    assert verdict({0: Place(file="a.py", line=4, operation="recv")}) == (
        "rank 0 is in recv (a.py line 4): all ranks wait for each other"
    )


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (REDUCE, LARGER, "sizes differ: rank 0 [2], rank 1 [3]"),
        (REDUCE, DOUBLE, "dtypes differ: rank 0 float32, rank 1 float64"),
        (
            LARGER,
            replace(DOUBLE, dtypes="BFloat16"),
            "sizes and dtypes differ: rank 0 float32 [3], rank 1 bfloat16 [2]",
        ),
    ],
)
def test_sizes_and_dtypes(first: Begun, second: Begun, told: str) -> None:
    """Those of each rank, and whose result is wrong."""
    assert differing({0: done(first), 1: waits(second)}) == (
        f"all_reduce (line 2), {told}; the result on rank 0 is wrong"
    )
    assert differing({0: waits(first), 1: waits(second)}) == f"all_reduce (line 2), {told}"


def test_equal_or_of_equal_length() -> None:
    """Gloo takes any shape of as many elements; different collectives are another matter."""
    flat = replace(REDUCE, sizes="[4, 1]", elements="4")
    assert differing({0: waits(flat), 1: waits(replace(flat, sizes="[2, 2]"))}) == ""
    assert differing({0: waits(REDUCE), 1: waits(BARRIER)}) == ""
    assert differing({0: waits(REDUCE), 1: Place()}) == ""


def test_why_aborted() -> None:
    """Others have finished, or do not run the cell; or nothing would have helped."""
    waiting = waits(REDUCE)
    freed = {1: waiting}
    assert why_aborted(freed, {0: Place(), 1: waiting}, [0, 1], {1}, 2) == (
        "rank 1 waits in all_reduce, line 2; rank 0 finished the cell without it"
    )
    assert why_aborted(freed, {0: Place(), 1: waiting}, [1], {1}, 3) == (
        "rank 1 waits in all_reduce, line 2; ranks 0,2 do not run this cell"
    )
    seen = {0: waits(BARRIER), 1: waiting, 2: Place()}
    assert why_aborted({0: seen[0], 1: seen[1]}, seen, [0, 1, 2], {0, 1}, 3) == (
        "rank 0 is in barrier (line 2), rank 1 in all_reduce (line 2): these calls do not match "
        "and would wait forever; "
        "rank 2 finished the cell"
    )


def test_why_died() -> None:
    """Gloo ends a process that receives too much; of other deaths there is nothing to say."""
    died = Died(-signal.SIGABRT, 0, received_too_much=True)
    assert why_died(0, died, {1: done(DOUBLE), 2: done(REDUCE)}) == (
        "Rank 0 received more than its tensor holds: sizes or dtypes differ between ranks in "
        "all_reduce (rank 1 float64 [2], rank 2 float32 [2]). With `--debug` that is found before."
    )
    assert "in all_reduce (rank 1 float64 [2])." in why_died(0, died, {1: done(DOUBLE)})
    assert why_died(0, died, {}).startswith("Rank 0 received more")
    assert why_died(0, died._replace(received_too_much=False), {1: done(DOUBLE)}) == ""
