"""Tests of `nbdist.output.bars`: which ranks are at a progress bar, and which rank is behind."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tqdm.std import tqdm

from nbdist.output.bars import bar_table, current_bars_of, final_table, merged_line
from nbdist.output.events import Output, Text
from nbdist.output.layout import live_layout
from nbdist.output.transcript import Transcript
from tests.output.lab import drawing, err, failure, make, nested_bars, out, ranks_of, running


def bar(done: int, total: int = 100, name: str = "train", elapsed: float = 0.0) -> Text:
    """Return tqdm's text for a bar at `done` of `total`, `elapsed` seconds after its start."""
    return err("\r" + tqdm.format_meter(done, total, elapsed or done / 10 + 1, prefix=name))


def at(*positions: int) -> Transcript:
    return running(len(positions), lambda rank: [bar(positions[rank])])


@pytest.mark.parametrize(
    ("said", "amount"),
    [
        ([bar(30)], "30/100"),
        ([out("loading\n"), bar(30)], "30/100"),
        ([bar(100, name="before"), out("\n"), bar(30)], "30/100"),
        # A bar stays the rank's bar after a few lines and displays, but not after many.
        ([bar(30), out("\n" + "loss 0.5\n" * 3)], "30/100"),
        ([bar(30), out("\n" + "loss 0.5\n" * 40)], None),
        ([bar(100), out("\nloss 0.5\n")], "100/100"),
        ([bar(100), out("\n"), drawing("a figure"), out("loss 0.5\n")], "100/100"),
        ([bar(100), out("\n"), *[drawing("a figure")] * 12, out("loss 0.5\n" * 12)], None),
    ],
)
def test_a_rank_is_at_the_last_bar_it_wrote(said: list[Output], amount: str | None) -> None:
    """A rank is at its last bar, unless many lines follow."""
    (rank,) = running(1, lambda rank: said)
    found = current_bars_of(rank)
    bars = None if found is None else (found.name, found.bar.amount, found.around)
    assert bars == (None if amount is None else ("train", amount, ()))


def test_nested_bars_are_named_with_the_outer_bars() -> None:
    """Of nested bars a row shows the innermost bar, with the outer bars before its name."""
    names = set()
    for written in nested_bars(3):
        (said,) = running(1, lambda rank, text=written: [err(text)])
        names.add(current_bars_of(said).name)
    assert names == {"epoch", "epoch 0/4, step", "epoch 1/4, step", "epoch 2/4, step"}
    # Both inner bars are equally far, so the outer bars decide which rank is behind.
    steps = {epochs: nested_bars(epochs, 6)[:-2] for epochs in (2, 3)}
    said = {0: steps[3][-1], 1: steps[2][-1]}
    transcript = running(2, lambda rank: [err(said[rank])])
    table = bar_table(transcript)
    assert table.slowest == 1
    assert [table.share(bars) for bars in table.rows] == [2.75 / 4, 1.75 / 4]
    assert merged_line(transcript).startswith("[0-1] epoch 1-2/4, step 75%")


@pytest.mark.parametrize(
    ("bars", "slowest", "behind"),
    [
        # Rank 2 lacks 15 of the 62 steps that rank 0 has done.
        ([bar(62), bar(61), bar(47), bar(60)], 2, "rank 2 is 24 % behind"),
        ([bar(62), bar(61), bar(62), bar(60)], None, ""),
        ([bar(62)], None, ""),
        # Rank 2 is in an earlier epoch, though its bar is further; the distance is unknown.
        (
            [bar(n, name=f"epoch {e}") for n, e in ((20, 2), (75, 1), (40, 1))],
            2,
            "rank 2 is behind",
        ),
        # Bars with different names, or that began at different times, are not compared.
        ([bar(20), bar(80, name="test")], None, ""),
        ([bar(20, elapsed=3.0), bar(80, elapsed=60.0)], None, ""),
    ],
)
def test_the_rank_that_is_clearly_behind_is_marked(
    bars: list[Text], slowest: int | None, behind: str
) -> None:
    """The rank that is clearly behind the first is marked, and no rank if all are about as far."""
    table = bar_table(running(len(bars), lambda rank: [bars[rank]]))
    assert (table.slowest, table.behind) == (slowest, behind)
    assert table.ranks == tuple(range(len(bars)))
    if behind == "rank 2 is behind":
        assert [table.share(bars) for bars in table.rows] == [0.6, 0.375, 0.2]


def test_a_single_line_shows_the_bars_of_all_ranks() -> None:
    """A single line shows the ranks, the bar's name, the median and the range, and the times."""
    assert merged_line(at(63, 47, 64, 63)) == "[0-3] train 63% (47-64) 00:07<00:06"
    assert merged_line(at(50, 50)) == "[0-1] train 50% 00:06<00:06"
    assert merged_line(running(2, lambda rank: [out("x\n")])) == ""
    assert merged_line(make(2, lambda rank: [bar(100)])) == ""
    # In a terminal a full bar is over once a line follows.
    assert merged_line(running(2, lambda rank: [bar(100)])) == "[0-1] train 100% 00:11<00:00"
    assert merged_line(running(2, lambda rank: [bar(100), out("\nloss 0.5\n")])) == ""
    paced = err("\r 25%|██▌       | 1/4 [00:06<?, ?it/s]")
    assert merged_line(running(2, lambda rank: [paced])) == "[0-1] 25% 00:06<00:18"
    endless = [err(f"\r{done}it [00:03, 9.5it/s]") for done in (10, 30)]
    found = merged_line(running(2, lambda rank: [endless[rank]]))
    assert found == "[0-1] 30it (10it-30it) 00:03"
    # A rank at 95 % of an epoch is not ahead of ranks at 30 % of the next epoch.
    behind = bar(95, name="epoch 0")
    ahead = running(3, lambda rank: [behind if rank == 1 else bar(30, name="epoch 1")])
    apart = "[0,2] epoch 1 30% 00:04<00:09 · [1] epoch 0 95% 00:10<00:00"
    assert merged_line(ahead) == apart


def test_ranks_with_bars_have_rows_until_they_fail() -> None:
    """A rank with a full bar keeps its row while others run; a failed rank has a block instead."""
    said: dict[int, list[Output]] = {2: [bar(50), failure()]}
    panel = live_layout(running(4, lambda rank: said.get(rank, [bar(40 + 20 * rank)])), 2.0)
    assert panel.bars.ranks == (0, 1, 3)
    assert ranks_of(panel.blocks) == [(2,)]
    assert bar_table(make(2, lambda rank: [bar(100)])).rows == ()
    # Libraries may show a bar on rank 0 alone; the other ranks' text is below the bar.
    said = {0: [out("loading\n"), bar(30)], 2: [out("hello\n")]}
    panel = live_layout(running(4, lambda rank: said.get(rank, [])), 2.0)
    assert panel.bars.ranks == (0,)
    assert ranks_of(panel.blocks) == [(0,), (2,)]


STEPS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10)), min_size=8, max_size=40)


@settings(max_examples=30)
@given(STEPS)
def test_ranks_keep_their_rows(steps: list[tuple[int, int]]) -> None:
    """Each rank keeps its own row, whatever its bar shows and in whatever order bars arrive."""
    transcript = running(4, lambda rank: [out("loading\n"), bar(0, 10)])
    for rank, done in steps:
        transcript.receive(rank, bar(done, 10), 1.0)
        panel = live_layout(transcript, 1.0)
        assert [row.rank for row in panel.bars.rows] == [0, 1, 2, 3]
        assert ranks_of(panel.blocks) == [(0, 1, 2, 3)]
        assert panel.rows == ()


def test_a_bar_that_goes_on_below_a_display_has_one_row() -> None:
    """A bar that is drawn again below a display is the same bar, unless its row has ended."""
    said = [bar(30), drawing("a figure"), bar(60), out("loss 0.5\n"), drawing("another"), bar(100)]
    (row,) = final_table(make(2, lambda rank: [*said, err("\n")])).left_bars
    assert (row.ranks, row.bar.amount) == ((0, 1), "100/100")
    # A loop that was left early ends its row; the next loop of that name is another bar.
    said = [bar(30), err("\n"), drawing("a figure"), bar(60), err("\n")]
    rows = final_table(make(2, lambda rank: said)).left_bars
    assert [row.bar.amount for row in rows] == ["30/100", "60/100"]


def test_left_bars_of_the_same_name_have_rows() -> None:
    """A bar that all ranks have left has a row, even if the current bar has the same name."""
    epochs = [bar(100), err("\n"), bar(100), err("\n"), bar(30)]
    said = {2: epochs[:3], 3: epochs[:4]}
    table = bar_table(running(4, lambda rank: said.get(rank, epochs)))
    assert [row.ranks for row in table.left_bars] == [(0, 1, 2, 3)]
    assert [row.bar.amount for row in table.rows] == ["30/100"] * 2 + ["100/100"] * 2


def test_left_bars_without_a_count_differ_by_their_percentage() -> None:
    """Bars that show only a percentage share a row only if they were left at the same one."""
    said = [[err(f"\rCopy ━━━━╺━━━━━━  {percent}% 0:00:05")] for percent in (30, 50, 50)]
    rows = final_table(make(3, lambda rank: said[rank])).left_bars
    assert [(row.ranks, row.bar.fraction) for row in rows] == [((0,), 0.3), ((1, 2), 0.5)]


def test_a_row_has_the_postfixes_of_all_ranks() -> None:
    """A row for all ranks has the text that each rank wrote behind its bar."""
    said = ["loss=0.5", "loss=0.6", "restarting"]
    rows = [err(f"\r100%|##########| 5/5 [00:01<00:00, 4.0it/s, {each}]\n") for each in said]
    (row,) = final_table(make(3, lambda rank: [rows[rank]])).left_bars
    assert (row.ranks, row.other_text) == ((0, 1, 2), " | ".join(said))


def test_both_ends_of_rates_have_equally_many_digits() -> None:
    """A range of rates has equally many digits at both ends, such as `4.70 to 6.06it/s`."""
    rates = {0: "6.06", 1: "4.70", 2: "5.00"}
    left = "\rtrain: 100%|##########| 5/5 [00:01<00:00, {}it/s]\n"
    for ranks, said in ((3, "4.70 to 6.06it/s"), (1, "6.06it/s")):
        (row,) = final_table(make(ranks, lambda rank: [err(left.format(rates[rank]))])).left_bars
        assert row.rate == said
