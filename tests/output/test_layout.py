"""Tests of `nbdist.output.layout`: the blocks, rows and lines of a panel before it is written."""

from __future__ import annotations

from base64 import b64decode
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.output.events import Died, Done, Failure, InputRequest, Output, Skipped, Text, Tracked
from nbdist.output.html import FOOT_SECONDS, panel_html
from nbdist.output.layout import final_layout, lines_in, live_layout, state_counts
from nbdist.output.panel import TALL_LINES, Hidden, PanelRow
from nbdist.output.screen import ScreenLine
from nbdist.output.text import panel_text
from nbdist.output.transcript import spread, unlike_most
from tests.output.lab import (
    Panel,
    drawing,
    failure,
    figure,
    final_html,
    kinds,
    lines,
    make,
    out,
    ranks_of,
    running,
    value,
)

Said = dict[int, list[Output]]


# --- live ---------------------------------------------------------------------------------------


def test_live_blocks_begin_with_failed_ranks() -> None:
    """Live blocks begin with the failed ranks and share the lines; silent ranks have no block."""
    said: Said = {1: [lines(40), failure()], 3: []}
    transcript = running(4, lambda rank: said.get(rank, [lines(30)]))
    panel = live_layout(transcript, 12.34, "rank 0 waits", note="a note")
    assert (panel.seconds, panel.is_live) == ("12.3 s", True)
    assert ranks_of(panel.blocks) == [(1,), (0, 2)]
    assert [kinds(block.items) for block in panel.blocks] == [[30], [30]]
    assert [block.about for block in panel.blocks] == ["… 10 earlier", "same"]
    html = panel_html(panel)
    shown = Panel(html).lines
    assert shown[:3] == ["4 ranks · 12.3 s · ● 3 · ✗ 1", "rank 0 waits", "rank 1 ✗ … 10 earlier"]
    assert shown[-32::30] == ["ranks 0,2 ● same", "29"]
    assert shown[-1] == "a note"
    assert "details" not in html
    text = panel_text(panel).splitlines()
    assert text[text.index("── rank 1 ✗ ──") + 1] == "… 10 earlier"
    assert text[text.index("── ranks 0,2 (same) ──") + 1] == "0"
    # The failed ranks that have no block are named.
    panel = live_layout(running(20, lambda rank: [out(f"{rank}\n"), failure(f"x{rank}")]), 1.0)
    assert len(panel.blocks) == 16
    assert panel.more == (16, 17, 18, 19)
    # Ranks that wait for input come last, above the input box, and with more lines than others.
    asked = [lines(40), InputRequest(1, "> ")]
    panel = live_layout(running(3, lambda rank: asked if rank == 0 else [lines(30)]), 1.0)
    assert ranks_of(panel.blocks) == [(1, 2), (0,)]
    assert [kinds(block.items) for block in panel.blocks] == [[30], [40]]
    all_ask = running(3, lambda rank: [out(f"{rank}\n"), InputRequest(1, "> ")])
    assert ranks_of(live_layout(all_ask, 1.0, turn=0).blocks) == [(1,), (2,), (0,)]
    # Blocks of ranks that wait for input are never left out for others.
    said = [[out(f"{rank}\n"), failure(f"x{rank}")] for rank in range(19)] + [asked]
    panel = live_layout(running(20, lambda rank: said[rank]), 1.0)
    assert (len(panel.blocks), ranks_of(panel.blocks)[-1]) == (16, (19,))
    assert panel.more == (15, 16, 17, 18)
    many = running(20, lambda rank: asked if rank == 5 else [out(f"{rank}\n")])
    assert ranks_of(live_layout(many, 1.0).blocks) == [(5,)]


LIVE_AND_FINAL: dict[str, Said] = {
    "a line": {rank: [out("loading\n")] for rank in range(4)},
    "a line each": {rank: [out(f"rank {rank}\n")] for rank in range(4)},
    "few lines": {rank: [out(f"{'abcd'[rank]} 1\n{'abcd'[rank]} 2\n")] for rank in range(4)},
    "many lines": {rank: [lines(25, "abcd"[rank])] for rank in range(4)},
    "one has many": {0: [lines(9)], 1: [lines(300, "b")], 2: [lines(9, "c")], 3: [lines(9, "d")]},
    "figures": {rank: [figure(f"loss of {rank}")] for rank in range(4)},
    "failed": {0: [lines(9)], 1: [lines(5, "b"), failure()], 2: [lines(9)], 3: [out("c\n")]},
}


@pytest.mark.parametrize("case", LIVE_AND_FINAL)
def test_live_and_final_are_one_layout(case: str) -> None:
    """When a cell ends, its blocks stay open or closed, in their order, with as many lines.

    While the cell runs, the title of a closed block has the block's last line.
    """
    transcript = running(4, lambda rank: LIVE_AND_FINAL[case][rank])
    live = live_layout(transcript, 1.0, note="a note")
    before = Panel(panel_html(live))
    for rank in range(4):
        if transcript[rank].error is None:
            transcript.receive(rank, Done("ok", 1.0), 1.0)
    final = final_layout(transcript, note="a note")
    after = Panel(panel_html(final))
    assert [(b.group.ranks, b.is_open) for b in live.blocks] == [
        (b.group.ranks, b.is_open) for b in final.blocks
    ]
    assert [row.ranks for row in live.rows] == [row.ranks for row in final.rows]
    assert len(before.images) == len(after.images)
    # An open block with many lines shows 30 of them live, and all of them at the end.
    hidden = [item for b in final.blocks if not b.is_open for item in b.items]
    closed = sum(len(item) if isinstance(item, list) else 1 for item in hidden)
    more = sum(max(0, b.group.line_count - TALL_LINES) for b in final.blocks if b.is_open)
    assert len(before.lines) == len(after.lines) - closed - more
    assert before.lines[-1] == after.lines[-1] == "a note"
    assert any(not b.is_open for b in final.blocks) == (case in ("many lines", "one has many"))


@pytest.mark.parametrize(
    ("text", "steps", "ahead"),
    [
        ("step {0} loss 0.{1}\n", 9, ["step 9 loss {0.0, 0.2}", "step 10 loss 0.0"]),
        ("step {0}\n", 9, ["step 9", "step 10"]),
        ("step {0}\n", 2, ["step 2", "step 3"]),
    ],
)
def test_ranks_that_are_ahead_stay_in_the_block(text: str, steps: int, ahead: list[str]) -> None:
    """Ranks that are a few lines ahead stay in the block of all ranks, with their lines below."""
    more = {0: 2, 2: 1}
    said = {r: [text.format(step, r) for step in range(steps + more.get(r, 0))] for r in range(4)}
    panel = live_layout(running(4, lambda rank: [out("".join(said[rank]))]), 1.0)
    assert ranks_of(panel.blocks) == [(0, 1, 2, 3)]
    assert kinds(panel.blocks[0].items) == [steps]
    assert [(row.ranks, row.line.text) for row in panel.rows] == [
        ((0, 2), ahead[0]),
        ((0,), ahead[1]),
    ]
    # A rank with other text, or with many more lines, leaves the block.
    others = {3: [*said[3][:-1], "other\n"], 0: 3 * said[0]}
    panel = live_layout(running(4, lambda rank: [out("".join(others.get(rank, said[rank])))]), 1.0)
    assert ranks_of(panel.blocks) == [(0,), (1, 2), (3,)]


def test_a_live_panel_says_when_it_was_last_drawn() -> None:
    """A live panel shows the resources in use, and when it was drawn if no later panel follows."""
    transcript = running(2, lambda rank: [out("x\n")])
    first = live_layout(transcript, 1.0, "", "cpu 2 GiB", "17:33:05")
    last = live_layout(transcript, 5.0, "", "cpu 2 GiB", "17:33:05")
    assert first.now == last.now == "cpu 2 GiB"
    assert first.foot == ""
    assert last.foot == "last updated 17:33:05 · rest: `%dist_output`"
    assert panel_text(last).endswith(f"\n{last.foot}")
    # A panel that is drawn again and again does not show the time.
    assert "17:33:05" not in panel_html(last)
    (image,) = Panel(panel_html(last)).images
    drawn = ElementTree.fromstring(b64decode(str(image["src"]).partition("base64,")[2]))
    (text,) = drawn
    assert (text.text, text.get("opacity")) == (last.foot, "0")
    assert text[0].attrib == {"attributeName": "opacity", "to": "1", "begin": f"{FOOT_SECONDS}s"}
    assert final_layout(transcript).now == final_layout(transcript).foot == ""


# --- final --------------------------------------------------------------------------------------


def test_ranks_with_a_short_line_are_rows() -> None:
    """A single short line of each rank is a row, and ranks with equal lines share a row."""
    panel = final_layout(make(4, lambda rank: [value(f"{rank // 2}")]))
    first = PanelRow((0, 1), ScreenLine("0", stderr=False), "same")
    assert panel.rows == (first, PanelRow((2, 3), ScreenLine("1", stderr=False), "same"))
    assert panel.blocks == panel.folded_blocks == ()
    # A longer line, a second line and too many different lines have blocks.
    for transcript in (
        make(2, lambda rank: [out("x" * 101 + "\n")]),
        make(2, lambda rank: [out("x\n" * (rank + 1))]),
        make(300, lambda rank: [value(str(rank))]),
    ):
        panel = final_layout(transcript)
        assert panel.rows == ()
        assert panel.blocks
    # A failed rank comes first, and the table of the others stays as it was.
    said: Said = {3: [value("1"), failure()]}
    panel = final_layout(make(4, lambda rank: said.get(rank, [value(f"{rank % 2}")])))
    assert ranks_of(panel.blocks) == [(3,)]
    assert [row.ranks for row in panel.rows] == [(0, 2), (1,)]
    # Ranks without output have no block that would be empty, but are named.
    panel = final_layout(make(4, lambda rank: [] if rank else [out("loss 0.5\n")]))
    assert [row.ranks for row in panel.rows] == [(0,)]
    assert (panel.blocks, panel.silent) == ((), (1, 2, 3))


def test_released_ranks_come_after_those_that_failed() -> None:
    """Released and interrupted ranks come after failed ranks, even if their numbers are lower."""
    released = failure("it waited", 9)._replace(connections="ended")
    said: Said = {2: [failure("late", 5, line=1)], 3: [failure("soon", 4)], 4: []}
    said[1] = [failure("", 9, "KeyboardInterrupt")]
    transcript = make(5, lambda rank: said.get(rank, [released]))
    assert ranks_of(final_layout(transcript).blocks) == [(3,), (2,), (0,), (1,)]


def test_the_first_and_failed_blocks_are_open() -> None:
    """The failed and the first blocks are open, and others up to 60 open lines in all."""
    said: Said = {3: [lines(70, "d"), failure()], 4: []}
    transcript = make(5, lambda rank: said.get(rank, [lines(25, "abc"[rank % 3])]))
    blocks = final_layout(transcript).blocks
    assert ranks_of(blocks) == [(3,), (0,), (1,), (2,)]
    assert [block.is_open for block in blocks] == [True, True, False, False]
    # A block with few lines is always open, however many lines are open already.
    said = {3: [lines(8, "odd")]}
    blocks = final_layout(make(4, lambda rank: said.get(rank, [lines(70, "abcd"[rank])]))).blocks
    assert ranks_of(blocks) == [(0,), (1,), (2,), (3,)]
    assert [block.is_open for block in blocks] == [True, False, False, True]


def test_groups_that_are_like_many_others_are_folded() -> None:
    """Groups that are like many others are folded, while failed and odd ranks have blocks."""
    said: Said = {40: [out("d\n" * 3), failure()]}
    said |= {rank: [out("same\n" * 3)] for rank in (50, 51)}
    panel = final_layout(make(64, lambda rank: said.get(rank, [lines(2, f"{rank} ")])))
    assert ranks_of(panel.blocks) == [(40,), (0,), (50, 51)]
    assert len(panel.folded_blocks) == 60
    # Of 1,000 ranks the first 400 have blocks, each with some of its lines; the others are named.
    panel = final_layout(make(1_000, lambda rank: [lines(99, f"{rank} {'x' * 90} ")]))
    assert len(panel.blocks) + len(panel.folded_blocks) == 400
    assert panel.more == tuple(range(400, 1_000))
    assert all(lines_in(block.items) > 1 and len(block.items) == 2 for block in panel.folded_blocks)
    # Among many short outputs, ranks with other words have blocks of their own.
    said = {17: [out("shard 17\nno data left\n")], 33: [out("shard 33\n")]}
    usual = [f"shard {rank}\nloss {2 + rank / 100}\n" for rank in range(64)]
    panel = final_layout(make(64, lambda rank: said.get(rank, [out(usual[rank])])))
    assert ranks_of(panel.blocks) == [(0,), (17,), (33,)]
    assert len(panel.folded_blocks) == 61
    assert panel.spread == "62 of 64 ranks: loss 2.0 (rank 0) to 2.63 (rank 63)"


def test_blocks_keep_last_lines_and_all_displays() -> None:
    """A block has all displays and its last 200 lines, or 50 if the cell has many ranks.

    The lines that are left out are counted.
    """
    (block,) = final_layout(make(1, lambda rank: [lines(1000)])).blocks
    assert kinds(block.items) == [Hidden(800, in_log_only=False), 200]
    assert block.words == ("1,000 lines",)
    (block,) = final_layout(make(64, lambda rank: [lines(1000)])).blocks
    assert kinds(block.items) == [Hidden(950, in_log_only=False), 50]
    said = [lines(300), drawing("x"), Skipped(9, 3), lines(150)]
    (block,) = final_layout(make(1, lambda rank: said)).blocks
    hidden, kept, display, gap, last = block.items
    rest = [Hidden(250, in_log_only=False), 50, Hidden(3, in_log_only=True), 150]
    assert kinds([hidden, kept, gap, last]) == rest
    assert display == [ScreenLine("x", stderr=False)]
    # Hidden lines on both sides of skipped lines are counted together with them.
    (block,) = final_layout(make(1, lambda rank: [lines(9), Skipped(9, 3), lines(250)])).blocks
    assert kinds(block.items) == [Hidden(62, in_log_only=False), 200]


@pytest.mark.parametrize(("count", "words"), [(30, ()), (31, ("31 lines",))])
def test_a_block_that_scrolls_says_how_many_lines(count: int, words: tuple[str, ...]) -> None:
    """A block with more than 30 lines says how many: many browsers show no scroll bar."""
    (block,) = final_layout(make(1, lambda rank: [lines(count)])).blocks
    assert block.is_open
    assert block.words == words


@pytest.mark.parametrize("text", ["x" * 300, "<&>" * 400, "\x1b[31m<\x1b[32m&" * 99, "█ █" * 50])
def test_each_line_is_shown_or_counted(text: str) -> None:
    """Each line of a rank is shown or counted, and some lines of each rank are shown."""
    said = [text.join((f"{'abcdefghijklmnop'[rank]} ", "\n")) * 300 for rank in range(16)]
    transcript = running(16, lambda rank: [out(said[rank])])
    blocks = live_layout(transcript, 1.0).blocks
    assert len(blocks) == 16
    assert all(block.earlier + lines_in(block.items) == 300 for block in blocks)
    assert all(0 < lines_in(block.items) <= TALL_LINES for block in blocks)
    for rank in range(16):
        transcript.receive(rank, Done("ok", 1.0), 1.0)
    for block in final_layout(transcript).blocks:
        shown = block.items[-1]
        assert kinds(block.items) == [Hidden(300 - len(shown), in_log_only=False), len(shown)]  # type: ignore[arg-type]
        assert shown


def test_later_failures_have_a_line_without_traceback() -> None:
    """The first failure has its traceback, and each other failed rank a line about its failure."""
    said: Said = {
        0: [out("a\n")],
        1: [out("b\n"), failure("bad", 5)],
        2: [out("c\n"), failure("bad", 6)],
        3: [Died(-9, 9)],
    }
    blocks = final_layout(make(4, lambda rank: said[rank])).blocks
    assert ranks_of(blocks) == [(1,), (2,), (3,)]
    killed = "killed (SIGKILL), often by the system for using too much memory"
    assert [block.failed for block in blocks] == ["", "E: bad (as on rank 1)", killed]
    assert blocks[0].words == ("failed first",)
    # Ranks that were released or interrupted have not failed.
    released = Failure("Released", "it waited", ("Released: it waited",), 9, connections="ended")
    said = [failure(), released, released, Failure("KeyboardInterrupt", "", (), 9)]
    transcript = make(4, lambda rank: [said[rank]])
    assert [text for _, text in state_counts(transcript)] == ["✗ 1", "2 released", "■ 1 stopped"]
    assert panel_text(final_layout(transcript)).count("Released: it waited") == 1
    waited = [line for line in Panel(final_html(transcript)).lines if "waited" in line]
    assert waited == ["ranks 1-2 ⊘ same Released: it waited"]


@pytest.mark.parametrize(
    ("seconds", "pace"),
    [
        ((1.0, 1.4), ""),
        ((60.0, 63.0), ""),
        ((1.0, 2.0), "slowest rank 1 (2.0 s), fastest rank 0 (1.0 s)"),
    ],
)
def test_the_slowest_rank_is_named_if_clearly_slower(
    seconds: tuple[float, float], pace: str
) -> None:
    """If no rank failed, the slowest is named if it took 0.5 s and 20 % more than the fastest."""
    transcript = make(2, lambda rank: [out("x\n")], seconds=lambda rank: seconds[rank])
    assert final_layout(transcript).pace == pace
    failed = make(2, lambda rank: [] if rank else [failure()], seconds=lambda rank: seconds[rank])
    assert final_layout(failed).pace == ""


def test_many_ranks_have_a_square_each() -> None:
    """Many ranks have a square each; of very many, neighbours in the same state share a square."""
    assert final_layout(make(16, lambda rank: [out("x\n")])).squares == ()
    panel = final_layout(make(17, lambda rank: [out("x\n")]))
    assert panel.squares == tuple((str(rank), "ok") for rank in range(17))
    panel = final_layout(make(200, lambda rank: [failure() if rank == 70 else out("x\n")]))
    assert panel.squares == (("0-69", "ok"), ("70", "failed"), ("71-199", "ok"))
    panel = final_layout(make(300, lambda rank: [out("x\n") if rank % 2 else failure()]))
    assert (len(panel.squares), panel.more_squares) == (128, 172)


@given(st.lists(st.sampled_from(["a 1", "a 2", "b", "", "c", "E"]), min_size=1, max_size=40))
def test_every_rank_is_in_the_panel_once(said: list[str]) -> None:
    """Each rank is exactly once in a block, in a row, or among the ranks without output."""

    def outputs(rank: int) -> list[Output]:
        text = said[rank]
        return [failure(text)] if text == "E" else [out(f"{text}\n")] if text else []

    panel = final_layout(make(len(said), outputs))
    if not panel.states:
        assert set(said) == {""}
        return
    parts = [block.group.ranks for block in (*panel.blocks, *panel.folded_blocks)]
    parts += [panel.silent, *(row.ranks for row in panel.rows)]
    assert sorted(rank for part in parts for rank in part) == [*range(len(said))]


# --- numbers ------------------------------------------------------------------------------------

BAR = "\r100%|██████████| 500/500 [00:1{0}<00:00, 25.{0}it/s]\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("loss {0}\ndone\n", "loss 0.5 (rank 0) to 0.57 (rank 7)"),
        ("{1}: acc={0}, 5 steps in 3.{1}s\ny\n", "acc 0.5 (rank 0) to 0.57 (rank 7)"),
        # If a number is printed again, its last value counts.
        ("loss 9{0}\nloss {0}\n", "loss 0.5 (rank 0) to 0.57 (rank 7)"),
        ("loss {0}\nloss 0.1\n", ""),
        ("{{'loss': {0}, 'at': '0x7f{1}a'}}\ncuda:{1} 00:1{1} 2024-0{1}-01\n", "loss 0.5"),
        ("CPU times: user {0} ms\nWall time: 1 s\n", "user 0.5 ms (rank 0) to 0.57 ms (rank 7)"),
        ("a\nWall time: {0} \u00b5s\n", "time 0.5 \u00b5s (rank 0) to 0.57 \u00b5s (rank 7)"),
        ("a\nit is {0} seconds\n", "is 0.5 (rank 0) to 0.57 (rank 7)"),
        ("same 3\nalso 4\n", ""),
        ("shard-{1} is {1}\nshard_{1}\n", ""),
        (BAR.replace("{0}", "{1}") + "x\nloss {0}\n", "loss 0.5 (rank 0) to 0.57 (rank 7)"),
        ("2026-11-28 10:11:12,25{1} - INFO - at 10:11:12.3{1}\ny\n", ""),
        ("a\n({0}, 1{1}.5)\n", ""),
        ("seen 1,00{1} 10,00{1}.5 tokens\n9\n", "seen 1,000 (rank 0) to 1,007 (rank 7)"),
        (
            "train loss {0}\nval loss 1{0}\n",
            "train loss 0.5 (rank 0) to 0.57 (rank 7) · val loss 1",
        ),
    ],
)
def test_the_spread_is_of_numbers_by_themselves(text: str, said: str) -> None:
    """The spread is of separate numbers, and not of names, times, bars or the rank's own number."""
    transcript = make(8, lambda rank: [out(text.format(round(0.5 + rank / 100, 2), rank))])
    found = spread(transcript)
    assert found.startswith(said)
    assert bool(found) == bool(said)
    assert found.count("(rank") in (0, 2, 4)


@pytest.mark.parametrize(
    ("ranks", "pattern"),
    [
        (8, [out("loss {0}\n")]),
        (2, [out("loss {0}\nx\n" * 6)]),
        (8, [out("loss {0}\n" * 40)]),
        (8, [out("loss {0}\nx\n"), drawing("x")]),
        (8, [out("loss {0}\nx\n"), failure()]),
    ],
)
def test_short_and_long_outputs_have_no_spread(ranks: int, pattern: list[Output]) -> None:
    """A few short lines, long outputs, displays and failed ranks have no spread."""

    def said(rank: int) -> list[Output]:
        return [
            out(each.text.format(rank / 7)) if isinstance(each, Text) else each for each in pattern
        ]

    assert spread(make(ranks, said)) == ""


def test_ranks_unlike_most_others_are_found() -> None:
    """Ranks with other words than most ranks are found; other numbers and bars do not count."""
    usual = "shard {0}\nloss {1}\n" + BAR
    odd = {3: "shard 3\nno data\n", 9: "shard 9\n", 11: "shard 11\nloss nan\n" + BAR.format(1)}
    transcript = make(40, lambda rank: [out(odd.get(rank, usual.format(rank, rank / 7)))])
    assert unlike_most(transcript.groups()) == {3, 9, 11}
    for ranks in (6, 40):
        halves = make(ranks, lambda rank: [out(f"{'ab'[rank % 2]} {rank}\nx\n")])
        assert unlike_most(halves.groups()) == frozenset()


def test_the_spread_leaves_out_names_of_curves() -> None:
    """The spread leaves out a name that has a curve, since the curve may be of another step."""
    text = "loss {0}\nval/acc: {0}\nlr {0}\n"
    transcript = make(8, lambda rank: [out(text.format(round(0.5 + rank / 100, 2)))])
    for name in ("Loss", "val_acc"):
        point = tuple(map(float, (0, 1, 3, 3, 3, 0)))
        transcript.curves.add(0, "task", Tracked({name: point}, {}), 8)
    assert spread(transcript) == "lr 0.5 (rank 0) to 0.57 (rank 7)"


NUMBERS = st.lists(st.floats(-1e6, 1e6).map(lambda number: round(number, 3) + 0.0), min_size=9)


@given(NUMBERS)
def test_the_ends_of_the_spread_are_right(numbers: list[float]) -> None:
    """The spread has the least and the greatest number, each with a rank that printed it."""
    transcript = make(len(numbers), lambda rank: [out(f"value: {numbers[rank]}\nx\n")])
    found = spread(transcript)
    if len(set(numbers)) == 1 or numbers == [*range(len(numbers))]:
        assert found == ""
        return
    low, high = numbers.index(min(numbers)), numbers.index(max(numbers))
    assert found == f"value {numbers[low]} (rank {low}) to {numbers[high]} (rank {high})"
