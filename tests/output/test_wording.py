"""Tests of `nbdist.output.wording`: what is said in one line."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.output.ansi import strip
from nbdist.output.events import Died, Failure
from nbdist.output.wording import (
    clip,
    error_text,
    fold_ranks,
    in_log_only,
    lines_text,
    more_ranks,
    ranks_text,
    seconds_text,
    traceback_text,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (599.9, "599.9 s"), (725.0, "12 min 5 s"), (7620.0, "2 h 7 min")],
)
def test_seconds(seconds: float, text: str) -> None:
    """As exact as anybody cares for."""
    assert seconds_text(seconds) == text


def test_ranks() -> None:
    """Many are counted, one is named."""
    assert [ranks_text(range(8)), ranks_text([3])] == ["8 ranks", "rank 3"]
    assert more_ranks(range(48, 64)) == "and 16 more: ranks 48-63"


def test_lines() -> None:
    """Thousands have a comma, one line is no lines."""
    assert [lines_text(1), lines_text(1200)] == ["1 line", "1,200 lines"]
    assert in_log_only(7, "0.log") == "… 7 lines only in the log: 0.log"
    assert in_log_only(7) == "… 7 lines only in the log"


def test_errors() -> None:
    """One line of an error, without colours; its traceback, or that line where it has none."""
    failure = Failure("ValueError", "\x1b[31mbad\x1b[0m\nshard", (), 1)
    assert error_text(failure) == traceback_text(failure) == "ValueError: bad"
    assert error_text(Failure("Stop", "", (), 1)) == "Stop"
    killed = "killed (SIGKILL), often by the system for using too much memory"
    assert error_text(Died(-9, 1)) == killed
    assert error_text(Died(-9, 1, why="it ended the agent")) == "the process was killed by SIGKILL"


def test_ranks_of_which_the_same_is_said() -> None:
    """They come together, in the order of their first ones."""
    said = {3: "b", 0: "b", 2: "a", 1: "b"}
    assert [*fold_ranks(said).items()] == [("b", [0, 1, 3]), ("a", [2])]


PARTS = st.lists(st.sampled_from(["a", "<", "\x1b[31m", "\x1b[0m"]), max_size=60).map("".join)


@settings(deadline=None, database=None, derandomize=True)
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
