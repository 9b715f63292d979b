"""Tests of `nbdist.notebook.late`: what ranks say after their cell has ended."""

from __future__ import annotations

import ast

import pytest

from nbdist.notebook.display import PanelDisplay, PlainDisplay
from nbdist.notebook.late import MOST_CHARACTERS, Ended, late_texts
from nbdist.output.events import Display, Done, Failure, Skipped, Text, Update
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
    """The texts of what was displayed: without a shell IPython prints it."""
    bundles = map(ast.literal_eval, capsys.readouterr().out.splitlines())
    return [bundle["text/plain"] for bundle in bundles]


@pytest.fixture
def cells() -> Ended:
    """Two cells that have ended, of ranks 0-1 and of rank 1."""
    cells = Ended()
    for transcript in (ended(0, 1), ended(1)):
        cells.add(transcript, PanelDisplay())
    return cells


def test_below_the_last_cell(cells: Ended, capsys: pytest.CaptureFixture[str]) -> None:
    """What a rank says stands in the last cell that it ran; each changed cell is drawn once."""
    cells.receive([(0, out("a\n")), (0, out("b\n")), (1, out("c\n")), (1, Done("ok", 1.0))])
    assert shown(capsys) == []
    cells.show({})
    first, second = shown(capsys)
    assert first.endswith("── rank 0 ──\nfirst\na\nb\n── rank 1 ──\nfirst")
    assert second.endswith("── rank 1 ──\nfirst\nc")
    cells.show({})
    assert shown(capsys) == []
    assert cells.take_texts() == []


def test_updates(cells: Ended, capsys: pytest.CaptureFixture[str]) -> None:
    """A display is changed in the cell that has it."""
    transcript = ended(1)
    transcript.receive(1, Display({"text/plain": "old"}, {}, "other"), 1.0)
    cells.add(transcript, PanelDisplay())
    cells.receive([(0, Update({"text/plain": "new"}, {}, "of 0"))])
    cells.show({})
    assert "── rank 0 ──\nnew" in "\n".join(shown(capsys))


def test_once_more(cells: Ended, capsys: pytest.CaptureFixture[str]) -> None:
    """A cell can be drawn again as it is; one that is not known is not."""
    transcript = ended(1)
    cells.add(transcript, PanelDisplay())
    cells.again(transcript)
    cells.again(ended(0))
    cells.show({})
    assert len(shown(capsys)) == 1


def test_not_too_often(cells: Ended, capsys: pytest.CaptureFixture[str]) -> None:
    """While another cell runs a page is not drawn for each line; none is lost."""
    cells.receive([(0, out("a\n"))])
    cells.show({}, at_once=False)
    cells.receive([(0, out("b\n"))])
    cells.show({}, at_once=False)
    assert len(shown(capsys)) == 1
    cells.show({})
    (text,) = shown(capsys)
    assert "first\na\nb" in text


def test_what_belongs_to_no_cell(cells: Ended) -> None:
    """It is said with the next one, once."""
    cells.receive([(2, out("bye\n")), (3, out("bye\n"))])
    assert cells.take_texts() == ["ranks 2-3 printed after their last cell: bye"]
    assert cells.take_texts() == []
    cells.receive([(2, out("bye\n"))])
    cells.forget()
    assert cells.take_texts() == []


def test_what_cannot_change() -> None:
    """Under lines that are printed nothing can be added."""
    cells = Ended()
    cells.add(ended(0), PlainDisplay())
    cells.receive([(0, out("bye\n"))])
    assert cells.take_texts() == ["rank 0 printed after its last cell: bye"]


def test_texts() -> None:
    """One line for all that said the same, without colours, and not too long."""
    failure = Failure("E", "bad", ("\x1b[31mE\x1b[0m: bad",), 1)
    late = [
        (0, out("a\n\n  b")),
        (1, Display({"text/plain": "a"}, {})),
        (1, out("b\n")),
        (2, failure),
        (3, Skipped(9, 3)),
        (4, out("x" * (MOST_CHARACTERS + 1000))),
    ]
    *short, long = late_texts(late)
    assert short == [
        "ranks 0-1 printed after their last cell: a / b",
        "rank 2 printed after its last cell: E: bad",
    ]
    assert long.endswith("x … 1,000 more characters")


def test_cells_before_the_last(cells: Ended) -> None:
    """They are known also when the workers have been restarted; the last may still run."""
    last = ended(0)
    before = cells.past(last)
    assert len(before) == 3
    assert before[-1] is last
    cells.forget()
    assert cells.past(before[1]) == before[:2]
