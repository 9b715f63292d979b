"""Tests of `nbdist.output.html`: a cell's output as one piece of HTML."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from nbdist.output.events import Display, Done, Failure, InputRequest, Output, Skipped
from nbdist.output.html import is_tile, panel_html, side_by_side_runs
from nbdist.output.html_parts import AMBER, RED
from nbdist.output.layout import final_layout
from nbdist.output.panel import MAX_LIVE_FIGURES, MAX_LIVE_PANEL_BYTES, MAX_PANEL_BYTES
from nbdist.output.transcript import Transcript
from nbdist.output.wording import FIGURE_LATER
from tests.output.lab import (
    STYLES,
    TAGS,
    Panel,
    err,
    failure,
    figure,
    final_html,
    final_text,
    live_html,
    live_text,
    make,
    out,
    running,
    tabs_html,
)

# --- final --------------------------------------------------------------------------------------


def test_a_traceback_is_shown_once_without_colour_codes() -> None:
    """A traceback is shown once, in the block of its rank, without the codes of its colours."""
    said = {5: [out("shape (3, 4)\n"), failure("bad")]}
    html = final_html(make(8, lambda rank: said.get(rank, [out("shape (3, 4)\n")])))
    lines = Panel(html).lines
    assert lines[:3] == ["8 ranks · 1.2 s · ✓ 7 · ✗ 1", "rank 5 ✗", "shape (3, 4)"]
    assert lines[3:] == ["-----", "Cell In[1], line 2", "E: bad", "ranks 0-4,6-7shape (3, 4)"]
    assert "\x1b" not in html
    # A block whose title says all has nothing to open.
    ended = Failure(
        "Released", "waited in barrier", ("Released: waited in barrier",), 2, (), "ended"
    )
    found = Panel(final_html(make(4, lambda rank: [failure("bad") if rank == 1 else ended])))
    assert found.lines[-1] == "ranks 0,2-3 ⊘ same Released: waited in barrier"
    assert found.opened == [True]


def test_warnings_turn_the_head_orange() -> None:
    """A warning turns the ticks of the head orange; failed ranks stay red, blocks do not change."""
    transcript = make(3, lambda rank: [out(f"{rank}\n")] + [failure("bad")] * (rank == 2))
    shown, said = final_layout(transcript), "watch: rank 1 differs from <ranks> 0,2"
    html = panel_html(shown._replace(warnings=(said,)))
    assert Panel(html).lines == [*(lines := Panel(panel_html(shown)).lines)[:1], said, *lines[1:]]
    head = html.partition("watch: ")[0]
    assert f'<span style="color:{AMBER}">✓ 2</span>' in head
    assert f'<span style="color:{RED}">✗ 1</span>' in head
    assert AMBER not in panel_html(shown)
    silent = final_layout(make(3, lambda rank: []))
    warned = panel_html(silent._replace(warnings=(said,)))
    assert Panel(warned).lines == [*Panel(panel_html(silent)).lines, said]
    assert AMBER in warned


def test_most_of_many_different_ranks_are_folded_away() -> None:
    """Of 64 different ranks the first and the failed have blocks; a closed block has the others."""
    said = {17: [out("mine\n"), failure("bad")]}
    usual = "rank {}\n" + "x" * 50 + "\n"
    panel = Panel(final_html(make(64, lambda rank: said.get(rank, [out(usual.format(rank))]))))
    assert panel.opened[:3] == [True, True, False]
    assert len(panel.opened) == 65
    assert "62 more ranks with output of their own: 1-16,18-63" in panel.lines
    assert panel.lines[1].startswith("0 1 2 3 4 5 6 7 8 9 10 11 ")  # also without styles


def test_texts_of_programs_never_become_markup() -> None:
    """No text of a program becomes markup, in final and live panels."""
    nasty = "</div></details><script>alert(1)</script><img src=x onerror=y>"
    said: list[Output] = [
        out(nasty),
        Display({"image/png": '"><script>', "text/plain": nasty}, {"image/png": {"width": nasty}}),
        Failure(nasty, nasty, (nasty,), 1),
    ]
    Panel(final_html(make(2, lambda rank: said), {0: nasty}, nasty))
    Panel(live_html(running(2, lambda rank: said), 2.0, nasty))


def test_tabs_of_a_panel_share_a_name() -> None:
    """The tabs of a panel share a name, which only panels with equal output have too."""
    panels = [
        tabs_html(make(3, lambda rank, last=last: [out(f"rank {rank} {last}\n")]))
        for last in ("a", "a", "b")
    ]
    names = [set(re.findall(r'<details name="([^"]*)"', html)) for html in panels]
    assert [len(each) for each in names] == [1, 1, 1]
    assert names[0] == names[1] != names[2]
    shown = Panel(panels[0])
    assert shown.opened == [True, False, False]
    parts = ["rank 0 ✓", "rank 0 a", "rank 1 ✓", "rank 1 a", "rank 2 ✓", "rank 2 a"]
    assert shown.lines == ["3 ranks · 1.2 s · ✓ 3", *parts]


def test_displays_below_the_panel_have_tabs() -> None:
    """A rank whose only outputs are displays below the panel has a tab that names them."""
    said = Display({"text/markdown": "**done**", "text/plain": "<Markdown>"}, {})
    html = tabs_html(make(2, lambda rank: [said]))
    assert Panel(html).lines[1:] == ["rank 0 ✓", MARKDOWN, "rank 1 ✓", MARKDOWN]
    assert MARKDOWN not in final_html(make(2, lambda rank: [said]))


MARKDOWN = "Markdown, shown below"


# --- live ---------------------------------------------------------------------------------------


def test_a_live_panel_shows_each_rank_s_newest_figure() -> None:
    """A live panel shows the newest figure of each rank, if the figure is not too big."""
    old, new = ({"image/png": letter * 30_000, "text/plain": "<Figure>"} for letter in "AB")
    said = [Display(old, {}), out("between\n"), Display(new, {}), out("later\n" * 100)]
    shown = Panel(live_html(running(4, lambda rank: [out(f"{'abcd'[rank]}\n"), *said])))
    assert len(shown.images) == 4
    assert all("B" * 30_000 in str(image["src"]) for image in shown.images)
    assert shown.lines.count("later") > 8
    html = live_html(running(2, lambda rank: [out(f"{'abcd'[rank]}\n"), *said[:3]]))
    assert [len(Panel(html).images), Panel(html).lines.count(FIGURE_LATER)] == [2, 2]
    # Images of few ranks may be larger than images of many ranks.
    for ranks, most in ((2, 300_000), (16, 30_000)):
        for length, count in ((most, ranks), (2 * most, 0)):
            figure = Display({"image/png": "A" * length, "text/plain": "<Figure>"}, {})
            said = [out("\n"), figure]
            html = live_html(running(ranks, lambda rank, said=said: [out("x" * rank), *said]))  # type: ignore[misc]
            assert len(Panel(html).images) == count
            assert Panel(html).lines.count(FIGURE_LATER) == ranks - count
            assert len(html) < MAX_LIVE_PANEL_BYTES + MAX_LIVE_FIGURES
    # Ranks that have only a row have no room for a figure.
    many = Panel(live_html(running(20, lambda rank: [out(f"{rank}\n"), Display(new, {})])))
    assert any(line.endswith(FIGURE_LATER) for line in many.lines)


# --- bounds -------------------------------------------------------------------------------------

LINES = "".join(f"step {number} <loss> & \x1b[32m0.{number}\x1b[0m\n" for number in range(10_000))
WILD = "\x1b[31m<&>\x1b[0m" * 1_000 + "\n"
SHADES = "\x1b[31m<<<<\x1b[32m&&&&" * 4 + "\x1b[0m\n"
TILES = "\x1b[31m<<<<\x1b[32m&&&&" * 45 + "\x1b[0m\n"

CASES: dict[str, tuple[int, Callable[[int], list[Output]]]] = {
    "4 x 10,000 lines": (4, lambda rank: [out(f"rank {rank}\n" + LINES)]),
    "64 ranks": (64, lambda rank: [out(f"{rank}\n" + LINES[:30_000])]),
    "lines of 2 MB": (2, lambda rank: [out(f"{rank}" + "<" * 2_000_000)]),
    "colours everywhere": (64, lambda rank: [out(f"{rank}\n" + WILD * 2)]),
    "64 tracebacks": (
        64,
        lambda rank: [out(f"{rank}\n"), Failure("E", "<" * 9_000, (WILD,), rank)],
    ),
    "coloured tiles": (12, lambda rank: [out("abcdefghijkl"[rank] + "\n" + TILES * 9)]),
    "1,024 ranks": (1024, lambda rank: [out(f"{rank}\n" + LINES[:3_000])]),
    "big tables": (64, lambda rank: [Display({"text/html": f"<b>{rank}{'x' * 150_000}</b>"}, {})]),
    "long words": (32, lambda rank: [out(f"{rank} {'x' * 120}\n" * 1_000)]),
    "streams in turns": (16, lambda rank: [out(f"{rank}\n"), err("x\n")] * 200),
    "drawn characters": (8, lambda rank: [out(f"{'abcdefgh'[rank]} {'██ ' * 9_000}\n")] * 9),
    "128 ranks in four groups": (128, lambda rank: [out(f"{'abcd'[rank % 4]}{SHADES}" * 99), ASKS]),
    "bars above lines": (16, lambda rank: [out(f"{'x' * rank}{SHADES}" * 99), err(METER), ASKS]),
    "64 errors": (
        64,
        lambda rank: [Failure("E", WORDS[rank], (f"{WORDS[rank]}{'<&>' * 300}",) * 99, 1)],
    ),
    "big texts of displays": (
        8,
        lambda rank: [Display({kind: f"{rank}{'<&x ' * 200_000}"}, {}) for kind in KINDS],
    ),
}
METER = f"\rthe first epoch:  63%|###      | 315/500 [00:12<00:07, 25.8it/s{', loss=2.1' * 9}]"
ASKS = InputRequest(1, "> ")
WORDS = [a + b for a in "abcdefgh" for b in "ijklmnop"]
KINDS = ("text/plain", "text/markdown", "application/json")


@pytest.mark.parametrize("case", CASES)
def test_panels_are_bounded_in_size(case: str) -> None:
    """Live panels have at most 64 KB, final panels 1 MB, and the text names the last rank, too."""
    ranks, said = CASES[case]
    transcript = running(ranks, said)
    live = live_html(transcript)
    assert 400 < len(live.encode()) <= MAX_LIVE_PANEL_BYTES == 64_000
    assert ranks > 16 or len(Panel(live).lines) > ranks
    assert len(live_text(transcript)) < 20_000
    for rank in range(ranks):
        transcript.receive(rank, Done("error" if transcript[rank].failure else "ok", 1.0), 1.0)
    assert len(final_html(transcript).encode()) <= MAX_PANEL_BYTES == 1_000_000
    assert len(tabs_html(transcript).encode()) <= MAX_PANEL_BYTES
    text = final_text(transcript)
    assert len(text) < MAX_PANEL_BYTES / 2
    assert re.search(rf"── (?:and \d+ more: )?ranks? \S*\b{ranks - 1}\b", text)


# --- JupyterLab ---------------------------------------------------------------------------------


def test_jupyterlab_allows_the_markup_of_panels() -> None:
    """All tags and styles of a panel are on the list of the installed JupyterLab's sanitiser."""
    static = Path(sys.prefix, "share", "jupyter", "lab", "static")
    scripts = [path.read_text("utf-8") for path in static.glob("jlab_core.*.js")]
    if not scripts:
        pytest.skip("JupyterLab is not installed")
    tags = re.search(r'allowedTags:\[("[^\]]*")\]', scripts[0])
    styles = re.search(r'allowedStyles:\{"\*":\{(.*?)\}\}', scripts[0])
    assert set(re.findall(r'"([\w-]+)"', tags[1])) >= TAGS
    assert set(re.findall(r'"?([\w-]+)"?:\[', styles[1])) >= STYLES


# --- side by side -------------------------------------------------------------------------------


def table(rank: int, title: str = "loss") -> Display:
    html = f"<table><tr><td>{rank}</td></tr></table>"
    return Display({"text/html": html, "text/plain": f"   {title}\n0  0.{rank}"}, {})


@pytest.mark.parametrize(
    ("said", "is_there"),
    [
        (lambda rank: [out(f"{rank}\n"), figure(f"rank {rank}")], True),
        (lambda rank: [table(rank)], True),
        (lambda rank: [out(f"epoch 0 loss 0.{rank}\nepoch 1 loss 0.{rank}\n")], True),
        (lambda rank: [out(f"{'x' * 60}{rank}\ny\n")], False),
        (lambda rank: [out(f"{rank}\n" * 30)], False),
        (lambda rank: [out(f"{rank}\n\n"), Skipped(9, 3)], False),
        (lambda rank: [table(rank), table(rank, "x" * 90)], False),
        (lambda rank: [out(f"{rank}\nx\n"), Failure("E", "ab"[rank % 2], ("E",), rank)], False),
    ],
)
def test_small_outputs_are_side_by_side(
    said: Callable[[int], Sequence[Output]], *, is_there: bool
) -> None:
    """Figures, small tables and a few short lines are side by side, but no failed rank is."""
    blocks = final_layout(make(4, said)).blocks
    assert blocks
    assert {is_tile(block) for block in blocks} == {is_there}
    assert max(len(run) for run in side_by_side_runs(blocks)) == (4 if is_there else 1)


def test_a_tile_of_a_caption_is_as_wide_as_the_caption() -> None:
    """A tile with only the caption of a display below the panel is as wide as the caption."""

    def widths(source: str) -> list[str]:
        content = {"text/markdown": source, "text/plain": source}
        html = final_html(make(3, lambda rank: [out(f"{rank}\n"), Display(content, {})]))
        return re.findall(r"flex:0 1 ([\d.]+)em", html)

    assert len(widths("**a**")) == 3
    assert widths("**a**") == widths(f"**{'a long text ' * 20}**")


def test_tiles_are_equally_wide_and_in_order() -> None:
    """Tiles are in a row that wraps, equally wide and in rank order; figures share its width."""
    for ranks, share in ((2, 45), (3, 30), (4, 45), (5, 30)):
        html = final_html(make(ranks, lambda rank: [figure(f"rank {rank}")]))
        assert html.count("flex-wrap:wrap") == 1
        # Two empty places make the figures of the last row as wide as all others.
        assert html.count(f"flex:1 1 {share}%") == ranks + 2
        assert len(re.findall(f'<div style="flex:1 1 {share}%[^"]*"></div>', html)) == 2
    assert html.index("rank 0") < html.index("rank 1") < html.index("rank 2")
    # All columns are equally wide, however wide a line is, and if a rank lacks its figure.
    for said in (
        lambda rank: [table(rank)],
        lambda rank: [out(f"{rank}\n{'x' * 5 * rank}\n")],
        lambda rank: [out(f"{rank}\n"), *([figure(f"rank {rank}")] if rank else [])],
    ):
        html = final_html(make(5, said))  # type: ignore[arg-type]
        assert len(shares := re.findall(r"flex:(\S+ \S+ [^;]+);", html)) in (5, 7)
        assert len({*shares}) == 1
        assert re.fullmatch(r"0 1 [\d.]+em|1 1 30%", shares[0])
    assert "flex" not in final_html(make(3, lambda rank: [figure("same")]))
    # Four tiles are two and two on a page with room for three.
    found = Panel(html := final_html(make(4, lambda rank: [table(rank)])))
    assert html.count("flex-wrap:wrap") == 3
    assert html.index("rank 1") < html.rindex("flex-wrap:wrap") < html.index("rank 2")
    assert found.opened == [True] * 4
    # Only neighbours stand side by side, so that ranks stay in order.
    transcript = make(5, lambda rank: [out("x" * 60 + "\ny\n" if rank == 2 else f"{rank}\ny\n")])
    runs = [*side_by_side_runs(final_layout(transcript).blocks)]
    assert [[block.group.ranks[0] for block in run] for run in runs] == [[0, 1], [2], [3, 4]]
    # While the cell runs the tiles are in the same places.
    for said, count in ((figure, 1), (table, 1), (lambda rank: out(f"{'abc'[int(rank)]}\ny\n"), 1)):
        html = live_html(running(3, lambda rank, said=said: [said(f"{rank}")]))  # type: ignore[operator]
        assert html.count("flex-wrap:wrap") == count
        Panel(html)


# --- bars ---------------------------------------------------------------------------------------

DONE = (315, 310, 235, 9)


def cell(ranks: int) -> Transcript:
    """A cell whose ranks are at a bar, with something that looks like markup behind it."""
    bar = "\repoch 1:  {}%|###      | {}/500 [00:12<00:07, 25.8it/s, loss=2.1<]"
    return running(ranks, lambda rank: [err(bar.format(DONE[rank % 4] // 5, DONE[rank % 4]))])


def test_columns_of_bars_are_aligned() -> None:
    """The columns of bars are aligned in text, and a bar in HTML is as wide as its share."""
    head, header, *rows = live_text(cell(4), 12.3).split("\n")
    assert (head, header) == (
        "4 ranks · 12.3 s · ● 4 · rank 3 is 97 % behind",
        "── ranks 0-3 (bars) ──",
    )
    assert rows[0] == (
        "rank 0  epoch 1  |████████████▋       |   63%           315/500  00:12<00:07  25.8it/s  "
        "loss=2.1<"
    )
    assert "  1%  slowest  9/500  " in rows[3]
    for column in ("epoch", "%", "00:12", "loss"):
        assert len({row.index(column) for row in rows}) == 1
    html = live_html(cell(4), 12.3)
    lines = Panel(html).lines
    assert lines[1] == "rank 0epoch 1 63%  315/500 00:12<00:07 25.8it/s loss=2.1<"
    assert lines[4].startswith("rank 3epoch 1 1% slowest 9/500 ")
    columns = re.findall(r"inline-block;min-width:([\d.]+)em", html)
    assert columns == 4 * columns[:5]
    assert 4 * [html.partition("flex:1 1 ")[2][:5]] == re.findall(r"flex:1 1 (.{5})", html)
    widths = re.findall(r"height:10px;border-radius:2px;width:(\d+)%", html)
    assert widths == ["63", "62", "47", "2"]
    assert len(live_html(cell(16))) < MAX_LIVE_PANEL_BYTES / 2
    # A finished bar has a row for all ranks, and is no line of the output.
    last = "\rtrain: 100%|##########| 5/5 [00:01<00:00, 4.0it/s]\n"
    html = final_html(make(2, lambda rank: [err(last), err("careful\n"), out(f"rank {rank}\n")]))
    assert Panel(html).lines[1] == "ranks 0-1train 5/5 1 s 4it/s"
    assert "100%" not in "".join(Panel(html).lines)
    assert html.count("rgba(255,80,80,0.1)") == 1
    # A name that a narrow page cuts is in a tooltip; a short name and other text are never cut.
    cut = "max-width:0;overflow:hidden;text-overflow:ellipsis"
    for name, times in (("validating imagenet-1k fold", 1), ("validating", 0)):
        text = f"\r{name}: 20%|##   | 1/5 [00:01<00:04, 4.0it/s, loss=2.1 & grad_norm=0.5]"
        html = live_html(running(1, lambda rank, text=text: [err(text)]))
        assert html.count(cut) == html.count("<span title=") == times
    assert "loss=2.1 &amp; grad_norm=0.5" in html
    # Of more than 16 ranks the six slowest have rows, below a line about all ranks.
    lines = Panel(live_html(cell(64), 12.3)).lines
    assert lines[2] == "epoch 1 · min 1% · median 54% · max 63% · ETA 00:07 · slowest first:"
    rows = [line.split("epoch")[0] for line in lines[3:]]
    assert rows == [f"rank {rank}" for rank in (3, 7, 11, 15, 19, 23)]
    assert live_text(cell(64), 12.3).split("\n")[2] == lines[2]
