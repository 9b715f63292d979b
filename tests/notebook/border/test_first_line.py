"""Tests of `nbdist.notebook.border.first_line`: what may stand above a magic and in its line."""

from __future__ import annotations

import pytest

from nbdist.notebook.border.first_line import transform_first_lines


@pytest.mark.parametrize(
    ("cell", "becomes"),
    [
        ("%%distributed -n 4\nx\n", "%%distributed -n 4\nx\n"),
        ("# why\n%%distributed -n 4\nx\n", "%%distributed -n 4\n# why\nx\n"),
        ("\n  # a\n%%rank 0\nx\n", "%%rank 0\n\n  # a\nx\n"),
        ("%%rank[0,1]\nx\n", "%%rank 0,1\nx\n"),
        ("%%rank [0, 1] --pool a\nx\n", "%%rank 0,1 --pool a\nx\n"),
        ("%%local\nx\n", "# %%local\nx\n"),
        ("# a\n%%local\nx\n", "# %%local\n# a\nx\n"),
        ("# a\n%%distributed", "%%distributed\n# a\n"),
        ("x\n%%distributed\n", "x\n%%distributed\n"),
        ("# a\n%%distributedly\n", "# a\n%%distributedly\n"),
        ("# a\n%%time\nx\n", "# a\n%%time\nx\n"),
        ("# only\n", "# only\n"),
        ("", ""),
    ],
)
def test_a_cell_begins_with_its_magic(cell: str, becomes: str) -> None:
    """Every line that was below it keeps its number; cells of others stay as they are."""
    lines = transform_first_lines(cell.splitlines(keepends=True))
    assert "".join(lines) == becomes
    assert transform_first_lines(lines) == lines


def test_in_a_terminal() -> None:
    """`%%local` stays a magic there, so that its cell is not complete before it is."""
    lines = ["# a\n", "%%local\n", "x\n"]
    assert transform_first_lines(lines, local_is_plain=False) == ["%%local\n", "# a\n", "x\n"]
