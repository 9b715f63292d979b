"""Tests of `nbdist.world.comparison`: who agrees, who is to be compared, and what is said."""

from __future__ import annotations

import pytest

from nbdist.wire.ops import Distance, Looked, Part
from nbdist.world.comparison import MOST_COMPARED, Comparison

W = "float32 (4, 4)"


def part(digest: str, kind: str = W, text: str = "") -> Part:
    return Part(kind, digest, text, size=64, count=16)


def compared(*parts: Part | None) -> Comparison:
    """A value with one part `w`, as each rank has it."""
    looked = [Looked({"w": each} if each else {"v": part("v")}) for each in parts]
    return Comparison("model", dict(enumerate(looked)))


def test_all_agree():
    """One line."""
    same = compared(part("a"), part("a"))
    assert [*same.rows()] == []
    assert same.to_compare() == {}
    assert same.head(0) == "model: 1 part, 64 B · ranks 0-1 agree"


def test_one_differs():
    """It is compared with the first of those that agree."""
    found = compared(part("a"), part("a"), part("a"), part("b"))
    assert found.to_compare() == {0: ([3], ["w"])}
    assert [*found.rows()] == [("w", W, "ranks 0-2 agree, rank 3 differs")]
    found.take({3: {"w": Distance(0.03125, 12)}})
    said = "ranks 0-2 agree, rank 3 differs by at most 3.1e-2 (12 of 16)"
    assert [*found.rows()] == [("w", W, said)]
    assert found.head(1) == "model: 1 part, 64 B · 1 of 1 differs"


def test_each_rank_is_asked_once():
    """In their order, whatever part they differ in."""
    looked = {
        rank: Looked({"a": part("a" if rank < 2 else "b"), "b": part("x" if rank != 1 else "y")})
        for rank in range(3)
    }
    assert Comparison("x", looked).to_compare() == {0: ([1, 2], ["a", "b"])}


def test_bits_alone():
    """Zeros' signs and kinds of NaN are no difference."""
    found = compared(part("a"), part("a"), part("b"))
    found.take({2: {"w": Distance(0.0, 0)}})
    assert [*found.rows()] == []
    third = compared(part("a"), part("b"), part("c"))
    third.take({1: {"w": Distance(0.0, 0)}, 2: {"w": Distance(2.0, 1, 1)}})
    said = "ranks 0-1 agree, rank 2 differs by at most 2.0e0 (1 of 16), NaN or infinity in 1"
    assert [row[2] for row in third.rows()] == [said]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (
            (part("a"), part("b", "float32 (5,)")),
            "float32 (4, 4) on rank 0, float32 (5,) on rank 1",
        ),
        ((part("a"), None, part("a")), "float32 (4, 4) on ranks 0,2, nothing on rank 1"),
        (
            (part("a", "int", "3"), part("b", "int", "4"), part("b", "int", "4")),
            "4 on ranks 1-2, 3 on rank 0",
        ),
        ((part("a"), part("b")), "compared with rank 0, rank 1 differs"),
        ((part("a"), part("b"), part("b")), "ranks 1-2 agree, rank 0 differs"),
    ],
)
def test_what_differs(parts: tuple[Part | None, ...], said: str):
    """Types, plain values, or contents."""
    found = compared(*parts)
    assert next(text for path, _, text in found.rows() if path == "w") == said


def test_many_that_differ():
    """One number for all of them."""
    found = compared(*(part(str(rank)) for rank in range(6)))
    assert found.to_compare() == {0: ([1, 2, 3, 4, 5], ["w"])}
    found.take({rank: {"w": Distance(rank / 10, rank)} for rank in range(1, 6)})
    said = "compared with rank 0, ranks 1-5 differ by at most 5.0e-1 (5 of 16)"
    assert [row[2] for row in found.rows()] == [said]


def test_what_is_too_big_is_not_moved():
    """Of the rest the numbers are compared."""
    big = [Part(W, digest, size=MOST_COMPARED, count=9) for digest in "ab"]
    looked = {r: Looked({"big": big[r], "small": part(str(r))}) for r in (0, 1)}
    assert Comparison("x", looked).to_compare() == {0: ([1], ["big"])}
    looked = {r: Looked({"small": part(str(r)), "big": big[r]}) for r in (0, 1)}
    assert Comparison("x", looked).to_compare() == {0: ([1], ["small"])}


def test_ranks_without_it_and_parts_unseen():
    """The head says so."""
    looked = {0: Looked({"w": part("")}), 1: Looked(missing="x"), 2: Looked({"w": part("")})}
    head = Comparison("x", looked).head(0)
    assert head == (
        "x: 1 part, 64 B · ranks 0,2 agree · rank 1 has none"
        " · 1 part not compared: sharded, or of unknown kind"
    )
    assert "one rank alone" in Comparison("x", {0: looked[0]}).head(0)
