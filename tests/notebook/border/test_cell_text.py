"""Tests of `nbdist.notebook.border.cell_text`: whose a cell is while it is typed."""

from __future__ import annotations

import pytest

from nbdist.notebook.border.cell_text import as_comment, cell_magic, line_magic, root_at


@pytest.mark.parametrize(
    ("code", "name", "pool", "ranks"),
    [
        ("%%distributed\nx", "distributed", None, None),
        ("%%distributed -n 4 --pool a -r 0,2-3\nx", "distributed", "a", "0,2-3"),
        ("%%distributed --pool=a --ranks=1", "distributed", "a", "1"),
        ("# why\n\n  # and how\n%%rank 0, 2\nx", "rank", None, "0,2"),
        ("%%rank --pool a -1\nx", "rank", "a", "-1"),
        ("%%timeit\nx", "timeit", None, None),
        ("%%rank\n", "rank", None, None),
    ],
)
def test_the_magic_of_a_cell(code: str, name: str, pool: str | None, ranks: str | None) -> None:
    """Its name and whom it is for."""
    magic = cell_magic(code)
    assert magic is not None
    assert (magic.name, magic.pool, magic.ranks) == (name, pool, ranks)
    assert code[magic.start :].startswith(magic.text)


@pytest.mark.parametrize("code", ["x = 1", "x\n%%distributed", "%time x", "", "# %%distributed"])
def test_a_cell_without_one(code: str) -> None:
    """It is the notebook's own, and no character of it changes."""
    assert cell_magic(code) is None
    assert as_comment(code) == code


def test_as_python() -> None:
    """Every character below the magic's line keeps its place."""
    code = "# a\n%%distributed -n 4\nmodel.we"
    assert as_comment(code) == "# a\n# distributed -n 4\nmodel.we"


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("x = 1\n%dist_gather lo", ("dist_gather", " lo")),
        ("%dist_gather ", ("dist_gather", " ")),
        ("%dist_gather", None),
        ("x %dist_gather a", None),
        ("%%distributed ", None),
    ],
)
def test_the_magic_of_a_line(code: str, wanted: tuple[str, str] | None) -> None:
    """Once its name has been typed in full."""
    magic = line_magic(code, len(code))
    assert (magic and (magic.name, magic.text)) == wanted


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("mod", ("mod", False)),
        ("x = model.we", ("model", True)),
        ("model.first.", ("model", True)),
        ("f(x).we", ("", True)),
        ("(", ("", False)),
    ],
)
def test_whose_attribute(code: str, wanted: tuple[str, bool]) -> None:
    """The name before the first dot, where it is a name."""
    assert root_at(code, len(code)) == wanted
