"""Tests of `nbdist.topology`: the text of `-j`."""

from __future__ import annotations

import pytest

from nbdist.errors import BadTopology
from nbdist.topology import Layout, parse_layout


@pytest.mark.parametrize(
    ("text", "layout", "said"),
    [
        ("4", Layout(1, 4), "1x4"),
        ("2", Layout(1, 2), "1x2"),
        ("1x4", Layout(1, 4), "1x4"),
        ("2x4", Layout(2, 4), "2x4"),
        (" 2 x 4 ", Layout(2, 4), "2x4"),
        ("1:2x4", Layout(2, 4, least=1), "1:2x4"),
        ("2:2x4", Layout(2, 4), "2x4"),
    ],
)
def test_layouts_are_read(text: str, layout: Layout, said: str) -> None:
    """`NODESxN`, `MIN:MAXxN`, and a bare number of workers on one node."""
    assert parse_layout(text) == layout
    assert str(layout) == said
    assert layout.world_size == layout.nodes * layout.per_node


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0x0", "it takes at least one node and one worker"),
        ("2x0", "it takes at least one node and one worker"),
        ("0", "it takes at least one node and one worker"),
        ("x", "that is not nodes and workers"),
        ("2x4x1", "that is not nodes and workers"),
        ("1:4", "that is not nodes and workers"),
        ("5:2x4", "5 nodes are more than 2"),
        ("0:2x4", "it takes at least one node and one worker"),
        ("1:2:2x4", "that is not nodes and workers"),
        ("2:x4", "that is not nodes and workers"),
        ("-1x2", "that is not nodes and workers"),
        ("", "that is not nodes and workers"),
        ("9" * 5000, "that is not nodes and workers"),
    ],
)
def test_bad_layouts_are_told_in_one_line(text: str, why: str) -> None:
    """The reason, and the forms that there are."""
    with pytest.raises(BadTopology) as found:
        parse_layout(text)
    forms = "Use `-j 4`, `-j 2x4` (2 nodes with 4 workers each), or `-j 1:2x4` (1 node to 2)."
    assert str(found.value) == f"`-j {text}`: {why}. {forms}"
