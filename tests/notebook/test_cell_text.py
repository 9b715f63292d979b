"""Tests of `nbdist.notebook.cell_text`: whose a cell is while it is typed."""

from __future__ import annotations

import pytest

from nbdist.notebook.cell_text import (
    LineMagic,
    as_comment,
    cell_magic,
    divide,
    line_magic,
    root_at,
    transform_first_lines,
    without_comment,
)


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
        ("%load_ext nbdist\n%%rank 0\nx\n", "%%rank 0\n# %load_ext nbdist\nx\n"),
        ("%load_ext nbdist # a\n\n%%distributed\n", "%%distributed\n# %load_ext nbdist # a\n\n"),
        ("%load_ext nbdist\nx\n", "%load_ext nbdist\nx\n"),
        ("x\n%%distributed\n", "get_ipython().run_line_magic('%distributed', 'at line 2')\n"),
        ("x\n\nif x:\n  %%rank 0\n", "get_ipython().run_line_magic('%rank', 'at line 4')\n"),
        ("%%rank 0\nx\n%%local\nx\n", "get_ipython().run_line_magic('%local', 'at line 3')\n"),
        ("%%rank 0\n%%rank 1\nx\n", "get_ipython().run_line_magic('%rank', 'at line 2')\n"),
        (
            "%%distributed --auto\nx\n%%distributed\n",
            "get_ipython().run_line_magic('%distributed', 'at line 2')\n",
        ),
        ("x = '''\n%%distributed\n'''\n", "x = '''\n%%distributed\n'''\n"),
        ("%%writefile a\n%%distributed\n", "%%writefile a\n%%distributed\n"),
        ("%%rank 0\n%%writefile a\n%%rank 0\n", "%%rank 0\n%%writefile a\n%%rank 0\n"),
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


@pytest.mark.parametrize(
    ("cell", "rest", "magics"),
    [
        ("x = 1\n", "x = 1\n", []),
        ("x = 1\n\n%dist_gather x  # why\n", "x = 1\n\n", [("dist_gather", "x  # why", "")]),
        (
            "x\n%dist_status\n# both\ny = %dist_gather x",
            "x\n",
            [("dist_status", "", ""), ("dist_gather", "x", "y")],
        ),
        ("x\n%dist_status\nprint(1)\n", "x\n%dist_status\nprint(1)\n", []),
        ("for x in y:\n    %dist_push x\n", "for x in y:\n    %dist_push x\n", []),
        ("%dist_gather x\n", "%dist_gather x\n", []),
        ("%%bash\n%dist_gather x\n", "%%bash\n%dist_gather x\n", []),
        ("x = '''\n%dist_status\n'''", "x = '''\n%dist_status\n'''", []),
    ],
)
def test_what_the_notebook_runs_at_the_end(
    cell: str, rest: str, magics: list[tuple[str, str, str]]
) -> None:
    """Its own magics below all else, with what their values are bound to."""
    assert divide(cell) == (rest, [LineMagic(*each) for each in magics])


@pytest.mark.parametrize(
    ("line", "without"),
    [
        ("loss   # a list by rank", "loss  "),
        ('-n 4 # it\'s "big"', "-n 4"),
        ("# all", ""),
        ("d['#'] d[\"a # b\"]  # c", "d['#'] d[\"a # b\"] "),
        ("--env K=#x", "--env K=#x"),
        ("--tag 'a # b", "--tag 'a # b"),
    ],
)
def test_a_comment_ends_a_line(line: str, without: str) -> None:
    """After a space and outside of quotes, as in Python and in a shell."""
    assert without_comment(line) == without
