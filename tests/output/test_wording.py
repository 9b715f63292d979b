"""Tests of `nbdist.output.wording`: what is said in one line."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.output.ansi import strip
from nbdist.output.events import IGNORES_STOP, Died, Failure
from nbdist.output.screen import Line
from nbdist.output.wording import (
    clip,
    error_text,
    fold_ranks,
    lines_html,
    seconds_text,
    traceback_text,
)
from tests.output.lab import Panel


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (599.9, "599.9 s"), (725.0, "12 min 5 s"), (7620.0, "2 h 7 min")],
)
def test_seconds(seconds: float, text: str) -> None:
    """As exact as anybody cares for."""
    assert seconds_text(seconds) == text


def test_errors() -> None:
    """One line of an error, without colours; its traceback, or that line where it has none."""
    failure = Failure("ValueError", "\x1b[31mbad\x1b[0m\nshard", (), 1)
    assert error_text(failure) == traceback_text(failure) == "ValueError: bad"
    assert error_text(Failure("Stop", "", (), 1)) == "Stop"
    killed = "killed (SIGKILL), often by the system for using too much memory"
    assert error_text(Died(-9, 1)) == killed
    assert error_text(Died(-9, 1, why="it ended the agent")) == "the process was killed by SIGKILL"
    assert error_text(Died(3, 1)) == "the process exited with code 3"
    stopped = Died(-9, 1, why=IGNORES_STOP)
    assert (stopped.end, stopped.by_stop) == ("ignored Stop and was killed", True)


def test_ranks_of_which_the_same_is_said() -> None:
    """They come together, in the order of their first ones."""
    said = {3: "b", 0: "b", 2: "a", 1: "b"}
    assert [*fold_ranks(said).items()] == [("b", [0, 1, 3]), ("a", [2])]


PARTS = st.lists(st.sampled_from(["a", "<", "\x1b[31m", "\x1b[0m"]), max_size=60).map("".join)


@given(PARTS, st.integers(1, 30))
def test_clipped(text: str, width: int) -> None:
    """So much of a text is left as fits, and that there is more."""
    found = clip(text, width)
    plain = strip(text)
    if len(text) <= width:
        assert found == text
    elif found != text:
        start, _, more = found.partition(" … ")
        assert plain.startswith(strip(start))
        assert len(start) <= width
        assert more.endswith("more characters")


def test_stderr_is_tinted() -> None:
    """Lines of one stream come together; an empty one keeps its height."""
    said = [Line("a", stderr=False), Line("", stderr=False), Line("b", stderr=True)]
    html = lines_html(said, 100)
    assert html.count("<div") == 2
    assert html.count("rgba(255,80,80,0.1)") == 1
    assert ">a\n </div>" in html


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
