"""Tests of `nbdist.wire.views`: a rank's place and stack, and where its calls are."""

from __future__ import annotations

import pytest

from nbdist.wire.views import LARGEST, CallLayout, Place, StackFrame


@pytest.mark.parametrize(
    ("frame", "lines"),
    [
        (StackFrame("Cell In[5]", 3, "<module>", "f()"), ["  Cell In[5], line 3", "    f()"]),
        (
            StackFrame("/v/lib/python3.11/site-packages/torch/nn/x.py", 7, "forward", "return y"),
            ["  torch/nn/x.py, line 7, in forward", "    return y"],
        ),
        (StackFrame("/usr/lib/python3.11/json/a.py", 1, "f"), ["  json/a.py, line 1, in f"]),
        (StackFrame("/home/me/lib/train.py", 1, "f"), ["  /home/me/lib/train.py, line 1, in f"]),
    ],
)
def test_calls_as_in_tracebacks(frame: StackFrame, lines: list[str]) -> None:
    """With a library's own path, and no function where there is none."""
    assert frame.lines == lines
    assert frame.is_cell == frame.file.startswith("Cell")


@pytest.mark.parametrize(
    ("place", "is_in_code"),
    [
        (Place(), False),
        (Place(counts={"default": 3}), False),
        (Place(line=1), True),
        (Place(file="train.py"), True),
        (Place(operation="barrier"), True),
        (Place(holds_gil=True), True),
        (Place(is_stopped=True), True),
    ],
)
def test_whether_a_rank_is_in_what_it_runs(place: Place, *, is_in_code: bool) -> None:
    """Else it says how that has ended."""
    assert place.is_in_code == is_in_code


LAYOUT = CallLayout(1 << 46, 1 << 47, 1 << 45, *range(13))


def test_a_line_is_read_as_it_was_written() -> None:
    """All of it is in one line."""
    assert CallLayout.read(LAYOUT.line()) == LAYOUT
    assert LAYOUT.line().count(b"\n") == 1


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"\n", b"1 2 3\n", b"\xff\n", b"9" * 5000, b"x " * 16),
        LAYOUT.line() + b"1",
        b"1 2 3" + b" -1" * 13,
        b"1 2 3" + b" %d" % LARGEST * 13,
    ],
)
def test_any_other_line_is_refused(line: bytes) -> None:
    """A cell can have written into the file, or Python is one that is not known."""
    with pytest.raises(ValueError, match=r"int\(\)|unpack|offsets|digits"):
        CallLayout.read(line)
