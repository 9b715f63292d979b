"""Tests of `nbdist.wire.places`: a rank's place and stack."""

from __future__ import annotations

from nbdist.wire.places import RankPosition, StackFrame


def test_calls_are_written_as_in_tracebacks() -> None:
    """A call has the path inside of its library, and a function's name if there is a function."""
    library = "/v/lib/python3.11/site-packages/torch/nn/x.py"
    for frame, lines in (
        (StackFrame("Cell In[5]", 3, "<module>", "f()"), ["  Cell In[5], line 3", "    f()"]),
        (
            StackFrame(library, 7, "g", "return y"),
            ["  torch/nn/x.py, line 7, in g", "    return y"],
        ),
        (StackFrame("/usr/lib/python3.11/json/a.py", 1, "f"), ["  json/a.py, line 1, in f"]),
        (StackFrame("/home/me/lib/train.py", 1, "f"), ["  /home/me/lib/train.py, line 1, in f"]),
    ):
        assert frame.lines == lines
        assert frame.is_cell == frame.file.startswith("Cell")


def test_a_position_shows_whether_a_rank_is_in_code() -> None:
    """A rank is in code if it has a line, a file, an operation or the GIL, or is stopped."""
    for place in (
        RankPosition(line=1),
        RankPosition(file="train.py"),
        RankPosition(operation="barrier"),
    ):
        assert place.is_in_code
    assert RankPosition(holds_gil=True).is_in_code
    assert RankPosition(is_stopped=True).is_in_code
    for place in (RankPosition(), RankPosition(counts={"default": 3})):
        assert not place.is_in_code
