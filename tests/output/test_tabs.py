"""Tests of `nbdist.output.tabs`: each rank's own output in the order in which it came."""

from __future__ import annotations

from tqdm.std import tqdm

from nbdist.output.events import InputRequest, Output
from nbdist.output.html import panel_html
from nbdist.output.layout import final_layout, live_layout
from nbdist.output.panel import Hidden
from nbdist.output.tabs import live_by_rank
from nbdist.output.text import panel_text
from tests.output.lab import (
    Panel,
    drawing,
    err,
    failure,
    kinds,
    lines,
    make,
    out,
    ranks_of,
    running,
    tabs_of,
)

Said = dict[int, list[Output]]


def test_a_tab_has_its_rank_s_output_in_order() -> None:
    """A tab has the output of its rank in its order, with bars and the rank's own error."""
    bar = err("\r" + tqdm.format_meter(3, 3, 1.0, prefix="epoch") + "\n")
    said: Said = {
        0: [out("a\n"), bar, out("b\n"), drawing("c"), out("d\n")],
        2: [out("a\n"), failure("late", 9)],
        3: [out("a\n"), failure("soon", 5)],
        4: [],
    }
    transcript = make(5, lambda rank: said.get(rank, said[0]))
    panel = tabs_of(transcript, "cell-1")
    assert ranks_of(panel.blocks) == [(0,), (1,), (2,), (3,)]
    assert [block.is_open for block in panel.blocks] == [False, False, False, True]
    assert (panel.tabs, panel.silent, panel.bars) == ("cell-1", (4,), None)
    text = panel_text(panel)
    own = ["a", "epoch: 100%|██████████| 3/3 [00:01<00:00,  3.00it/s]", "b", "c", "d"]
    error = ["-----", "Cell In[1], line 2"]
    expected = ["5 ranks · 1.2 s · ✓ 3 · ✗ 2", *("── rank 0 ──", *own), *("── rank 1 ──", *own)]
    expected += ["── rank 2 ✗ ──", "a", *error, "E: late", "── rank 3 ✗ ──", "a", *error, "E: soon"]
    assert text.split("\n") == [*expected, "── rank 4 (no output) ──"]
    # A single rank has no row of tabs, and silent ranks have a line as always.
    assert tabs_of(make(4, lambda rank: [out("a\n")] * (rank == 2))).tabs == ""
    silent = make(2, lambda rank: [])
    assert tabs_of(silent) == final_layout(silent)
    given_back = running(2, lambda rank: [])
    assert tabs_of(given_back) == final_layout(given_back)


def test_failed_ranks_among_many_keep_their_tabs() -> None:
    """If a cell has more ranks than tabs, failed ranks have tabs, and the others are named."""
    said: Said = {199: [failure()]}
    transcript = make(200, lambda rank: said.get(rank, [lines(300)]))
    panel = tabs_of(transcript)
    assert ranks_of(panel.blocks) == [*((rank,) for rank in range(127)), (199,)]
    assert panel.more == tuple(range(127, 199))
    assert [block.group.ranks for block in panel.blocks if block.is_open] == [(199,)]
    assert kinds(panel.blocks[0].items) == [Hidden(250, in_log_only=False), 50]
    assert Panel(panel_html(panel)).lines[-1] == (
        "and 72 more: ranks 127-198: %dist_output -r 127-198"
    )


def test_each_rank_has_a_live_block() -> None:
    """In a live panel by rank, equal ranks are not merged, and a bar is a line of its rank."""
    meter = "\r" + tqdm.format_meter(1, 3, 1.0, prefix="epoch")
    said: Said = {0: [], 1: [lines(9), err(meter)], 2: [err(meter)]}
    transcript = running(3, lambda rank: said[rank])
    panel = live_by_rank(live_layout(transcript, 1.0), transcript)
    assert ranks_of(panel.blocks) == [(1,), (2,)]
    assert panel.bars is None
    assert [line.text for line in panel.blocks[0].items[0]][-2:] == ["8", meter.strip()]
    many = running(17, lambda rank: [lines(9)])
    assert live_by_rank(live_layout(many, 1.0), many) == live_layout(many, 1.0)
    # Ranks that wait for input come last, and below all others the rank of `turn`.
    asked: list[Output] = [lines(5), InputRequest(1, "name: ")]
    all_ask = running(4, lambda rank: asked if rank != 2 else [lines(5)])
    shown = live_layout(all_ask, 1.0, turn=1)
    assert ranks_of(live_by_rank(shown, all_ask, 1).blocks) == [(2,), (0,), (3,), (1,)]
