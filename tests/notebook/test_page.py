"""Tests of `nbdist.notebook.page`: a page that was loaded in the middle of a cell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from nbdist.notebook.page import Page, missed, session_of
from nbdist.output.events import Text
from nbdist.output.transcript import Transcript


def shell_of(session: str) -> Any:
    """As much of a shell as tells who has sent its cell."""
    return SimpleNamespace(get_parent=lambda: {"header": {"session": session}})


def cell(seconds: float) -> Any:
    """A cell that took so long."""
    transcript = Transcript([0])
    transcript.start(0.0)
    transcript[0].finished = seconds
    return SimpleNamespace(transcript=transcript, task=SimpleNamespace(execution_count=7))


def test_another_page_after_a_long_cell():
    """Is told once; the same page, a short cell and a first cell are not."""
    page, first, second = Page(), shell_of("a"), shell_of("b")
    assert not page.has_missed(first, None)
    assert not page.has_missed(first, cell(60.0))
    assert page.has_missed(second, cell(60.0))
    assert not page.has_missed(second, cell(60.0))
    assert not page.has_missed(first, cell(0.1))


def test_what_was_missed():
    """The whole output of that cell, behind a line that says why it is here."""
    last = cell(60.0)
    last.transcript.receive(0, Text("stdout", "epoch 9\n"), 1.0)
    shown = missed(last, {})
    assert "The page was reloaded while cell [7] ran" in shown.text
    assert shown.text.endswith("epoch 9")
    assert shown.html.count("<details") == 2
    assert "epoch 9" in shown.html


def test_where_there_are_no_pages():
    """A terminal's shell knows no messages, and a message can come from anywhere."""
    terminal: Any = SimpleNamespace()
    assert session_of(terminal) == ""
    page = Page()
    assert not page.has_missed(terminal, cell(60.0))
    assert not page.has_missed(shell_of("a"), cell(60.0))
    assert session_of(SimpleNamespace(get_parent=dict)) == ""  # type: ignore[arg-type]
