"""Tests of `nbdist.world.parts`: nothing is lost or doubled where values are cut and joined."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse as sparse_arrays
import torch
from hypothesis import given
from hypothesis import strategies as st

from nbdist.errors import UsageError
from nbdist.world.parts import join, split

LENGTHS, RANKS = st.integers(0, 40), st.integers(1, 9)


@given(st.lists(st.integers(), max_size=20), RANKS)
def test_lists_come_together_again(values, parts):
    """Also tuples, arrays and series; parts are as long as torch makes them."""
    lengths = [len(part) for part in torch.arange(len(values)).tensor_split(parts)]
    for kind in (list, tuple, np.array, pd.Series):
        whole = kind(values)
        pieces = split("x", whole, parts)
        assert [len(piece) for piece in pieces] == lengths
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
    """Rows are cut, and come together as what they are; else tables stand side by side."""
    import polars as pl
    from datasets import Dataset

    columns = {"a": range(5), "b": list("vwxyz")}
    for whole in (
        pd.DataFrame(columns, index=range(10, 15)),
        *(pl.DataFrame(columns), pl.Series("a", range(5)), pa.table(columns)),
    ):
        for parts, lengths in ((2, [3, 2]), (7, [1] * 5 + [0] * 2)):
            pieces = split("x", whole, parts)
            assert [len(piece) for piece in pieces] == lengths
            assert all(type(piece) is type(whole) for piece in pieces)
            assert join("cat", "x", dict(enumerate(pieces))).equals(whole)
    halves = split("x", Dataset.from_dict({"a": [*range(5)]}), 2)
    assert [[*half["a"]] for half in halves] == [[0, 1, 2], [3, 4]]
    assert [*join("cat", "x", dict(enumerate(halves)))["a"]] == [*range(5)]
    sides = {0: pl.DataFrame({"a": [1]}), 1: pl.DataFrame({"b": [2]})}
    assert join("cat", "x", sides, 1).equals(pl.DataFrame({"a": [1], "b": [2]}))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr"])
def test_sparse_values(layout, dim):
    """Parts have the layout of the whole, and so has what they make together; scipy's as well."""
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
    for array in (sparse_arrays.csr_matrix, sparse_arrays.csc_array):
        pieces = split("x", array(dense.numpy()), 2, dim)
        joined = join("cat", "x", dict(enumerate(pieces)), dim)
        assert {type(joined), *map(type, pieces)} == {array}
        assert np.array_equal(joined.toarray(), dense)


def test_stacked():
    """Tensors make a tensor, numbers an array, with a dimension for the ranks; masks stay."""
    masked = np.ma.array([1, 2], mask=[False, True])
    assert join("cat", "x", {0: masked, 1: masked}).tolist() == [1, None, 1, None]
    assert join("stack", "x", {0: masked, 1: masked}).tolist() == [[1, None]] * 2
    two = {0: torch.ones(2), 2: torch.zeros(2)}
    assert join("stack", "x", two).tolist() == [[1, 1], [0, 0]]
    assert join("stack", "x", two, 1).tolist() == [[1, 0]] * 2
    assert join("stack", "x", {0: 1.5, 1: 2}).tolist() == [1.5, 2]


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested")
def test_what_cannot_be_cut():
    """One line says why; of blocks there are three rows here, and some tensors have no shape."""
    import polars as pl

    for value, dim, said in (
        (5, None, r"`x` \(int\) cannot be split: use a tensor, an array"),
        (torch.tensor(1.0), None, r"`x` of shape \(\) has no dimension 0 to split"),
        (torch.ones(3), 1, r"`x` of shape \(3,\) has no dimension 1 to split"),
        ([1, 2], 1, r"`x` \(list\) has no dimension 1 to split"),
        (torch.eye(6).to_sparse_bsr((2, 2)), 0, r"sparse_bsr\) cannot .*: use `x.to_dense\(\)`"),
        (nested(), 0, r"`x` \(torch.Tensor\) cannot be split"),
        (pl.LazyFrame({"a": [1]}), None, r"`x` \(polars.*LazyFrame\) cannot be split"),
    ):
        with pytest.raises(UsageError, match=said):
            split("x", value, 2, dim)


def nested():
    return torch.nested.nested_tensor([torch.ones(2)])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_what_does_not_fit_together():
    """It says who has what."""
    import polars as pl

    one, two = torch.ones(1), torch.ones(2)
    has = r"torch.Tensor \(1,\) on ranks 0,2, torch.Tensor \(2,\) on rank 1"
    other = r"\. Gather the list inst"
    tables = {0: pl.DataFrame({"a": [1]}), 1: pl.DataFrame({"b": ["x"]})}
    for how, values, said in (
        ("stack", {0: one, 1: two, 2: one}, f"`x` .* by `--stack` .*: {has}. .* or `--cat`.$"),
        ("cat", {0: 1, 1: 2}, f"`--cat` .*: int on ranks 0-1{other}"),
        ("stack", {0: {}, 1: {}}, f"no array.*: dict on ranks 0-1{other}"),
        ("stack", dict.fromkeys((0, 1), pl.LazyFrame({"a": [1]})), f"`x` .* on ranks 0-1{other}"),
        ("stack", dict.fromkeys((0, 1), nested()), f"`x` cannot be .*: .* on ranks 0-1{other}"),
        ("cat", tables, r"`x` cannot be .* on rank"),
        ("cat", {0: pa.table({"a": [1]}), 1: pa.table({"b": [2]})}, r"`x` cannot be .* on rank"),
    ):
        with pytest.raises(UsageError, match=said):
            join(how, "x", values)
