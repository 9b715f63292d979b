"""Tests of `nbdist.wire.places`: a rank's place and stack."""

from __future__ import annotations

from nbdist.wire.places import RankPosition, StackFrame


def test_calls_as_in_tracebacks() -> None:
    """With a library's own path, and no function where there is none."""
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


def test_whether_a_rank_is_in_what_it_runs() -> None:
    """Else it says how that has ended."""
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
