"""Tests of `nbdist.output.html`: a cell's output as one piece of HTML."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import IPython
import pytest
from IPython.core.ultratb import AutoFormattedTB
from tqdm import tqdm

from nbdist.output.events import Display, Done, Failure, Output, Skipped, Text
from nbdist.output.html import MOST_BYTES, MOST_LIVE_BYTES, is_tile, tiled
from nbdist.output.layout import final_layout
from nbdist.output.transcript import Transcript
from tests.output.lab import (
    STYLES,
    TAGS,
    Panel,
    figure,
    final_html,
    live_html,
    live_text,
    make,
    out,
)


def failure(message: str, time_ns: int = 1) -> Failure:
    """An exception with the traceback that IPython makes of it, in colour."""
    theme: dict[str, Any] = (
        {"theme_name": "neutral"} if IPython.version_info >= (9,) else {"color_scheme": "Neutral"}
    )
    formatter = AutoFormattedTB(mode="Context", tb_offset=0, **theme)
    try:
        raise ValueError(message)
    except ValueError as error:
        lines = formatter.structured_traceback(type(error), error, error.__traceback__)
    return Failure("ValueError", message, tuple(lines), time_ns)


def bar(done: int) -> Text:
    written = io.StringIO()
    with tqdm(total=5, desc="train", file=written, mininterval=0) as shown:
        shown.update(done)
    return Text("stderr", written.getvalue())


# --- final ------------------------------------------------------------------------------


def test_failed_rank() -> None:
    """The traceback stands once, in its rank's block, as IPython wrote it but for its codes."""
    html = final_html(
        make(8, lambda rank: [out("shape (3, 4)\n"), *([failure("bad")] if rank == 5 else [])])
    )
    lines = Panel(html).lines
    assert lines[:3] == ["8 ranks · 1.2 s · ✓ 7 · ✗ 1", "rank 5 ✗ 1 line", "shape (3, 4)"]
    assert lines[-2:] == ["ValueError: bad", "ranks 0-4,6-7shape (3, 4)"]
    assert sum("Traceback (most recent call last)" in line for line in lines) == 1
    assert any(line.startswith("--> ") or "---> " in line for line in lines)
    assert "\x1b" not in html


def test_many_groups() -> None:
    """Of 64 different ranks the first and the failed have blocks, the others are behind one."""
    said = {17: [out("mine\n"), failure("bad")]}
    usual = "rank {}\n" + "x" * 50 + "\n"
    panel = Panel(final_html(make(64, lambda rank: said.get(rank, [out(usual.format(rank))]))))
    assert panel.opened[:3] == [True, True, False]
    assert len(panel.opened) == 65
    assert "62 more ranks with output of their own: 1-16,18-63" in panel.lines
    assert panel.lines[1].startswith("01234567891011")


def test_bars() -> None:
    """A finished progress bar is one line of its block, and not tinted as other stderr is."""
    said = [bar(5), Text("stderr", "careful\n")]
    html = final_html(make(2, lambda rank: [*said, out(f"rank {rank}\n")]))
    assert sum("100%" in line for line in Panel(html).lines) == 2
    assert html.count("rgba(255,80,80,0.1)") == 2


def test_values_cannot_break_out() -> None:
    """No text of a program becomes markup."""
    nasty = "</div></details><script>alert(1)</script><img src=x onerror=y>"
    said: list[Output] = [
        out(nasty),
        Display({"image/png": '"><script>', "text/plain": nasty}, {"image/png": {"width": nasty}}),
        Failure(nasty, nasty, (nasty,), 1),
    ]
    for finished in (True, False):
        transcript = make(2, lambda rank: said, finished=finished)
        Panel(final_html(transcript, {0: nasty}, note=nasty))
        Panel(live_html(transcript, 2.0, note=nasty))


# --- live -------------------------------------------------------------------------------


def test_live_groups() -> None:
    """Each group shows its last lines, failed ones first, and what the ranks wait for."""
    steps = "".join(f"step {number}\n" for number in range(40))
    said = {1: [out(steps), failure("bad")]}
    transcript = make(4, lambda rank: said.get(rank, [out(steps)]), finished=False)
    lines = Panel(live_html(transcript, 12.34, note="ranks 0-2 wait in all_reduce")).lines
    assert lines[:3] == [
        "4 ranks · 12.3 s · ● 3 · ✗ 1",
        "ranks 0-2 wait in all_reduce",
        "rank 1 ✗ … 28 earlier",
    ]
    assert lines[-13] == "ranks 0,2-3 ● same · … 28 earlier"
    assert lines[-1] == "step 39"
    assert "details" not in live_html(transcript, 1.0)


def test_live_figure() -> None:
    """A figure that fits is seen while the cell runs, a bigger one is named."""
    shown = figure("loss")
    transcript = make(2, lambda rank: [shown], finished=False)
    assert len(Panel(live_html(transcript, 1.0)).images) == 1
    big = Display({"image/png": "A" * 100_000, "text/plain": "<Figure>"}, {})
    transcript = make(2, lambda rank: [big], finished=False)
    assert Panel(live_html(transcript, 1.0)).lines[-1] == "<Figure>"


def test_live_long_lines() -> None:
    """Of a line that goes on and on the start is seen, and that there is more."""
    for text, end in (("x" * 10_000, "… 9,600 more characters"), (WILD, "… more characters")):
        transcript = make(2, lambda rank, text=text: [out(text)], finished=False)
        line = Panel(live_html(transcript, 1.0)).lines[-1]
        assert line.startswith(("xxx", "<&><&>"))
        assert line.endswith(end)


# --- bounds -----------------------------------------------------------------------------

LINES = "".join(f"step {number} <loss> & \x1b[32m0.{number}\x1b[0m\n" for number in range(50_000))
WILD = "\x1b[31m<&>\x1b[0m" * 5_000 + "\n"

TILES = "\x1b[31m<<<<\x1b[32m&&&&" * 45 + "\x1b[0m\n"


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        pytest.param(4, lambda rank: [out(f"rank {rank}\n" + LINES)], id="4 x 50,000 lines"),
        pytest.param(64, lambda rank: [out(f"{rank}\n" + LINES[:90_000])], id="64 ranks"),
        pytest.param(2, lambda rank: [out(f"{rank}" + "<" * 10_000_000)], id="lines of 10 MB"),
        pytest.param(64, lambda rank: [out(f"{rank}\n" + WILD * 2)], id="colours everywhere"),
        pytest.param(
            64,
            lambda rank: [out(f"{rank}\n"), Failure("E", "<" * 9_000, (WILD,), rank)],
            id="64 long tracebacks",
        ),
        pytest.param(12, lambda rank: [out(f"{rank}\n" + TILES * 9)], id="coloured tiles"),
        pytest.param(1024, lambda rank: [out(f"{rank}\n" + LINES[:3_000])], id="1,024 ranks"),
        pytest.param(
            64,
            lambda rank: [Display({"text/html": f"<b>{rank}{'x' * 150_000}</b>"}, {})],
            id="64 big tables",
        ),
    ],
)
def test_bounds(ranks: int, said: Callable[[int], Sequence[Output]]) -> None:
    """A live panel is at most 64 KB, a final one 1 MB."""
    transcript = make(ranks, said, finished=False)
    live = live_html(transcript, 1.0)
    assert 400 < len(live.encode()) <= MOST_LIVE_BYTES == 64_000
    assert ranks > 16 or len(Panel(live).lines) > ranks
    for rank in range(ranks):
        transcript.receive(rank, Done("ok", 1.0), 1.0)
    final = final_html(transcript)
    assert len(final.encode()) <= MOST_BYTES == 1_000_000


# --- JupyterLab -------------------------------------------------------------------------


def test_jupyterlab_allows_it() -> None:
    """All tags and styles of a panel are on the list of the installed JupyterLab's sanitiser."""
    static = Path(sys.prefix, "share", "jupyter", "lab", "static")
    scripts = [path.read_text("utf-8") for path in static.glob("jlab_core.*.js")]
    if not scripts:
        pytest.skip("JupyterLab is not installed")
    tags = re.search(r'allowedTags:\[("[^\]]*")\]', scripts[0])
    styles = re.search(r'allowedStyles:\{"\*":\{(.*?)\}\}', scripts[0])
    assert tags is not None
    assert styles is not None
    assert set(re.findall(r'"([\w-]+)"', tags[1])) >= TAGS
    assert set(re.findall(r'"?([\w-]+)"?:\[', styles[1])) >= STYLES


TABLE = {"text/html": "<table><tr><td>{}</td></tr></table>", "text/plain": "   loss\n0  0.{}"}


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


def test_tiles_as_html() -> None:
    """They are in one row that wraps; figures share its width."""
    for ranks, share in ((2, 45), (3, 30), (4, 45), (5, 30)):
        html = final_html(make(ranks, lambda rank: [figure(f"rank {rank}")]))
        assert html.count("flex-wrap:wrap") == 1
        assert html.count(f"flex:1 1 {share}%") == ranks
    assert html.index("rank 0") < html.index("rank 1") < html.index("rank 2")
    html = final_html(make(3, lambda rank: [table(rank)]))
    assert html.count("flex:0 1 auto") == 3
    assert "flex" not in final_html(make(3, lambda rank: [figure("same")]))
    # Only neighbours stand side by side, so that ranks stay in order.
    wide: list[Output] = [out("x" * 60 + "\ny\n")]
    transcript = make(5, lambda rank: wide if rank == 2 else [out(f"{rank}\ny\n")])
    runs = [*tiled(final_layout(transcript).blocks)]
    assert [[block.group.ranks[0] for block in run] for run in runs] == [[0, 1], [2], [3, 4]]


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


DONE = (315, 310, 235, 9)


def cell(ranks: int) -> Transcript:
    def said(rank: int) -> list[Text]:
        done = DONE[rank % 4]
        share = 100 * done // 500
        times = "[00:12<00:07, 25.8it/s, loss=2.1<]"
        return [Text("stderr", f"\repoch 1:  {share}%|###      | {done}/500 {times}")]

    return make(ranks, said, finished=False)


def test_bars_as_text_is_aligned() -> None:
    """All columns stand below one another; each line names its rank."""
    head, header, *lines = live_text(cell(4), 12.3).split("\n")
    assert (head, header) == ("4 ranks · 12.3 s · ● 4 · rank 3 is 97 % behind", "── ranks 0-3 ──")
    assert lines[0] == (
        "rank 0  epoch 1  |████████████▋       |   63%  315/500  00:12<00:07  25.8it/s  loss=2.1<"
    )
    assert lines[3].endswith("loss=2.1<  slowest")
    for column in ("epoch", "%", "00:12", "loss"):
        assert len({line.index(column) for line in lines}) == 1


def test_bars_as_html() -> None:
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
