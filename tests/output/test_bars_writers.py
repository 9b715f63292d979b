"""Tests of `nbdist.output.bars_writers`: a table of bars for pages and as text."""

from __future__ import annotations

import re

from nbdist.output.events import Text
from nbdist.output.html import MOST_LIVE_BYTES
from nbdist.output.transcript import Transcript
from tests.output.lab import Panel, live_html, live_text, make

DONE = (315, 310, 235, 9)


def cell(ranks: int) -> Transcript:
    def said(rank: int) -> list[Text]:
        done = DONE[rank % 4]
        share = 100 * done // 500
        times = "[00:12<00:07, 25.8it/s, loss=2.1<]"
        return [Text("stderr", f"\repoch 1:  {share}%|###      | {done}/500 {times}")]

    return make(ranks, said, finished=False)


def test_text_is_aligned() -> None:
    """All columns stand below one another; each line names its rank."""
    head, header, *lines = live_text(cell(4), 12.3).split("\n")
    assert (head, header) == (
        "4 ranks · 12.3 s · ● 4 · rank 3 is 97 % behind",
        "── ranks 0-3 ──",
    )
    assert lines[0] == (
        "rank 0  epoch 1  |████████████▋       |   63%  315/500  00:12<00:07  25.8it/s  loss=2.1<"
    )
    assert lines[3].endswith("loss=2.1<  slowest")
    for column in ("epoch", "%", "00:12", "loss"):
        assert len({line.index(column) for line in lines}) == 1


def test_html() -> None:
    """A drawn bar is as wide as its share; only allowed styles; little of it."""
    html = live_html(cell(4), 12.3)
    lines = Panel(html).lines
    assert lines[1] == "rank 0epoch 163%315/50000:12<00:0725.8it/sloss=2.1<"
    assert lines[4].endswith("loss=2.1< slowest")
    assert re.findall(r"height:10px;border-radius:2px;width:(\d+)%", html) == [
        "63",
        "62",
        "47",
        "2",
    ]
    assert len(live_html(cell(16), 1.0)) < MOST_LIVE_BYTES / 2


def test_many_ranks() -> None:
    """Six rows below a line on all."""
    lines = Panel(live_html(cell(64), 12.3)).lines
    assert lines[2].startswith("epoch 1 · min 1% · median 54% · max 63% · ETA 00:07")
    assert [line.split("epoch")[0] for line in lines[3:]] == [
        f"rank {rank}" for rank in (3, 7, 11, 15, 19, 23)
    ]
    assert live_text(cell(64), 12.3).split("\n")[2] == lines[2]
