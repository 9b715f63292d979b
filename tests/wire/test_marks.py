"""Tests of `nbdist.wire.marks`: what a worker tells its agent in the middle of its output."""

from __future__ import annotations

import pytest

from nbdist.wire.marks import LONGEST_MARK, Mark, cut_off_pattern, mark, mark_pattern, mark_value

TOKEN = "0123456789abcdef"
VALUES: list[Mark] = [0, 7, 123_456_789_012, "ready", "stdout", "stderr"]
PIPE_BUF = 512  # POSIX's smallest: such a write is never torn.


@pytest.mark.parametrize("value", VALUES)
def test_what_is_marked_is_found(value: Mark):
    """A mark in the middle of text is found, with its value, and the text is what is left."""
    pieces = mark_pattern(TOKEN).split(b"before" + mark(TOKEN, value) + b"after")
    assert pieces[::2] == [b"before", b"after"]
    assert mark_value(pieces[1]) == value


@pytest.mark.parametrize("value", VALUES)
def test_mark_is_written_in_one_piece(value: Mark):
    """A mark is shorter than what the kernel writes to a pipe without a break."""
    assert len(mark(TOKEN, value)) < PIPE_BUF


def test_mark_is_invisible():
    """Terminals ignore a mark, whatever its value: it is one APC sequence."""
    assert mark(TOKEN, 5).startswith(b"\x1b_")
    assert mark(TOKEN, 5).endswith(b"\x1b\\")
    assert mark(TOKEN, 5).count(b"\x1b") == 2


@pytest.mark.parametrize(
    "text",
    [
        mark("fedcba9876543210", 1),
        b"\x1b_" + TOKEN.encode() + b";1",
        b"\x1b_" + TOKEN.encode() + b";1 2\x1b\\",
        b"\x1b_" + TOKEN.encode() + b"1\x1b\\",
        b"\x1b[31mred\x1b[0m",
    ],
)
def test_other_text_is_no_mark(text: bytes):
    """Other tokens, unfinished marks and colours are text."""
    assert mark_pattern(TOKEN).split(text) == [text]


@pytest.mark.parametrize("value", VALUES)
def test_a_mark_that_is_cut_off_is_found(value: Mark):
    """Wherever a read ends in it; a whole one is not, nor text that began like one."""
    whole = mark(TOKEN, value)
    for cut in range(1, len(whole)):
        found = cut_off_pattern(TOKEN).search(b"\x1b[1mbefore" + whole[:cut])
        assert found is not None
        assert found.group() == whole[:cut]
    assert len(whole) < LONGEST_MARK
    assert not cut_off_pattern(TOKEN).search(whole + b"after")
    assert not cut_off_pattern(TOKEN).search(b"\x1b_" + TOKEN.encode() + b";" + b"7" * 100)
