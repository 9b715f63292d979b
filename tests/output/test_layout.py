"""Tests of `nbdist.output.layout`: what a panel shows, before anything is written."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.output.events import Died, Display, Failure, InputRequest, Output, Skipped
from nbdist.output.html import panel_html
from nbdist.output.layout import (
    Block,
    Hidden,
    Item,
    Panel,
    Row,
    final_layout,
    live_layout,
    merged,
)
from nbdist.output.rank_transcript import Shown
from nbdist.output.screen import Line
from nbdist.output.text import panel_text
from tests.output.lab import make, out, value


def lines(count: int, text: str = "") -> Output:
    return out("".join(f"{text}{number}\n" for number in range(count)))


def failure(message: str = "bad", time_ns: int = 1) -> Failure:
    return Failure("E", message, ("Cell In[1], line 2", f"E: {message}"), time_ns)


def ranks(blocks: Iterable[Block]) -> list[tuple[int, ...]]:
    return [block.group.ranks for block in blocks]


def kinds(items: Iterable[Item]) -> list[object]:
    return [len(item) if isinstance(item, list) else item for item in items]


# --- final ------------------------------------------------------------------------------


def test_silent() -> None:
    """Nothing to show: who, and how long."""
    assert final_layout(make(8, lambda rank: [])) == Panel("8 ranks", "1.2 s")


def test_values() -> None:
    """One short line of each rank is a row, equal ones once."""
    panel = final_layout(make(4, lambda rank: [value(f"{rank // 2}")]))
    first = Row((0, 1), Line("0", stderr=False), "same")
    assert panel.rows == (first, Row((2, 3), Line("1", stderr=False), "same"))
    assert panel.blocks == panel.rest == ()


def test_no_values() -> None:
    """A longer line, a failed rank or too many different ones have blocks."""
    for transcript in (
        make(2, lambda rank: [out("x" * 101 + "\n")]),
        make(2, lambda rank: [out("x\n"), *([failure()] if rank else [])]),
        make(300, lambda rank: [value(str(rank))]),
    ):
        panel = final_layout(transcript)
        assert panel.rows == ()
        assert panel.blocks


def test_what_is_open() -> None:
    """The first, the failed, and others as long as 60 lines are open together."""
    said = {3: [lines(70, "d"), failure()], 4: []}
    transcript = make(5, lambda rank: said.get(rank, [lines(25, "abc"[rank % 3])]))
    blocks = final_layout(transcript).blocks
    assert ranks(blocks) == [(0,), (1,), (2,), (3,), (4,)]
    assert [block.is_open for block in blocks] == [True, True, False, True, False]


def test_what_stands_back() -> None:
    """Of many groups those that are like many others."""
    said = {40: [out("d\n" * 3), failure()], 50: [out("same\n" * 3)], 51: [out("same\n" * 3)]}
    panel = final_layout(make(64, lambda rank: said.get(rank, [lines(2, f"{rank} ")])))
    assert ranks(panel.blocks) == [(0,), (40,), (50, 51)]
    assert len(panel.rest) == 60
    assert not any(block.is_open for block in panel.rest)


def test_how_many_lines() -> None:
    """The last 200, of many ranks 50; what is missing is counted in its place."""
    (block,) = final_layout(make(1, lambda rank: [lines(1000)]), {0: "0.log"}).blocks
    assert kinds(block.items) == [Hidden(800, in_log_only=False), 200]
    assert block.words == ("1,000 lines",)
    assert block.where_rest(Hidden(800, in_log_only=False)) == (
        "… 800 lines more: %dist_output -r 0 --all, or 0.log"
    )
    (block,) = final_layout(make(64, lambda rank: [lines(1000)])).blocks
    assert kinds(block.items) == [Hidden(950, in_log_only=False), 50]


def test_displays_are_kept() -> None:
    """All of them, wherever they stand among lines that are left out."""
    shown = Display({"text/html": "<b>x</b>"}, {})
    said = [lines(300), shown, Skipped("stdout", 9, 3), lines(150)]
    (block,) = final_layout(make(1, lambda rank: said)).blocks
    hidden, kept, display, gap, last = block.items
    assert kinds([hidden, kept, gap, last]) == [
        Hidden(250, in_log_only=False),
        50,
        Hidden(3, in_log_only=True),
        150,
    ]
    assert isinstance(display, Shown)


def test_failures() -> None:
    """The first has its traceback, the others a line that says what they have to do with it."""
    said: dict[int, list[Output]] = {
        0: [out("a\n")],
        1: [out("b\n"), failure("bad", 5)],
        2: [out("c\n"), failure("bad", 6)],
        3: [Died(-9, 9)],
    }
    blocks = final_layout(make(4, lambda rank: said[rank])).blocks
    assert [block.failed for block in blocks] == [
        "",
        "",
        "E: bad (as on rank 1)",
        "the process was killed by SIGKILL",
    ]
    assert blocks[1].words == ("first", "1 line")


def test_pace() -> None:
    """Who was slowest is said where they differ."""
    assert final_layout(make(2, lambda rank: [out("x\n")])).pace == ""
    transcript = make(2, lambda rank: [out("x\n")], seconds=lambda rank: 1.0 + rank)
    assert final_layout(transcript).pace == "slowest rank 1 (2.0 s), fastest rank 0 (1.0 s)"


def test_squares() -> None:
    """Many ranks have a square each, very many one for each run in one state."""
    assert final_layout(make(16, lambda rank: [out("x\n")])).squares == ()
    panel = final_layout(make(17, lambda rank: [out("x\n")]))
    assert panel.squares == tuple((str(rank), "ok") for rank in range(17))
    said = {70: [failure()]}
    panel = final_layout(make(200, lambda rank: said.get(rank, [out("x\n")])))
    assert panel.squares == (("0-69", "ok"), ("70", "failed"), ("71-199", "ok"))
    said = {rank: [failure()] for rank in range(0, 300, 2)}
    panel = final_layout(make(300, lambda rank: said.get(rank, [out("x\n")])))
    assert (len(panel.squares), panel.more_squares) == (128, 172)


HIDDEN = st.builds(Hidden, st.integers(1, 9), in_log_only=st.booleans())
KEPT = st.just([Line("x", stderr=False)])


@settings(deadline=None, database=None, derandomize=True)
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
    assert ranks(panel.blocks) == [(1,), (0, 2)]
    assert [kinds(block.items) for block in panel.blocks] == [[12], [12]]
    assert [block.words for block in panel.blocks] == [("… 28 earlier",), ("same", "… 18 earlier")]


def test_live_rows() -> None:
    """Many ranks that differ have a row for each distinct last line, 16 at most."""
    said = {60: [out("d\n"), failure()]}
    transcript = make(
        64, lambda rank: said.get(rank, [out(f"{rank}\nlast {rank // 3}\n")]), finished=False
    )
    panel = live_layout(transcript, 1.0)
    assert ranks(panel.blocks) == [(60,)]
    assert panel.rows[0] == Row((0, 1, 2), Line("last 0", stderr=False))
    assert len(panel.rows) == 16
    assert panel.more_rows == (*range(48, 60), 61, 62, 63)


def test_live_blocks_of_those_who_ask() -> None:
    """They stand last, right above the input box, with more lines, also where ranks are many."""
    asked = [lines(40), InputRequest(1, "> ")]
    few = make(3, lambda rank: asked if rank == 0 else [lines(30)], finished=False)
    panel = live_layout(few, 1.0)
    assert ranks(panel.blocks) == [(1, 2), (0,)]
    assert [kinds(block.items) for block in panel.blocks] == [[12], [40]]
    many = make(20, lambda rank: asked if rank == 5 else [out(f"{rank}\n")], finished=False)
    assert ranks(live_layout(many, 1.0).blocks) == [(5,)]


def test_live_blocks_are_bounded() -> None:
    """The failed ranks that have no block are named."""
    transcript = make(20, lambda rank: [out(f"{rank}\n"), failure(f"x{rank}")], finished=False)
    panel = live_layout(transcript, 1.0)
    assert len(panel.blocks) == 16
    assert panel.more == (16, 17, 18, 19)


def test_what_a_running_cell_says_of_itself() -> None:
    """What ranks use, and after some seconds the time: a reloaded page shows it for ever."""
    running = make(2, lambda rank: [out("x\n")], finished=False)
    assert live_layout(running, 1.0, "", "cpu 2 GiB", "17:33:05").now == "cpu 2 GiB"
    later = live_layout(running, 5.0, "", "cpu 2 GiB", "17:33:05")
    assert (later.now, later.foot) == ("cpu 2 GiB · as of 17:33:05", "")
    last = live_layout(running, 60.0, "", "", "17:33:05")
    assert last.now == "as of 17:33:05"
    assert "%dist_output" in last.foot
    text, html = panel_text(last), panel_html(last)
    assert text.startswith("2 ranks · 60.0 s · ● 2 · as of 17:33:05\n")
    assert text.endswith(f"\n{last.foot}")
    assert last.foot in html
    assert final_layout(running).now == final_layout(running).foot == ""
