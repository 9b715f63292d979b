"""Tests of `nbdist.output.markup`: the parts that panels and tables are drawn from."""

from __future__ import annotations

from nbdist.output.markup import (
    RED,
    barred,
    bold,
    coloured,
    details,
    dim,
    line,
    lines_html,
    panel,
    size,
    table,
    traceback_html,
)
from nbdist.output.screen import Line
from tests.output.lab import Panel

NASTY = "</div><script>alert(1)</script>"


def test_text_is_escaped() -> None:
    """No text of a program becomes markup."""
    lines = lines_html([Line(NASTY, stderr=False)], 100)
    parts = [dim(NASTY), bold(NASTY), coloured(NASTY, RED), lines, traceback_html(NASTY, 9, 99)]
    assert Panel(panel(*parts)).lines == [3 * NASTY + NASTY, NASTY]


def test_stderr_is_tinted() -> None:
    """Lines of one stream come together; an empty one keeps its height."""
    said = [Line("a", stderr=False), Line("", stderr=False), Line("b", stderr=True)]
    html = lines_html(said, 100)
    assert html.count("<div") == 2
    assert html.count("rgba(255,80,80,0.1)") == 1
    assert ">a\n </div>" in html


def test_long_tracebacks() -> None:
    """The first line and the last ones are shown, and how many are missing."""
    html = traceback_html("\n".join(f"frame {number}" for number in range(100)), 3, 100)
    assert Panel(html).lines == ["frame 0", "… 96 lines …", "frame 97", "frame 98", "frame 99"]


def test_boxes() -> None:
    """A box with a title is opened or closed; one of nothing is none."""
    both = details("one", "body", RED, is_open=True) + details("two", "", RED, is_open=False)
    assert Panel(both + barred("three", RED)).opened == [True, False]
    assert line("") == table([]) == ""
    assert Panel(table([[("color:red", "1"), ("color:red", "2")]])).lines == ["12"]


def test_size() -> None:
    """Bytes count, not characters."""
    assert [size("abc"), size("✓"), size("\udc80")] == [3, 3, 3]
