"""Tests of `nbdist.output.comparing`: short outputs of ranks held against one another."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.output.comparing import spread, unlike_most
from nbdist.output.events import Display, Failure, Output, Text
from tests.output.lab import make, out

BAR = "\r100%|██████████| 500/500 [00:1{0}<00:00, 25.{0}it/s]\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("loss {0}\ndone\n", "loss 0.5 (rank 0) to 0.57 (rank 7)"),
        ("rank {1}: loss = {0}\nx\n", "loss 0.5 (rank 0) to 0.57 (rank 7)"),
        ("{1}: acc={0}, 5 steps in 3.{1}s\ny\n", "acc 0.5 (rank 0) to 0.57 (rank 7)"),
        # Of what comes again the last counts.
        ("loss 9{0}\nloss {0}\n", "loss 0.5 (rank 0) to 0.57 (rank 7)"),
        ("{{'loss': {0}, 'at': '0x7f{1}a'}}\ncuda:{1} 00:1{1} 2024-0{1}-01\n", "loss 0.5"),
        ("CPU times: user {0} ms\nWall time: 1 s\n", "user 0.5 ms (rank 0) to 0.57 ms (rank 7)"),
        ("a\nWall time: {0} \u00b5s\n", "time 0.5 \u00b5s (rank 0) to 0.57 \u00b5s (rank 7)"),
        ("a\nit is {0} seconds\n", "is 0.5 (rank 0) to 0.57 (rank 7)"),
        ("same 3\nalso 4\n", ""),
        ("shard-{1} is {1}\nshard_{1}\n", ""),
        (BAR.replace("{0}", "{1}") + "loss {0}\n", "loss 0.5 (rank 0) to 0.57 (rank 7)"),
    ],
)
def test_spread(text: str, said: str) -> None:
    """It is of numbers that stand by themselves, not of names, times, bars or the rank's own."""
    transcript = make(8, lambda rank: [out(text.format(round(0.5 + rank / 100, 2), rank))])
    found = spread(transcript)
    assert found.startswith(said)
    assert bool(found) == bool(said)
    assert found.count("(rank") in (0, 2, 4)


def test_where_it_is_seen_at_a_glance() -> None:
    """A few short lines need no words; nor do long outputs, figures and failed ranks have any."""
    outputs: list[tuple[int, list[Output]]] = [
        (8, [out("loss {0}\n")]),
        (2, [out("loss {0}\nx\n" * 6)]),
        (8, [out("loss {0}\n" * 40)]),
        (8, [out("loss {0}\nx\n"), Display({"text/plain": "x"}, {})]),
        (8, [out("loss {0}\nx\n"), Failure("E", "bad", ("E: bad",), 1)]),
    ]
    for ranks, pattern in outputs:

        def said(rank: int, pattern: list[Output] = pattern) -> list[Output]:
            return [
                out(each.text.format(rank / 7)) if isinstance(each, Text) else each
                for each in pattern
            ]

        assert spread(make(ranks, said)) == ""


def test_unlike_most() -> None:
    """Ranks whose words differ from those of most are found; numbers and bars do not count."""
    usual = "shard {0}\nloss {1}\n" + BAR
    odd = {3: "shard 3\nno data\n", 9: "shard 9\n", 11: "shard 11\nloss nan\n" + BAR.format(1)}
    transcript = make(40, lambda rank: [out(odd.get(rank, usual.format(rank, rank / 7)))])
    assert unlike_most(transcript.groups()) == {3, 9, 11}
    for ranks in (6, 40):
        halves = make(ranks, lambda rank: [out(f"{'ab'[rank % 2]} {rank}\nx\n")])
        assert unlike_most(halves.groups()) == frozenset()


NUMBERS = st.lists(st.floats(-1e6, 1e6).map(lambda number: round(number, 3) + 0.0), min_size=9)


@settings(deadline=None, database=None, derandomize=True)
@given(NUMBERS)
def test_the_ends_are_right(numbers: list[float]) -> None:
    """The least and the greatest number, and a rank that has it."""
    transcript = make(len(numbers), lambda rank: [out(f"value: {numbers[rank]}\nx\n")])
    found = spread(transcript)
    if len(set(numbers)) == 1 or numbers == [*range(len(numbers))]:
        assert found == ""
        return
    low, high = numbers.index(min(numbers)), numbers.index(max(numbers))
    assert found == f"value {numbers[low]} (rank {low}) to {numbers[high]} (rank {high})"
