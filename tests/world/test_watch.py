"""Tests of `nbdist.world.watch`: when ranks that wait can never go on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbdist.wire.messages import Place
from nbdist.world.watch import HANG_TIMEOUT, SOON, UNCHANGED, Watch, waits_text

WAITS = Place(line=3, operation="barrier", counts={"0": 4}, moved=100, is_calm=True)
COMPUTES = Place(line=2, counts={"0": 3}, moved=100, is_calm=True)


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
        Place(is_deaf=True),
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


def test_when_to_look() -> None:
    """Late while all are at work, soon once one has finished, not while an answer is due."""
    found = Watch(10.0)
    assert found.wait(10.0) == HANG_TIMEOUT
    found.hurry(11.0)
    assert found.wait(11.0) == pytest.approx(SOON)
    found.asked(11.2)
    assert found.wait(11.5) > 0
    found.take({0: WAITS}, 11.5)
    assert found.wait(11.5) == pytest.approx(SOON)


def test_words() -> None:
    """Ranks that do the same are named together, with the line that they are in."""
    places = {0: WAITS, 1: COMPUTES, 2: WAITS, 3: Place(is_deaf=True)}
    assert waits_text(places, "if rank == 1:\n    time.sleep(600)\ndist.barrier()") == (
        "ranks 0,2 wait in barrier, line 3 · rank 1 is in line 2: time.sleep(600) · "
        "rank 3 is busy in C code that holds the GIL"
    )
