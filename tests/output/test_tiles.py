"""Tests of `nbdist.output.tiles`: which blocks stand side by side."""

from __future__ import annotations

import pytest

from nbdist.output.events import Display, Failure, Output, Skipped
from nbdist.output.final import final_layout
from nbdist.output.tiles import is_tile, tile_style, tiled, tiles_html
from tests.output.lab import Panel, figure, final_html, live_html, make, out

TABLE = {"text/html": "<table><tr><td>{}</td></tr></table>", "text/plain": "   loss\n0  0.{}"}

WIDE = Display({"text/html": "<b>x</b>", "text/plain": "x" * 90}, {})


def table(rank: int) -> Display:
    return Display({kind: text.format(rank) for kind, text in TABLE.items()}, {})


@pytest.mark.parametrize(
    ("said", "is_there"),
    [
        (lambda rank: [figure(f"rank {rank}")], True),
        (lambda rank: [out(f"{rank}\n"), figure(f"rank {rank}")], True),
        (lambda rank: [table(rank)], True),
        (lambda rank: [out(f"epoch 0 loss 0.{rank}\nepoch 1 loss 0.{rank}\n")], True),
        (lambda rank: [out(f"{'x' * 60}{rank}\ny\n")], False),
        (lambda rank: [out(f"{rank}\n" * 30)], False),
        (lambda rank: [out(f"{rank}\n\n"), Skipped(9, 3)], False),
        (
            lambda rank: [
                table(rank),
                Display({"text/html": "<b>x</b>" * 9, "text/plain": "x" * 90}, {}),
            ],
            False,
        ),
        (
            lambda rank: [out(f"{rank}\nx\n"), Failure("E", f"{'ab'[rank % 2]}", ("E",), rank)],
            False,
        ),
    ],
)
def test_what_is_small(said: object, *, is_there: bool) -> None:
    """Figures, small tables and a few short lines; nothing of a failed rank."""
    blocks = final_layout(make(4, said)).blocks  # type: ignore[arg-type]
    assert blocks
    assert {is_tile(block) for block in blocks} == {is_there}
    assert max(len(run) for run in tiled(blocks)) == (4 if is_there else 1)


def test_neighbours() -> None:
    """Only neighbours stand side by side, so that ranks stay in order."""
    wide: list[Output] = [out("x" * 60 + "\ny\n")]
    transcript = make(5, lambda rank: wide if rank == 2 else [out(f"{rank}\ny\n")])
    runs = [*tiled(final_layout(transcript).blocks)]
    assert [[block.group.ranks[0] for block in run] for run in runs] == [[0, 1], [2], [3, 4]]


def test_html() -> None:
    """They are in one row that wraps; figures share its width."""
    for ranks, share in ((2, 45), (3, 30), (4, 45), (5, 30)):
        html = final_html(make(ranks, lambda rank: [figure(f"rank {rank}")]))
        assert html.count("flex-wrap:wrap") == 1
        assert html.count(f"flex:1 1 {share}%") == ranks
    assert html.index("rank 0") < html.index("rank 1") < html.index("rank 2")
    html = final_html(make(3, lambda rank: [table(rank)]))
    assert html.count("flex:0 1 auto") == 3
    assert "flex" not in final_html(make(3, lambda rank: [figure("same")]))
    (block, *_) = final_layout(make(2, lambda rank: [table(rank)])).blocks
    assert tile_style(block, 2) in tiles_html([tile_style(block, 2)])


def test_live() -> None:
    """Figures stand side by side as soon as they are there; lines, of which more come, do not."""

    def one_figure(rank: int) -> Output:
        return figure(f"rank {rank}")

    def one_line(rank: int) -> Output:
        return out(f"{rank}\n")

    for said, count in ((one_figure, 1), (table, 1), (one_line, 0)):
        transcript = make(3, lambda rank, said=said: [said(rank)], finished=False)
        html = live_html(transcript, 1.0)
        assert html.count("flex-wrap:wrap") == count
        Panel(html)
