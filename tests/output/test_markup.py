"""Tests of `nbdist.output.markup`: the parts that panels and tables are drawn from."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from nbdist.output.folded_traceback import traceback_html
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


def test_bars_are_not_tinted() -> None:
    """They are no errors, though tqdm writes to stderr; what is drawn has a colour."""
    html = lines_html([Line("100%|██████████| 5/5 [00:04<00:00, 1.2it/s]", stderr=True)], 100)
    assert "rgba(255,80,80,0.1)" not in html
    assert "██████████</span>| 5/5" in html


@given(length=st.integers(1, 30_000), is_coloured=st.booleans())
def test_long_lines_open(*, length: int, is_coloured: bool) -> None:
    """A line is all there; of a very long one the beginning is seen, and the rest opens."""
    text = (",".join(map(str, range(10_000))))[:length]
    said = f"\x1b[31m{text}\x1b[0m" if is_coloured else text
    panel = Panel(lines_html([Line("a", stderr=False), Line(said, stderr=False)], 100_000))
    seen = "".join(panel.words)
    is_long = len(said) > 600
    assert panel.opened == [False] * is_long
    if is_long:
        start, _more, rest = re.split(r"( … (?:[\d,]+ )?more characters\n)", seen)
        assert len(start) <= len("a\n") + 230
        seen = start + rest
    assert seen == f"a\n{text}" + "\n" * (not is_long)


def test_boxes() -> None:
    """A box with a title is opened or closed; one of nothing is none."""
    both = details("one", "body", RED, is_open=True) + details("two", "", RED, is_open=False)
    assert Panel(both + barred("three", RED)).opened == [True, False]
    assert line("") == table([]) == ""
    assert Panel(table([[("color:red", "1"), ("color:red", "2")]])).lines == ["12"]


def test_size() -> None:
    """Bytes count, not characters."""
    assert [size("abc"), size("✓"), size("\udc80")] == [3, 3, 3]
