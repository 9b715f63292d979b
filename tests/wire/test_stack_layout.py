"""Tests of `nbdist.wire.stack_layout`: the places of calls in a worker's memory."""

from __future__ import annotations

import pytest

from nbdist.wire.stack_layout import MAX_OFFSET, CallLayout


def test_any_other_line_is_refused() -> None:
    """Any other line is refused: a cell or an unknown version of Python may have written it."""
    layout = CallLayout(1 << 46, 1 << 47, 1 << 45, *range(13))
    assert CallLayout.read(layout.line()) == layout
    odd = [b"", b"\n", b"1 2 3\n", b"\xff\n", b"9" * 5000, b"x " * 16, layout.line() + b"1"]
    for line in (*odd, b"1 2 3" + b" -1" * 13, b"1 2 3" + b" %d" % MAX_OFFSET * 13):
        with pytest.raises(ValueError, match=r"int\(\)|unpack|offsets|digits"):
            CallLayout.read(line)
