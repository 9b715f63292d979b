"""Tests of `nbdist.world.parts`: nothing is lost or doubled where values are cut and joined."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from nbdist.errors import UsageError
from nbdist.world.parts import bounds, join, split

LENGTHS, RANKS = st.integers(0, 40), st.integers(1, 9)


@given(LENGTHS, RANKS)
def test_bounds_are_those_of_tensor_split(length, parts):
    """Each element is in one part, and parts are as long as torch makes them."""
    ends = bounds(length, parts)
    expected = [len(part) for part in torch.arange(length).tensor_split(parts)]
    assert [end - start for start, end in pairwise(ends)] == expected
    assert (ends[0], ends[-1]) == (0, length)


@given(st.lists(st.integers(), max_size=20), RANKS)
def test_lists_come_together_again(values, parts):
    """Also tuples, arrays and series."""
    for kind in (list, tuple, np.array, pd.Series):
        whole = kind(values)
        pieces = split("x", whole, parts)
        assert [element for piece in pieces for element in piece] == [*whole]
        assert all(type(piece) is type(whole) for piece in pieces)
        assert [*join("cat", "x", dict(enumerate(pieces)))] == [*whole]


@given(st.tuples(LENGTHS, st.integers(0, 3)), RANKS, st.sampled_from([0, 1, -1, -2]))
def test_tensors_along_a_dimension(shape, parts, dim):
    """Parts are views; joined they are the tensor."""
    whole = torch.arange(shape[0] * shape[1]).reshape(shape)
    pieces = split("x", whole, parts, dim)
    assert all(map(torch.equal, pieces, whole.tensor_split(parts, dim)))
    assert all(each.untyped_storage().data_ptr() == whole.data_ptr() for each in pieces)
    assert join("cat", "x", dict(enumerate(pieces)), dim).equal(whole)
    arrays = split("x", whole.numpy(), parts, dim)
    assert np.array_equal(join("cat", "x", dict(enumerate(arrays)), dim), whole)


def test_tables_and_data_sets():
    """Rows are cut, with what they are called."""
    frame = pd.DataFrame({"a": range(5), "b": list("vwxyz")}, index=range(10, 15))
    pieces = split("frame", frame, 2)
    assert [piece.index.tolist() for piece in pieces] == [[10, 11, 12], [13, 14]]
    assert join("cat", "frame", dict(enumerate(pieces))).equals(frame)
    data = Dataset.from_dict({"a": [*range(5)]})
    halves = split("data", data, 2)
    assert [[*half["a"]] for half in halves] == [[0, 1, 2], [3, 4]]
    assert [*join("cat", "data", dict(enumerate(halves)))["a"]] == [*range(5)]


def test_stacked():
    """Tensors make a tensor, numbers an array, with a dimension for the ranks."""
    assert join("stack", "x", {0: torch.ones(2), 2: torch.zeros(2)}).tolist() == [[1, 1], [0, 0]]
    assert join("stack", "x", {0: torch.ones(2), 2: torch.zeros(2)}, 1).tolist() == [[1, 0]] * 2
    assert join("stack", "x", {0: 1.5, 1: 2}).tolist() == [1.5, 2]


@pytest.mark.parametrize(
    ("value", "dim", "said"),
    [
        (5, None, r"`x` \(int\) cannot be split: use a tensor, an array"),
        ({1: 2}, None, r"`x` \(dict\) cannot be split"),
        (torch.tensor(1.0), None, r"`x` of shape \(\) has no dimension 0 to split"),
        (torch.ones(3), 1, r"`x` of shape \(3,\) has no dimension 1 to split"),
        ([1, 2], 1, r"`x` \(list\) has no dimension 1 to split"),
    ],
)
def test_what_cannot_be_cut(value, dim, said):
    """One line says why."""
    with pytest.raises(UsageError, match=said):
        split("x", value, 2, dim)


def test_what_does_not_fit_together():
    """It says who has what."""
    has = r"torch.Tensor \(1,\) on ranks 0,2, torch.Tensor \(2,\) on rank 1"
    with pytest.raises(UsageError, match=f"`x` .* by `--stack` .*: {has}. .* or `--cat`.$"):
        join("stack", "x", {0: torch.ones(1), 1: torch.ones(2), 2: torch.ones(1)})
    with pytest.raises(UsageError, match=r"`--cat` .*: int on ranks 0-1\. Gather the list inst"):
        join("cat", "x", {0: 1, 1: 2})
