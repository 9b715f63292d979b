"""Tests of `nbdist.notebook.auto_mode`: what it says of itself."""

from __future__ import annotations

import ast

import pytest

from nbdist.notebook.auto_mode import CELLS_HERE, REASONS, Side, in_one, parts_of

SIDE = Side({"lines", "acc", "rank"}.__contains__, {"%ours", "%%ours"}.__contains__)


def sides(code: str) -> list[tuple[int, str]]:
    """From which line on something runs where, in its order."""
    return [(part.first, "here" if part.is_here else "there") for part in parts_of(code, SIDE)]


@pytest.mark.parametrize(
    ("code", "where"),
    [
        ("x = 1", [(0, "there")]),
        ("%time acc", [(0, "there")]),
        ("# a\n\n%%time\nacc", [(0, "there")]),
        ("%%capture out\nprint(acc)", [(0, "there")]),
        ("%%capture\n!pip install a\n%pip install b", [(0, "here")]),
        ("%nobodys x", [(0, "there")]),
        ("%ours x", [(0, "here")]),
        ("%%ours\nx", [(0, "here")]),
        ("%%html\n<b>x</b>", [(0, "here")]),
        ("%%!\nls", [(0, "here")]),
        ("%dist_gather acc", [(0, "here")]),
        ("found = %dist_gather acc", [(0, "here")]),
        ("%matplotlib inline", [(0, "here"), (0, "there")]),
        ("%matplotlib inline\nx = 1", [(0, "here"), (0, "there")]),
        ("%load_ext nbdist\n%dist_auto on", [(0, "here"), (1, "here")]),
        ("%config NbDist.display = 'plain'", [(0, "here")]),
        ("%config InlineBackend.figure_format = 'svg'", [(0, "here"), (0, "there")]),
        ("!pip install x\nimport x", [(0, "here"), (1, "there")]),
        ("x = 1\n%dist_gather x\ny = 2", [(0, "there"), (1, "here"), (2, "there")]),
        ("!cp {lines[0]} $HOME", [(0, "there")]),
        ("!echo $rank", [(0, "there")]),
        ("!echo {elsewhere}", [(0, "here")]),
        ("elsewhere = 1\n!echo {elsewhere}", [(0, "there")]),
        ("!for acc in 1 2; do echo $acc; done", [(0, "here")]),
        ("files = !ls", [(0, "there")]),
        ("s = '''\n%cd x\n!ls\n'''", [(0, "there")]),
        ("if x:\n    %cd there\n    !ls", [(0, "there")]),
        ("a = [\n1,\n%time\n]", [(0, "there")]),
        ("!echo it's \\\n  going on\nx = 1", [(0, "here"), (2, "there")]),
        ("x != y", [(0, "there")]),
        ("if x:\n        a\n    b\n%cd", [(0, "there")]),
        ("x = 'never closed\n%cd there", [(0, "there"), (1, "here")]),
        ("x = (1,\n%cd there", [(0, "there")]),
        ("\x00", [(0, "there")]),
        ("", []),
        ("# only", []),
    ],
)
def test_where_lines_run(code: str, where: list[tuple[int, str]]) -> None:
    """Magics of the notebook and commands here, all others on the ranks, in their order."""
    assert sides(code) == where
    assert in_one(code, parts_of(code, SIDE), "distributed --auto") or not where


def test_one_cell_of_them() -> None:
    """Each part stands in its own lines, and the ranks' part has its line numbers."""
    code = "x = 1\nz = 2\n%dist_gather x\ny = 2"
    lines = in_one(code, parts_of(code, SIDE), "distributed --auto").splitlines()
    assert lines[2] == "%dist_gather x"
    assert lines[1] == ""
    first, last = (ast.parse(lines[number]).body[0] for number in (0, 3))
    assert [ast.literal_eval(each) for each in first.value.args] == [  # type: ignore[attr-defined]
        "distributed",
        "--auto",
        "x = 1\nz = 2\n",
    ]
    assert ast.literal_eval(last.value.args[2]) == "#\n#\n#\ny = 2"  # type: ignore[attr-defined]
    assert in_one("x", parts_of("x", SIDE), "distributed --auto") == "%%distributed --auto\nx"
    assert in_one("%cd", parts_of("%cd", SIDE), "distributed --auto") == "%cd"


def test_the_table() -> None:
    """No magic stands in it twice, and each group has its reason."""
    names = [n for groups in REASONS.values() for some in groups.values() for n in some.split()]
    cells = [name for some in CELLS_HERE.values() for name in some.split()]
    assert len({*names}) == len(names)
    assert len({*cells}) == len(cells)
    assert all(reason for groups in (*REASONS.values(), CELLS_HERE) for reason in groups)
