"""Tests of `nbdist.notebook.late_output`: output that ranks send after their cell has ended."""

from __future__ import annotations

import ast

import pytest

from nbdist.notebook.display import (
    MAX_LATE_LENGTH,
    MAX_LATE_LINES,
    PanelDisplay,
    PlainDisplay,
)
from nbdist.notebook.late_output import FinishedCells, late_texts
from nbdist.output.events import Display, DisplayUpdate, Done, Failure, Skipped, Text
from nbdist.output.text import whole_text
from nbdist.output.transcript import Transcript


def out(text: str) -> Text:
    return Text("stdout", text)


def ended(*ranks: int) -> Transcript:
    transcript = Transcript(ranks)
    for rank in ranks:
        transcript.receive(rank, Display({"text/plain": "first"}, {}, f"of {rank}"), 1.0)
        transcript.receive(rank, Done("ok", 1.0), 1.0)
    return transcript


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the texts of new displays; IPython has printed these, because it has no shell here."""
    bundles = map(ast.literal_eval, capsys.readouterr().out.splitlines())
    return [bundle["text/plain"] for bundle in bundles]


@pytest.fixture
def cells() -> FinishedCells:
    """Two cells that have ended, the first of ranks 0-1 and the second of rank 1."""
    cells = FinishedCells()
    for transcript in (ended(0, 1), ended(1)):
        cells.add(transcript, PanelDisplay())
    return cells


def test_late_output_is_not_lost(cells: FinishedCells, capsys: pytest.CaptureFixture[str]) -> None:
    """Late output is added to its rank's last cell, a display's update to the display's cell."""
    cells.receive([(0, out("a\n")), (0, out("b\n")), (1, out("c\n")), (1, Done("ok", 1.0))])
    assert shown(capsys) == []
    cells.show({}, at_once=False)
    first, second = shown(capsys)
    assert first.endswith("── rank 0 ──\nfirst\na\nb\n── rank 1 ──\nfirst")
    assert second.endswith("── rank 1 ──\nfirst\nc")
    # While another cell runs, panels are only redrawn from time to time.
    cells.receive([(0, out("d\n"))])
    cells.show({}, at_once=False)
    assert shown(capsys) == []
    cells.show({})
    assert "first\na\nb\nd" in "".join(shown(capsys))
    cells.show({})
    assert shown(capsys) == []
    assert cells.pop_texts() == []
    transcript = ended(1)
    transcript.receive(1, Display({"text/plain": "old"}, {}, "other"), 1.0)
    cells.add(transcript, PanelDisplay())
    cells.receive([(0, DisplayUpdate({"text/plain": "new"}, {}, "of 0"))])
    cells.show({})
    assert "── rank 0 ──\nnew" in "\n".join(shown(capsys))


def test_late_output_without_a_cell_is_returned_once(cells: FinishedCells) -> None:
    """`pop_texts` returns late output once, if its rank has no cell."""
    cells.receive([(2, out("bye\n")), (3, out("bye\n"))])
    assert cells.pop_texts() == ["ranks 2-3 printed after their last cell: bye"]
    assert cells.pop_texts() == []
    cells.receive([(2, out("bye\n"))])
    cells.forget()
    assert cells.pop_texts() == []


def test_late_lines_are_printed_below_a_plain_cell(
    cells: FinishedCells, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain lines that come late are printed with their ranks: complete, once, and not too many."""

    def printed() -> list[str]:
        cells.show({})
        return capsys.readouterr().out.splitlines()

    transcript = ended(0, 1)
    cells.add(transcript, PlainDisplay())
    cells.receive([(0, out("bye\nwait")), (1, out("bye\n")), (1, Done("ok", 1.0))])
    assert cells.has_changes
    assert printed() == ["[0-1] bye"]
    assert not cells.has_changes
    cells.receive([(0, out(" for it\n"))])
    assert printed() == ["[0] wait for it"]
    assert printed() == []
    cells.receive([(1, out("no end of line"))])
    assert printed() == []
    cells.finish_lines()
    assert printed() == ["[1] no end of line"]
    cells.finish_lines()
    assert printed() == []
    many = "".join(f"{number}\n" for number in range(MAX_LATE_LINES + 960))
    cells.receive([(0, out(many)), (0, out("x" * (MAX_LATE_LENGTH + 1000) + "\n"))])
    first, *lines = printed()
    assert first == "… 961 lines more after the cell · rest: `%dist_output --all`"
    assert (len(lines), lines[0]) == (MAX_LATE_LINES, "[0] 961")
    assert len(lines[-1]) < MAX_LATE_LENGTH + 50
    assert "0\n1\n" in whole_text(transcript, [0])
    assert cells.pop_texts() == []
    transcript.receive(1, out("of a stopped cell\n"), 1.0)
    cells.add_to_display(transcript, [(1, out("of a stopped cell\n"))])
    cells.update(transcript)
    assert printed() == ["[1] of a stopped cell"]


def test_equal_late_texts_share_a_line(cells: FinishedCells) -> None:
    """Ranks with equal late output share a line; long lines are cut; `past` lists ended cells."""
    outputs = [
        (0, out("a\n\n  b")),
        (1, Display({"text/plain": "a"}, {})),
        (1, out("b\n")),
        (2, Failure("E", "bad", ("\x1b[31mE\x1b[0m: bad",), 1)),
        (3, Skipped(9, 3)),
        (4, out("x" * (MAX_LATE_LENGTH + 1000))),
    ]
    *short, long = late_texts(outputs)
    assert short == [
        "ranks 0-1 printed after their last cell: a / b",
        "rank 2 printed after its last cell: E: bad",
    ]
    assert long.endswith("x … 1,000 more characters")
    before = cells.past(last := ended(0))
    assert (len(before), before[-1]) == (3, last)
    cells.forget()
    assert cells.past(before[1]) == before[:2]
