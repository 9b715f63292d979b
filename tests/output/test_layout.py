"""Tests of `nbdist.output.layout`: what a panel shows, before anything is written."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.output.events import Display, Failure, InputRequest, Output, Text
from nbdist.output.html import panel_html
from nbdist.output.layout import (
    Hidden,
    Item,
    final_layout,
    live_layout,
    merged,
    spread,
    state_counts,
    unlike_most,
)
from nbdist.output.screen import Line
from nbdist.output.text import panel_text
from tests.output.lab import Panel, failure, final_html, kinds, lines, make, out, ranks_of

HIDDEN = st.builds(Hidden, st.integers(1, 9), in_log_only=st.booleans())
KEPT = st.just([Line("x", stderr=False)])


@given(st.lists(st.one_of(HIDDEN, KEPT)))
def test_hidden_neighbours_are_one(items: list[Item]) -> None:
    """No two stand side by side, and none is lost."""
    found = merged(items)
    for one, other in pairwise(found):
        assert not (isinstance(one, Hidden) and isinstance(other, Hidden))
    for shown in (items, found):
        count = sum(item.lines for item in shown if isinstance(item, Hidden))
        assert count == sum(item.lines for item in items if isinstance(item, Hidden))


# --- live -------------------------------------------------------------------------------


def test_live_blocks() -> None:
    """Failed ranks first; the lines that there is room for are shared, silent ranks have none."""
    said = {1: [lines(40), failure()], 3: []}
    transcript = make(4, lambda rank: said.get(rank, [lines(30)]), finished=False)
    panel = live_layout(transcript, 12.34, "a note")
    assert (panel.seconds, panel.note, panel.is_live) == ("12.3 s", "a note", True)
    assert ranks_of(panel.blocks) == [(1,), (0, 2)]
    assert [kinds(block.items) for block in panel.blocks] == [[12], [12]]
    assert [block.words for block in panel.blocks] == [("… 28 earlier",), ("same", "… 18 earlier")]
    # The failed ranks that have no block are named.
    transcript = make(20, lambda rank: [out(f"{rank}\n"), failure(f"x{rank}")], finished=False)
    panel = live_layout(transcript, 1.0)
    assert len(panel.blocks) == 16
    assert panel.more == (16, 17, 18, 19)


def test_live_blocks_of_those_who_ask() -> None:
    """They stand last, right above the input box, with more lines, also where ranks are many."""
    asked = [lines(40), InputRequest(1, "> ")]
    few = make(3, lambda rank: asked if rank == 0 else [lines(30)], finished=False)
    panel = live_layout(few, 1.0)
    assert ranks_of(panel.blocks) == [(1, 2), (0,)]
    assert [kinds(block.items) for block in panel.blocks] == [[12], [40]]
    all_ask = make(3, lambda rank: [out(f"{rank}\n"), InputRequest(1, "> ")], finished=False)
    assert ranks_of(live_layout(all_ask, 1.0, turn=0).blocks) == [(1,), (2,), (0,)]
    many = make(20, lambda rank: asked if rank == 5 else [out(f"{rank}\n")], finished=False)
    assert ranks_of(live_layout(many, 1.0).blocks) == [(5,)]


def test_what_a_running_cell_says_of_itself() -> None:
    """What ranks use, and after some seconds the time: a reloaded page shows it for ever."""
    running = make(2, lambda rank: [out("x\n")], finished=False)
    assert live_layout(running, 1.0, "", "cpu 2 GiB", "17:33:05").now == "cpu 2 GiB"
    last = live_layout(running, 5.0, "", "cpu 2 GiB", "17:33:05")
    assert last.now == "cpu 2 GiB"
    assert last.foot.startswith("live view at 17:33:05; if this time does not change, it ended")
    assert "`%dist_output`" in last.foot
    text, html = panel_text(last), panel_html(last)
    assert text.endswith(f"\n{last.foot}")
    assert last.foot in html
    assert final_layout(running).now == final_layout(running).foot == ""


def test_who_failed_is_one_number() -> None:
    """Ranks that another one's failure, or Stop, has ended have not failed."""
    released = Failure("Released", "it waited", ("Released: it waited",), 9, connections="ended")
    said = [failure("bad", 1), released, released, Failure("KeyboardInterrupt", "", (), 9)]
    transcript = make(4, lambda rank: [said[rank]])
    assert [text for _, text in state_counts(transcript)] == ["✗ 1", "2 released", "■ 1 stopped"]
    text, lines = panel_text(final_layout(transcript)), Panel(final_html(transcript)).lines
    assert text.count("Released: it waited") == 1
    assert [line for line in lines if "waited" in line] == [
        "ranks 1-2 ⊘ same Released: it waited"
    ]  # fmt: skip


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
