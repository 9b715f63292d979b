"""Tests of `nbdist.notebook.tables`: columns, blocks, and both forms of each."""

from __future__ import annotations

from nbdist.notebook.tables import Shown, below, block, table
from nbdist.words import aligned

ROWS = [("rank", "state"), ("0", "busy 3 s"), ("11", "<idle>")]


def test_a_table_says_the_same_in_both_forms():
    """The headings first, below the head; in HTML escaped, with the colours that were given."""
    shown = table("4 workers <here>", ROWS, {"busy": "#123456"})
    assert shown.text.splitlines() == ["4 workers <here>", *aligned(ROWS)]
    assert "<b>4 workers &lt;here&gt;</b>" in shown.html
    assert shown.html.count("<th") == 2
    assert shown.html.count("<td") == 4
    assert "&lt;idle&gt;</td>" in shown.html
    assert shown.html.count("color:#123456") == 1
    # On a narrow page a line of Python breaks, and no time with its unit.
    long = table("", [("state", "line"), ("busy 7.5 s", "x" * 40)]).html
    assert 'white-space:nowrap">busy 7.5 s' in long
    assert long.count("nowrap") == 1


def test_a_head_alone():
    """Where there are no rows there is no table."""
    assert table("no workers", []) == Shown(
        '<div style="font-family:monospace"><b>no workers</b></div>', "no workers"
    )


def test_blocks_below_one_another():
    """Lines as they are, escaped in HTML only."""
    one, two = block("a < b"), block("c")
    assert one.text == "a < b"
    assert one.html.endswith(">a &lt; b</pre>")
    assert below([one, two]) == Shown(one.html + two.html, "a < b\nc")
