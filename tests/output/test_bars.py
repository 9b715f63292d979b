"""Tests of `nbdist.output.bars`: which ranks are at a progress bar, and who is behind."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tqdm.std import tqdm

from nbdist.output.bars import bar_table, bars_of, merged_line
from nbdist.output.events import Failure, Output, Text
from nbdist.output.layout import live_layout
from nbdist.output.transcript import Transcript
from tests.output.lab import make, out


def bar(done: int, total: int = 100, name: str = "train") -> Text:
    """What tqdm writes for one step."""
    return Text("stderr", "\r" + tqdm.format_meter(done, total, done / 10 + 1, prefix=name))


def at(done: int, elapsed: float) -> Text:
    """What it writes so many seconds after it began."""
    return Text("stderr", "\r" + tqdm.format_meter(done, 100, elapsed, prefix="train"))


def running(*positions: int) -> Transcript:
    return make(len(positions), lambda rank: [bar(positions[rank])], finished=False)


def nested(epochs: int, steps: int) -> Iterator[str]:
    """What a terminal got after each step of tqdm's nested bars."""
    written = io.StringIO()
    outer = tqdm(total=4, file=written, desc="epoch", position=0, mininterval=0)
    for _ in range(epochs):
        inner = tqdm(total=8, file=written, desc="step", position=1, mininterval=0, leave=False)
        for _ in range(steps):
            inner.update()
            yield written.getvalue()
        inner.close()
        outer.update()
        yield written.getvalue()
    outer.close()
    yield written.getvalue()


def test_the_last_line() -> None:
    """A rank is at the bar that is its last line, whatever it printed before."""
    for ahead in ([], [out("loading\n")], [bar(100, name="before"), out("\n")]):
        (said,) = make(1, lambda rank, ahead=ahead: [*ahead, bar(30)], finished=False)
        found = bars_of(said)
        assert found is not None
        assert (found.name, found.bar.amount, found.around) == ("train", "30/100", ())
    # An unfinished bar is still the rank's when it prints something; not for ever.
    for lines, is_there in ((3, True), (40, False)):
        printed = out("\n" + "loss 0.5\n" * lines)
        (said,) = make(1, lambda rank, printed=printed: [bar(30), printed], finished=False)
        assert (bars_of(said) is not None) == is_there
    (said,) = make(1, lambda rank: [bar(100), out("\nloss 0.5\n")], finished=False)
    assert bars_of(said) is None


def test_nested_bars() -> None:
    """The innermost bar has the row at each step, and those around it stand before its name."""
    names = set()
    for written in nested(3, 8):
        (said,) = make(1, lambda rank, text=written: [Text("stderr", text)], finished=False)
        found = bars_of(said)
        assert found is not None
        names.add(found.name)
    assert names == {"epoch", "epoch 0/4, step", "epoch 1/4, step", "epoch 2/4, step"}


def test_slowest() -> None:
    """Who is clearly behind the first is marked; where all are about as far, nobody is."""
    for positions, slowest in (((62, 61, 47, 60), 2), ((62, 61, 62, 60), None), ((62,), None)):
        table = bar_table(running(*positions))
        assert table is not None
        assert table.slowest == slowest
        # 15 of the 62 that the first has done.
        assert table.behind == ("rank 2 is 24 % behind" if slowest else "")
        assert table.ranks == tuple(range(len(positions)))


def test_behind_in_bars_with_numbers() -> None:
    """Who is in an earlier epoch is behind, though its bar is further; nobody knows how far."""
    bars = [bar(20, name="epoch 2"), bar(75, name="epoch 1"), bar(40, name="epoch 1")]
    table = bar_table(make(3, lambda rank: [bars[rank]], finished=False))
    assert table is not None
    assert (table.slowest, table.behind) == (2, "rank 2 is behind")
    assert [table.share(bars) for bars in table.rows] == [0.6, 0.375, 0.2]


@pytest.mark.parametrize("other", [bar(80, name="test"), at(80, 60.0)], ids=["name", "begun"])
def test_other_bars_are_not_compared(other: Text) -> None:
    """Those of another name, and of the same name that began at another time: another epoch's."""
    table = bar_table(make(2, lambda rank: [[at(20, 3.0), other][rank]], finished=False))
    assert table is not None
    assert (table.slowest, table.behind) == (None, "")


def test_behind_in_epochs() -> None:
    """Of nested bars the outer one decides, though the inner one is further."""
    steps = {epochs: [*nested(epochs, 6)][:-2] for epochs in (2, 3)}
    said = {0: steps[3][-1], 1: steps[2][-1]}
    transcript = make(2, lambda rank: [Text("stderr", said[rank])], finished=False)
    table = bar_table(transcript)
    assert table is not None
    assert table.slowest == 1
    assert [table.share(bars) for bars in table.rows] == [2.75 / 4, 1.75 / 4]
    assert merged_line(transcript).startswith("[0-1] epoch 1-2/4, step 75%")


def test_many_ranks() -> None:
    """Above 16 ranks the six slowest have rows, and where the others are is said."""
    table = bar_table(running(*range(20, 84)))
    assert table is not None
    assert [row.rank for row in table.rows] == [0, 1, 2, 3, 4, 5]
    assert table.summary == ("train · min 20% · median 51% · max 83% · ETA 00:12 · slowest first:")
    assert table.ranks == tuple(range(64))


def test_merged_line() -> None:
    """One line for all: who, what, where the middle, the last and the first are, and how long."""
    assert merged_line(running(63, 47, 64, 63)) == "[0-3] train 63% (47-64) 00:07<00:06"
    assert merged_line(running(50, 50)) == "[0-1] train 50% 00:06<00:06"
    assert merged_line(make(2, lambda rank: [out("x\n")], finished=False)) == ""
    assert merged_line(make(2, lambda rank: [bar(100)])) == ""
    paced = Text("stderr", "\r 25%|██▌       | 1/4 [00:06<?, ?it/s]")
    transcript = make(2, lambda rank: [paced], finished=False)
    assert merged_line(transcript) == "[0-1] 25% 00:06<00:18"
    endless = [Text("stderr", f"\r{done}it [00:03, 9.5it/s]") for done in (10, 30)]
    transcript = make(2, lambda rank: [endless[rank]], finished=False)
    assert merged_line(transcript) == "[0-1] 30it (10it-30it) 00:03"


def test_who_has_ended() -> None:
    """A rank that is through keeps its row while others run; a failed one has its block."""
    said: dict[int, list[Output]] = {2: [bar(50), Failure("E", "bad", ("E: bad",), 1)]}
    transcript = make(4, lambda rank: said.get(rank, [bar(40 + 20 * rank)]), finished=False)
    panel = live_layout(transcript, 2.0)
    assert panel.bars is not None
    assert panel.bars.ranks == (0, 1, 3)
    assert [block.group.ranks for block in panel.blocks] == [(2,)]
    assert bar_table(make(2, lambda rank: [bar(100)])) is None


def test_only_one_rank_has_a_bar() -> None:
    """As in libraries that show it on rank 0 alone; what others print has its blocks."""
    said = {0: [out("loading\n"), bar(30)], 2: [out("hello\n")]}
    panel = live_layout(make(4, lambda rank: said.get(rank, []), finished=False), 2.0)
    assert panel.bars is not None
    assert panel.bars.ranks == (0,)
    assert [row.line.text for row in panel.rows] == ["loading"]
    assert [block.group.ranks for block in panel.blocks] == [(2,)]


STEPS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10)), min_size=8, max_size=40)


@settings(max_examples=30)
@given(STEPS)
def test_ranks_keep_their_rows(steps: list[tuple[int, int]]) -> None:
    """Whatever bars say, and in whatever order, each rank has its own row, always the same."""
    transcript = Transcript(range(4))
    transcript.start(0.0)
    for rank in range(4):
        transcript.receive(rank, out("loading\n"), 0.0)
        transcript.receive(rank, bar(0, 10), 0.0)
    for rank, done in steps:
        transcript.receive(rank, bar(done, 10), 1.0)
        panel = live_layout(transcript, 1.0)
        assert panel.bars is not None
        assert [row.rank for row in panel.bars.rows] == [0, 1, 2, 3]
        assert panel.blocks == ()
        assert [row.ranks for row in panel.rows] == [(0, 1, 2, 3)]
