"""Panels over the whole life of a cell: what is drawn keeps its place until the final panel."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest
from tqdm.std import tqdm

from nbdist.output.ansi import strip
from nbdist.output.events import Done, Output
from nbdist.output.html import panel_html
from nbdist.output.layout import final_layout, live_layout
from nbdist.output.panel import TALL_LINES, Panel
from nbdist.output.screen import ScreenLine
from nbdist.output.transcript import MAX_NUMBERED_LINES, Transcript
from tests.output.lab import err, out, ranks_of, value

RANKS = range(4)
MAX_DRAWINGS = 80


class Recorder(list[Output]):
    """The output of a rank, with a file that records what tqdm writes, and a print function."""

    def write(self, text: str) -> None:
        self.append(err(text))

    def flush(self) -> None:
        """Do nothing; tqdm calls this method of its file."""

    def print(self, text: str) -> None:
        self.append(out(f"{text}\n"))

    def bar(self, steps: int, name: str, **options: bool) -> Iterator[int]:
        """Yield the steps of a bar of tqdm, which draws the bar at each step."""
        yield from tqdm(range(steps), name, file=self, mininterval=0, **options)


def loss(rank: int, step: int) -> str:
    return f"loss {0.8 - step / 100 + rank / 1000:.4f}"


def prints_in_the_loop(rank: int, said: Recorder) -> None:
    """The commonest loop: a bar for each epoch, and a line every few steps."""
    for epoch in range(2):
        for step in said.bar(12, f"epoch {epoch}"):
            if step % 4 == 0:
                said.print(f"epoch {epoch} step {step} {loss(rank, step)}")


def a_line_below_each_bar(rank: int, said: Recorder) -> None:
    for epoch in range(4):
        for _ in said.bar(3, f"epoch {epoch}"):
            pass
        said.print(f"epoch {epoch} {loss(rank, epoch)}")


def bars_of_one_name(rank: int, said: Recorder) -> None:
    for epoch in range(3):
        for step in said.bar(5, ""):
            if step == 2:
                said.print(f"epoch {epoch} {loss(rank, epoch)}")


def one_line(rank: int, said: Recorder) -> None:
    for step in said.bar(6, "train"):
        if step == 3:
            said.print(loss(rank, step))


def a_bar_that_is_erased(rank: int, said: Recorder) -> None:
    for step in said.bar(6, "train", leave=False):
        if step == 3:
            said.print(loss(rank, step))


def a_value_at_the_end(rank: int, said: Recorder) -> None:
    one_line(rank, said)
    said.append(value(f"0.{rank}"))


def very_many_lines(rank: int, said: Recorder) -> None:
    for step in said.bar(MAX_NUMBERED_LINES + 40, "train"):
        said.print(f"step {step} {loss(rank, step)}")


LOOPS: dict[str, Callable[[int, Recorder], None]] = {
    each.__name__: each
    for each in (
        prints_in_the_loop,
        a_line_below_each_bar,
        bars_of_one_name,
        one_line,
        a_bar_that_is_erased,
        a_value_at_the_end,
        very_many_lines,
    )
}


class Drawn(NamedTuple):
    """The parts of a panel from top to bottom.

    `left` has the name and total of each bar that all ranks have left, `rows` the ranks that are at
    a bar, and `blocks` the ranks of each block. `lines` are the printed lines in and below the
    blocks, without the numbers in which ranks differ.
    """

    left: list[tuple[str, str]]
    rows: list[int]
    blocks: list[tuple[int, ...]]
    lines: list[str]


def drawn(panel: Panel) -> Drawn:
    left = [(each.bar.name, each.bar.total) for each in panel.bars.left_bars] if panel.bars else []
    rows = [each.rank for each in panel.bars.rows] if panel.bars else []
    return Drawn(left, rows, ranks_of(panel.blocks), [*lines_of(panel)])


def lines_of(panel: Panel) -> Iterator[str]:
    for block in panel.blocks:
        yield from ["…"] * block.earlier
        for item in block.items:
            yield from (words(line) for line in item) if isinstance(item, list) else ["…"]
    yield from (words(row.line) for row in panel.rows)


def words(line: ScreenLine) -> str:
    return re.sub(r"\{[^}]*\}|\d+\.\d+", "0.0", strip(line.text))


def lives(transcript: Transcript, said: Sequence[tuple[int, Output]]) -> Iterator[Panel]:
    """Yield live panels, after each output or after every few of many, and then the final panel."""
    transcript.start(0.0)
    for number, (rank, output) in enumerate(said, 1):
        transcript.receive(rank, output, 1.0)
        if number % (1 + len(said) // MAX_DRAWINGS) == 0:
            yield live_layout(transcript, 1.0)
    for rank in RANKS:
        transcript.receive(rank, Done("ok", 1.0), 1.0)
    yield final_layout(transcript)


@pytest.mark.parametrize("ahead", [(0, 0, 0, 0), (3, 0, 2, 1), (0, 1, 1, 3)])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_keeps_its_layout(loop: str, ahead: tuple[int, ...]) -> None:
    """In a loop with bars, each drawing keeps the blocks of the drawing before in their places.

    All lines are in one block, which takes up the ranks as they print.  A rank keeps its row of the
    table of bars, and bars that all ranks have left come above.  The final panel has the blocks and
    lines of the last live panel, and a row for each bar.
    """
    all_said = {rank: Recorder() for rank in RANKS}
    for rank, recorder in all_said.items():
        LOOPS[loop](rank, recorder)
    # A rank that is ahead is some outputs further than the others.
    mixed = sorted(
        (number - ahead[rank], rank, output)
        for rank in RANKS
        for number, output in enumerate(all_said[rank])
    )
    *live, final = lives(Transcript(RANKS), [(rank, output) for _, rank, output in mixed])
    before = drawn(live[0])
    for panel in live[1:]:
        now = drawn(panel)
        assert now.left[: len(before.left)] == before.left
        assert {*before.rows} <= {*now.rows} or loop == "a_bar_that_is_erased"
        assert now.rows == sorted(now.rows)
        # Ranks with a value at their end have a block of their own until all ranks have ended.
        assert len(now.blocks) <= 1 or loop == "a_value_at_the_end"
        if len(now.blocks) == len(before.blocks) == 1:
            assert {*before.blocks[0]} <= {*now.blocks[0]}
            if len(now.lines) <= TALL_LINES:  # of more lines a live panel shows the last
                assert now.lines[: len(before.lines)] == before.lines
        before = now
    last = live[-1]
    assert ranks_of(final.blocks) == ranks_of(last.blocks) == [(*RANKS,)]
    assert [block.is_open for block in final.blocks] == [block.is_open for block in last.blocks]
    assert drawn(final).lines[-TALL_LINES:] == before.lines[-TALL_LINES:]
    assert (final.spread, final.rows) == ("", ())
    bars = [(each.bar.name, each.bar.total) for each in last.bars.rows] if last.bars else []
    assert drawn(final).left == [*before.left, *dict.fromkeys(bars)]
    for panel in (last, final):
        html = panel_html(panel)
        assert (html.find("<table") < html.index("ranks 0-3</span> ")) or panel.bars is None
