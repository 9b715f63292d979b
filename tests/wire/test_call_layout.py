"""Tests of `nbdist.wire.call_layout`: one line of text says where calls are."""

from __future__ import annotations

import pytest

from nbdist.wire.call_layout import LARGEST, CallLayout

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
