"""Tests of `nbdist.world.hangs`: when ranks that wait can never go on, and what is said of it."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from nbdist.output.events import Died
from nbdist.wire.views import Begun, Place
from nbdist.world import hangs
from nbdist.world.hangs import ALL_UNCHANGED, FIRST_LOOK, LOOK_EVERY, SOON, UNCHANGED, Watch
from nbdist.world.states import Machines

WAITS = Place(line=3, operation="barrier", counts={"0": 4}, moved=100, is_calm=True)
COMPUTES = Place(line=2, counts={"0": 3}, moved=100, is_calm=True)
REDUCE = Begun("0", 5, "all_reduce", "[2]", "Float", "2")
BARRIER = Begun("0", 5, "barrier")
LARGER = replace(REDUCE, sizes="[3]", elements="3")
DOUBLE = replace(REDUCE, dtypes="Double")

Places = dict[int, Place]
ONE, BOTH, ALL = {0: WAITS}, {0: WAITS, 2: WAITS}, {0: WAITS, 1: WAITS}
BUSY = {0: replace(WAITS, is_calm=False)}


def watch(*looks: Places, every: float = SOON) -> Watch:
    """A watch that has been told these places, one after the other."""
    found = Watch(0.0)
    for number, places in enumerate(looks):
        found.take(places, number * every)
    return found


@pytest.mark.parametrize(
    ("looks", "every", "never"),
    [
        ([BOTH], SOON, False),
        ([BOTH, BOTH], SOON, True),
        ([{0: COMPUTES, 2: WAITS}] * 2, SOON, False),
        ([BOTH, {**BOTH, 2: replace(WAITS, moved=101)}], SOON, False),
        ([BOTH, {**BOTH, 2: replace(WAITS, counts={"0": 5})}], SOON, False),
        ([BOTH, {**BOTH, 2: replace(WAITS, line=4)}], SOON, False),
        ([BOTH, {**BOTH, 2: replace(WAITS, operation="all_reduce")}], SOON, False),
        ([ONE, ONE], SOON, False),
        ([{**BOTH, **BUSY}] * 3, UNCHANGED, True),
        ([{**BOTH, **BUSY}, BOTH], SOON, True),
    ],
)
def test_all_wait_and_nothing_moves(looks: list[Places], every: float, *, never: bool) -> None:
    """Two looks that show the same are enough; threads at work hold it up, but not for ever."""
    now = (len(looks) - 1) * every
    assert watch(*looks, every=every).never((0, 2), now) is never


def test_what_may_still_bring_on_who_waits() -> None:
    """Ends that are on their way from ranks that have finished, and bytes, which TCP repeats."""
    found = watch(BOTH, BOTH, BOTH)
    found.finished()
    assert found.places == BOTH
    assert not found.never((0,), 3 * SOON)
    for number, is_enough in ((3, False), (4, True)):
        found.take(ONE, number * SOON)
        assert found.never((0,), number * SOON) is is_enough
    found.finished()
    for now in (10 * UNCHANGED, 10 * UNCHANGED + SOON):
        found.take(BUSY, now)
    assert not found.never((0,), 10 * UNCHANGED + SOON)
    found = watch(ONE, ONE)
    for now, in_flight in ((SOON, 0), (2 * SOON, 1), (500.0, 1), (501.0, 0)):
        found.take(ONE, now, in_flight=in_flight)
        assert found.never((0,), now) is (not in_flight)


def test_when_to_look() -> None:
    """Late while all are at work, soon once one has finished, or, once, where all wait."""
    found = Watch(10.0)
    assert found.wait(10.0) == FIRST_LOOK
    assert Watch(10.0, hang_timeout=0.5).wait(10.0) == 0.5
    found.hurry(10.5)
    assert found.wait(10.5) == pytest.approx(SOON)
    found.asked(11.2)
    assert found.wait(11.5) > 0
    found.take({0: WAITS}, 11.5)
    assert found.wait(11.5) == pytest.approx(SOON)
    found = watch(ALL)
    assert found.wait(0.0) == pytest.approx(SOON)
    found.take({0: WAITS, 1: replace(WAITS, counts={"0": 5})}, SOON)
    assert found.wait(SOON) == pytest.approx(LOOK_EVERY)


def test_all_wait_for_one_another() -> None:
    """They are let be until it is known that they never meet, or nothing moves for long."""
    found = watch(ALL, ALL)
    assert found.is_dead_end((0, 1), SOON, is_known=True)
    assert not found.is_dead_end((0, 1), SOON, is_known=False)
    assert found.is_dead_end((0, 1), ALL_UNCHANGED, is_known=False)
    at_work = watch({**ALL, **BUSY}, {**ALL, **BUSY}, every=UNCHANGED)
    assert not at_work.is_dead_end((0, 1), UNCHANGED, is_known=True)
    assert at_work.is_dead_end((0, 1), UNCHANGED, is_known=True, runs_ahead=True)
    assert not at_work.is_dead_end((0, 1), UNCHANGED, is_known=False, runs_ahead=True)
    assert not watch({0: WAITS, 1: COMPUTES}, ALL).is_dead_end((0, 1), SOON, is_known=True)
    helped = {0: WAITS, 1: replace(WAITS, has_help=True)}  # by a thread that may bring it on
    found = watch(helped, helped)
    assert not found.is_dead_end((0, 1), 1000.0, is_known=False)
    assert found.is_dead_end((0, 1), 1000.0, is_known=True)


def test_words() -> None:
    """Ranks that do the same are named together, with their line; networks by their machines."""
    places = {0: WAITS, 1: COMPUTES, 2: WAITS, 3: Place(holds_gil=True)}
    assert hangs.waits_text(places, "if rank == 1:\n    time.sleep(600)\ndist.barrier()") == (
        "ranks 0,2 wait in barrier, line 3 · rank 1 is in line 2: time.sleep(600) · "
        "rank 3 is busy in C code that holds the GIL"
    )
    asks = Place(line=2, asks=True)
    assert hangs.waits_text({0: asks}) == "rank 0 waits for your input, line 2"
    assert hangs.waits_text({0: asks, 1: asks}) == "ranks 0-1 wait for your input, line 2"
    machines = Machines({0: ("hosta", 0), 1: ("hostb", 0)})
    one = {0: replace(WAITS, stalled=(("10.0.0.1", "10.0.0.2"),)), 1: WAITS}
    both = {**one, 1: replace(WAITS, stalled=(("10.0.0.2", "10.0.0.1"),))}
    said = "the network between {} and {} is stalled"
    assert hangs.stalled_text(one, machines) == said.format("10.0.0.2", "hosta")
    assert hangs.stalled_text(both, machines) == said.format("hosta", "hostb")
    assert hangs.stalled_text(ALL, machines) == ""


# --- whether collectives meet -------------------------------------------------------------


def waits(*begun: Begun, line: int = 2) -> Place:
    """A rank that waits in the last of these."""
    return Place(line=line, operation=begun[-1].name, begun=begun)


def done(*begun: Begun) -> Place:
    """A rank that has finished the cell."""
    return Place(begun=tuple(replace(each, is_done=True) for each in begun))


OVER = replace(REDUCE, is_done=True), replace(BARRIER, is_done=True)


NEVER = "these calls do not match and would wait forever"


def test_verdict() -> None:
    """The fifth of one is another than that of the others; what is not known is not decided."""
    for first, other in (
        (waits(REDUCE), waits(REDUCE)),
        (waits(REDUCE), waits(replace(BARRIER, number=6))),
        (waits(REDUCE), waits(replace(BARRIER, group="1"))),
        (waits(REDUCE), Place(line=1, operation="recv")),
        (waits(OVER[0], replace(REDUCE, number=6)), waits(OVER[1], replace(REDUCE, number=6))),
    ):
        assert not hangs.never_meet({0: first, 1: other})
    three = {0: waits(REDUCE, line=3), 1: waits(BARRIER), 2: waits(BARRIER)}
    said = "ranks 1-2 are in barrier (line 2), rank 0 in all_reduce (line 3)"
    assert hangs.verdict(three) == f"{said}: {NEVER}"
    # A root has sent and gone on; the others wait in what it never began.
    began = replace(REDUCE, name="broadcast", is_done=True), replace(BARRIER, number=6)
    assert hangs.verdict({0: waits(*began, line=3), 1: waits(BARRIER, line=3)}) == (
        f"ranks 0-1 are in barrier (line 3): {NEVER}; the first that differ: rank 0 broadcast, "
        "rank 1 barrier"
    )
    all_receive = {rank: Place(line=4, operation="recv") for rank in range(3)}
    said = "ranks 0-2 are in recv (line 4): all ranks wait for each other"
    assert hangs.verdict(all_receive) == said
    said = "rank 0 is in recv (a.py line 4): all ranks wait for each other"
    assert hangs.verdict({0: Place(file="a.py", line=4, operation="recv")}) == said


def test_sizes_and_dtypes() -> None:
    """Those of each rank, and whose result is wrong; gloo takes any shape of as many elements."""
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
    for one, other in ((flat, square), (waits(REDUCE), waits(BARRIER)), (flat, Place())):
        assert hangs.differing({0: one, 1: other}) == ""


def test_why_aborted() -> None:
    """Others have finished, or do not run the cell; or nothing would have helped."""
    waiting = waits(REDUCE)
    seen, freed = {0: Place(), 1: waiting}, {1: waiting}
    said = "rank 1 waits in all_reduce, line 2; "
    finished = hangs.why_aborted(freed, seen, [0, 1], {1}, 2)
    assert finished == f"{said}rank 0 finished the cell without it"
    assert hangs.why_aborted(freed, seen, [1], {1}, 3) == f"{said}ranks 0,2 do not run this cell"
    seen = {0: waits(BARRIER), 1: waiting, 2: Place()}
    assert hangs.why_aborted({0: seen[0], 1: seen[1]}, seen, [0, 1, 2], {0, 1}, 3) == (
        f"rank 0 is in barrier (line 2), rank 1 in all_reduce (line 2): {NEVER}; "
        "rank 2 finished the cell"
    )


def test_why_died() -> None:
    """Gloo ends a process that receives too much; of other deaths there is nothing to say."""
    died = Died(-signal.SIGABRT, 0, received_too_much=True)
    assert hangs.why_died(0, died, {1: done(DOUBLE), 2: done(REDUCE)}) == (
        "Rank 0 received more than its tensor holds: sizes or dtypes differ between ranks in "
        "all_reduce (rank 1 float64 [2], rank 2 float32 [2]). With `--debug` that is found before."
    )
    assert hangs.why_died(0, died, {}).startswith("Rank 0 received more")
    assert hangs.why_died(0, died._replace(received_too_much=False), {1: done(DOUBLE)}) == ""
