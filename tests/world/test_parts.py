"""Tests of `nbdist.world.parts`: nothing is lost or doubled where values are cut and joined."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse as sparse_arrays
import torch
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
    from datasets import Dataset

    frame = pd.DataFrame({"a": range(5), "b": list("vwxyz")}, index=range(10, 15))
    pieces = split("frame", frame, 2)
    assert [piece.index.tolist() for piece in pieces] == [[10, 11, 12], [13, 14]]
    assert join("cat", "frame", dict(enumerate(pieces))).equals(frame)
    data = Dataset.from_dict({"a": [*range(5)]})
    halves = split("data", data, 2)
    assert [[*half["a"]] for half in halves] == [[0, 1, 2], [3, 4]]
    assert [*join("cat", "data", dict(enumerate(halves)))["a"]] == [*range(5)]


@pytest.mark.parametrize("parts", [2, 7])
def test_tables_of_others(parts):
    """Those of polars and pyarrow are cut by rows, and come together as what they are."""
    import polars as pl

    for whole in (
        pl.DataFrame({"a": range(5), "b": list("vwxyz")}),
        pl.Series("a", range(5)),
        pa.table({"a": range(5), "b": list("vwxyz")}),
        pa.array(["v", None, "x", "y", "z"]),
        pa.chunked_array([[1, 2], [3], [4, 5]]),
    ):
        pieces = split("x", whole, parts)
        assert [len(piece) for piece in pieces] == [len(p) for p in split("x", [*range(5)], parts)]
        assert all(type(piece) is type(whole) for piece in pieces)
        assert join("cat", "x", dict(enumerate(pieces))).equals(whole)


def test_batches_and_columns():
    """Record batches make a table; along the other dimension tables stand side by side."""
    import polars as pl

    batch = pa.record_batch({"a": range(5)})
    pieces = split("x", batch, 2)
    assert [piece.to_pydict() for piece in pieces] == [{"a": [0, 1, 2]}, {"a": [3, 4]}]
    assert join("cat", "x", dict(enumerate(pieces))).equals(pa.Table.from_batches([batch]))
    sides = {0: pl.DataFrame({"a": [1]}), 1: pl.DataFrame({"b": [2]})}
    assert join("cat", "x", sides, 1).equals(pl.DataFrame({"a": [1], "b": [2]}))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr"])
def test_sparse_tensors(layout, dim):
    """Parts have the layout of the whole, and so has what they make together."""
    dense = torch.arange(32.0).reshape(8, 4) % 5
    kind = getattr(torch, layout)
    sparse = dense.to_sparse(layout=kind, blocksize=(2, 2) if layout == "sparse_bsr" else None)
    pieces = split("x", sparse, 2, dim)
    assert all(piece.layout is kind for piece in pieces)
    assert [piece.shape[dim] for piece in pieces] == [dense.shape[dim] // 2] * 2
    made = join("cat", "x", dict(enumerate(pieces)), dim)
    assert made.layout is kind
    assert made.to_dense().equal(dense)
    if layout == "sparse_coo":
        assert join("stack", "x", {0: sparse, 1: sparse}).to_dense().equal(torch.stack([dense] * 2))


@pytest.mark.parametrize("kind", [sparse_arrays.csr_matrix, sparse_arrays.csc_array])
@pytest.mark.parametrize("dim", [0, 1])
def test_sparse_arrays_of_scipy(kind, dim):
    """As with tensors."""
    dense = np.arange(12.0).reshape(4, 3) % 5
    pieces = split("x", kind(dense), 2, dim)
    made = join("cat", "x", dict(enumerate(pieces)), dim)
    assert {type(made), *map(type, pieces)} == {kind}
    assert np.array_equal(made.toarray(), dense)


def test_stacked():
    """Tensors make a tensor, numbers an array, with a dimension for the ranks; masks stay."""
    masked = np.ma.array([1, 2], mask=[False, True])
    assert join("cat", "x", {0: masked, 1: masked}).tolist() == [1, None, 1, None]
    assert join("stack", "x", {0: masked, 1: masked}).tolist() == [[1, None]] * 2
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


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested")
def test_tensors_that_cannot_be_cut():
    """Three rows of blocks of two, and what has no shape."""
    blocks = torch.eye(6).to_sparse_bsr((2, 2))
    with pytest.raises(UsageError, match=r"sparse_bsr\) cannot .*: use `x.to_dense\(\)`"):
        split("x", blocks, 2)
    nested = torch.nested.nested_tensor([torch.ones(2)])
    with pytest.raises(UsageError, match=r"`x` \(torch.Tensor\) cannot be split"):
        split("x", nested, 2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_what_does_not_fit_together():
    """It says who has what."""
    import polars as pl

    has = r"torch.Tensor \(1,\) on ranks 0,2, torch.Tensor \(2,\) on rank 1"
    with pytest.raises(UsageError, match=f"`x` .* by `--stack` .*: {has}. .* or `--cat`.$"):
        join("stack", "x", {0: torch.ones(1), 1: torch.ones(2), 2: torch.ones(1)})
    with pytest.raises(UsageError, match=r"`--cat` .*: int on ranks 0-1\. Gather the list inst"):
        join("cat", "x", {0: 1, 1: 2})
    with pytest.raises(UsageError, match=r"no array.*: dict on ranks 0-1\. Gather the list inst"):
        join("stack", "x", {0: {}, 1: {}})
    lazy, nested = pl.LazyFrame({"a": [1]}), torch.nested.nested_tensor([torch.ones(2)])
    with pytest.raises(UsageError, match=r"`x` \(polars.*LazyFrame\) cannot be split"):
        split("x", lazy, 2)
    for value in (lazy, nested):
        with pytest.raises(
            UsageError, match=r"`x` cannot be .*: .* on ranks 0-1\. Gather the list"
        ):
            join("stack", "x", {0: value, 1: value})
    tables = {0: pl.DataFrame({"a": [1]}), 1: pl.DataFrame({"b": ["x"]})}
    with pytest.raises(UsageError, match=r"`x` cannot be .* on rank"):
        join("cat", "x", tables)
    with pytest.raises(UsageError, match=r"`x` cannot be .* on rank"):
        join("cat", "x", {rank: table.to_arrow() for rank, table in tables.items()})
