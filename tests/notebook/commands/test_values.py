"""Tests of `nbdist.notebook.commands.values`: what a line asks for, and what it binds here."""

from __future__ import annotations

import pytest

from nbdist.notebook.commands.values import expressions_in
from tests.notebook.front_end import Notebook, body, lasting

pytestmark = pytest.mark.shared_world


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("a b[0, 1] c", ["a", "b[0, 1]", "c"]),
        *((line, [line]) for line in ("x + 1", "[x for x in y]", "(a, b)", "a) + (b")),
        ("f(1, 2) d['a b']", ["f(1, 2)", "d['a b']"]),
        ("a b(", ["a", "b("]),
        ("a,b[0, 1], f(1, 2)", ["a", "b[0, 1]", "f(1, 2)"]),
        ("a b, c", ["a", "b", "c"]),
        ("a, b c", ["a", "b", "c"]),
        ("d['é'], b", ["d['é']", "b"]),
    ],
)
def test_words_become_expressions(line, found):
    """Names stand one beside the other; what belongs together is one."""
    assert [*expressions_in(line.split(" "))] == found


two = lasting(
    "%load_ext nbdist",
    "%%distributed -n 2\nt = torch.full((2,), float(rank)); n = rank + 1\nboth = [t]\n"
    "if rank == 0: only = 'here'",
)


def test_several_names(two: Notebook):
    """Each is a list by rank, of an expression too, with what they share; it can be assigned."""
    assert two.run("%dist_gather t n both").errors == []
    assert two.value("[each.tolist() for each in t], n") == ([[0.0, 0.0], [1.0, 1.0]], [1, 2])
    assert two.value("[all(a is b[0] for a, b in zip(t, both))]") == [True]
    for line in ("n + 1 --as more", "n t[0].item() --as m,v"):
        assert two.run(f"%dist_gather {line}").errors == []
    assert two.value("more, m, v") == ([2, 3], [1, 2], [0.0, 1.0])
    ran = two.run("x = %dist_gather n\nprint(x is n, x)")
    assert (ran.streams, ran.results, ran.displays) == (["True [1, 2]\n"], [], [])
    for line in ("%dist_gather n", "%dist_gather n;", "z = %dist_gather n;"):
        ran = two.run(line)
        assert (ran.errors, ran.results) == ([], []), line
    two.run("y = %dist_gather n * 10 --rank 1\nboth = %dist_gather n t[0].item()")
    assert two.value("y, both") == (20, ([1, 2], [0.0, 1.0]))
    assert two.value("[get_ipython().run_line_magic('dist_gather', 'n')]") == [[1, 2]]
    # Assigned as bound, it is what gather has brought.
    two.run("%%distributed\nx = 'theirs'")
    two.run("x = %dist_gather n")
    assert body(two.run("%%distributed\nx"))[-1] == "'theirs'"


def test_one_value_in_place_of_a_list(two: Notebook):
    """Of one rank, by the old option too, or put together from all."""
    lines = ("n -r 1 --as one", "n -r -1 --as last", "n -r 0:1 --as first")
    lines += ("n --stack --as numbers", "n -r 1 --stack --as stacked")
    for line in (*lines, "t --stack --as s", "t --cat --as c", "t[None] --cat --dim 1 --as d"):
        assert two.run(f"%dist_gather {line}").errors == [], line
    assert two.value("one, last, first") == (2, 2, [1])
    assert two.value("[each.tolist() for each in (numbers, stacked, s, c, d)]") == [
        [1, 2], [2], [[0.0, 0.0], [1.0, 1.0]], [0.0, 0.0, 1.0, 1.0], [[0.0, 0.0, 1.0, 1.0]]
    ]  # fmt: skip
    assert two.run("%dist_gather n --rank 1 --as one").streams == ["`--rank` is now `-r`\n"]


def test_what_cannot_be_had(two: Notebook):
    """One line says where it is, or why not; nothing is bound here."""
    two.run("mine = 1\nz = 'as it was'")
    for line, said in (
        ("mine", "no rank has `mine`; the notebook has it: `%dist_push mine`."),
        ("n( --as z", "`n(` is no expression: "),
        ("t[:rank+1] --stack --as z", "`t[:rank+1]` cannot be put together by"),
        ("only n", "rank 1 has no `only`; rank 0 has it: `-r 0`."),
    ):
        assert two.run(f"%dist_gather {line}").error.startswith(f"UsageError: {said}")
    assert two.value("z, 'only' in globals()") == ("as it was", False)


def test_parts_are_the_workers(two: Notebook):
    """Also along a dimension; the notebook keeps its whole value, until that is bound anew."""
    two.run("x = [1, 2, 3]\nimport numpy as np; grid = np.arange(6).reshape(2, 3)")
    two.run("%dist_scatter x")
    assert body(two.run("%%distributed\nprint(x)"))[1::2] == ["[1, 2]", "[3]"]
    assert two.value("x") == [1, 2, 3]
    two.run("x = 'another'")
    assert body(two.run("%%distributed\nprint(x)"))[1:] == ["another"]
    said = two.run("%dist_scatter grid --dim 1 --as column -r 1").text
    assert said == "scattered column: 3 along dimension 1, 3 to rank 1"
    assert two.run("%dist_gather column -r 1").errors == []
    assert two.value("column.tolist()") == [[0, 1, 2], [3, 4, 5]]
