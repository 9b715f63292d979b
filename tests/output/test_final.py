"""Tests of `nbdist.output.layout`: what the panel of a finished cell shows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nbdist.output.events import Died, Display, Output, Skipped, Text
from nbdist.output.layout import Hidden, Row, final_layout
from nbdist.output.rank_transcript import Shown
from nbdist.output.screen import Line
from tests.output.lab import failure, kinds, lines, make, out, ranks_of, value


def test_values() -> None:
    """One short line of each rank is a row, equal ones once."""
    panel = final_layout(make(4, lambda rank: [value(f"{rank // 2}")]))
    first = Row((0, 1), Line("0", stderr=False), "same")
    assert panel.rows == (first, Row((2, 3), Line("1", stderr=False), "same"))
    assert panel.blocks == panel.rest == ()
    # A longer line, a second one or too many different ones have blocks.
    for transcript in (
        make(2, lambda rank: [out("x" * 101 + "\n")]),
        make(2, lambda rank: [out("x\n" * (rank + 1))]),
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
    assert ranks_of(blocks) == [(3,), (0,), (1,), (2,)]
    assert [block.is_open for block in blocks] == [True, True, False, False]
    # However much is open, a rank that has said little may be the one that is odd.
    said = {3: [lines(8, "odd")]}
    blocks = final_layout(make(4, lambda rank: said.get(rank, [lines(70, "abcd"[rank])]))).blocks
    assert ranks_of(blocks) == [(0,), (1,), (2,), (3,)]
    assert [block.is_open for block in blocks] == [True, False, False, True]


def test_what_stands_back() -> None:
    """Of many groups those that are like many others."""
    said = {40: [out("d\n" * 3), failure()], 50: [out("same\n" * 3)], 51: [out("same\n" * 3)]}
    panel = final_layout(make(64, lambda rank: said.get(rank, [lines(2, f"{rank} ")])))
    assert ranks_of(panel.blocks) == [(40,), (0,), (50, 51)]
    assert len(panel.rest) == 60
    # Of many short outputs those in other words have blocks of their own.
    said = {17: [out("shard 17\nno data left\n")], 33: [out("shard 33\n")]}
    usual = [f"shard {rank}\nloss {2 + rank / 100}\n" for rank in range(64)]
    panel = final_layout(make(64, lambda rank: said.get(rank, [out(usual[rank])])))
    assert ranks_of(panel.blocks) == [(0,), (17,), (33,)]
    assert len(panel.rest) == 61
    assert panel.spread == "loss 2.0 (rank 0) to 2.63 (rank 63)"


def test_a_failed_rank_beside_values() -> None:
    """It comes first, and the table of the others stays as it was."""
    before = final_layout(make(4, lambda rank: [value(f"{rank % 2}")]))
    assert [row.ranks for row in before.rows] == [(0, 2), (1, 3)]
    said = {3: [value("1"), failure()]}
    panel = final_layout(make(4, lambda rank: said.get(rank, [value(f"{rank % 2}")])))
    assert ranks_of(panel.blocks) == [(3,)]
    assert [row.ranks for row in panel.rows] == [(0, 2), (1,)]
    # Ranks without output have no block that would be empty; they are named.
    panel = final_layout(make(4, lambda rank: [] if rank else [out("loss 0.5\n")]))
    assert [row.ranks for row in panel.rows] == [(0,)]
    assert (panel.blocks, panel.silent) == ((), (1, 2, 3))
    panel = final_layout(make(4, lambda rank: [failure()] if rank == 2 else []))
    assert (ranks_of(panel.blocks), panel.silent) == ([(2,)], (0, 1, 3))


def test_bars() -> None:
    """Where the last state of a bar is all, the ranks' bars are one table."""
    bar = "train: 100%|██████████| {0}/{0} [00:1{1}<00:00, 25.8it/s]"
    panel = final_layout(make(3, lambda rank: [Text("stderr", bar.format(500, rank // 2))]))
    assert panel.bars is not None
    assert [row.bar.elapsed for row in panel.bars.rows] == [10, 10, 11]
    assert [row.ranks for row in panel.rows] == [(0,), (1,), (2,)]
    panel = final_layout(make(3, lambda rank: [out("x\n" if rank else bar.format(5, 0))]))
    assert panel.bars is None


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
    said = [lines(300), shown, Skipped(9, 3), lines(150)]
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
    assert ranks_of(blocks) == [(1,), (2,), (3,)]
    assert [block.failed for block in blocks] == [
        "",
        "E: bad (as on rank 1)",
        "killed (SIGKILL), often by the system for using too much memory",
    ]
    assert blocks[0].words == ("failed first", "1 line")


def test_pace() -> None:
    """Who was slowest is said where it matters: half a second and a fifth, of what went well."""
    for seconds, pace in (
        ((1.0, 1.0), ""),
        ((1.0, 1.4), ""),
        ((60.0, 63.0), ""),
        ((1.0, 2.0), "slowest rank 1 (2.0 s), fastest rank 0 (1.0 s)"),
    ):
        transcript = make(2, lambda rank: [out("x\n")], seconds=lambda rank, s=seconds: s[rank])
        assert final_layout(transcript).pace == pace
    said = {0: [failure()]}
    seconds = {0: 0.1}
    transcript = make(3, lambda rank: said.get(rank, []), seconds=lambda rank: seconds.get(rank, 2))
    assert final_layout(transcript).pace == ""


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


@given(st.lists(st.sampled_from(["a 1", "a 2", "b", "", "c", "E"]), min_size=1, max_size=40))
def test_every_rank_is_somewhere(said: list[str]) -> None:
    """Each rank has a block or a row, or is among those without output: once."""

    def outputs(rank: int) -> list[Output]:
        text = said[rank]
        return [failure(text)] if text == "E" else [out(f"{text}\n")] if text else []

    panel = final_layout(make(len(said), outputs))
    if not panel.states:
        assert set(said) == {""}
        return
    parts = [block.group.ranks for block in (*panel.blocks, *panel.rest)]
    parts += [panel.silent, *(row.ranks for row in panel.rows)]
    assert sorted(rank for part in parts for rank in part) == [*range(len(said))]
