"""Splits a value into parts, one for each rank, and joins the values of ranks again.

`nbdist.world.value_transfer` uses this module in the notebook's process, for scatter and gather.
This module imports no library of tensors or tables but numpy.  It looks the others up in
`sys.modules`: if a value is of a class of such a library, the library was imported already.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise
from types import ModuleType
from typing import Any, Literal

from nbdist.errors import UsageError
from nbdist.output.wording import fold_ranks
from nbdist.values.unpicklable import type_name
from nbdist.words import name_ranks, one_line

Joining = Literal["stack", "cat"]

Slicer = Callable[[int, int], Any]
"""A function that takes two indices, and returns the elements `value[first:second]` of a value."""


def bounds(length: int, parts: int) -> list[int]:
    """Return the index at which each of `parts` parts begins, and then the length.

    If the length is not divisible by `parts`, the first parts have one element more than the last,
    as with torch.tensor_split.
    """
    each, more = divmod(length, parts)
    return [number * each + min(number, more) for number in range(parts + 1)]


def split(name: str, value: Any, parts: int, dim: int | None = None) -> list[Any]:
    """Return `parts` pieces of a value, which is split along a dimension, by default the first.

    Pieces may be views of the value's memory; tables and data sets are split by rows.  `name` is
    for error messages.  Raises UsageError if the value cannot be split, or has no such dimension.
    """
    length, part = _cutter(name, value, dim)
    return [part(start, end) for start, end in pairwise(bounds(length, parts))]


def length_of(part: Any, dim: int | None = None) -> int:
    """Return the length of a part along the dimension that was split, by default the first."""
    return int(part.shape[dim or 0]) if _is_array(part) else len(part)


def unit_of(value: Any, dim: int | None = None) -> str:
    """Return the unit of `length_of` for messages: `rows`, `elements` or `along dimension 1`."""
    if _is_array(value):
        return f"along dimension {dim or 0}"
    return "elements" if isinstance(value, list | tuple) else "rows"


def _is_array(value: Any) -> bool:
    if _is_a(value, "torch", "Tensor"):
        return not value.is_nested
    return _is_a(value, "numpy", "ndarray") or _is_sparse_array(value)


def _is_sparse_array(value: Any) -> bool:
    return _is_a(value, "scipy.sparse", "spmatrix", "sparray")


def _cutter(name: str, value: Any, dim: int | None) -> tuple[int, Slicer]:
    """Return a value's length along `dim`, and a function that returns a range of its elements.

    If `dim` is None, the range is along the first dimension.  `name` is for error messages.  Raises
    UsageError if the value cannot be split, or has no such dimension.
    """
    if _is_array(value):
        return _cutter_of_array(name, value, dim or 0)
    if dim:
        raise UsageError(f"`{name}` ({type_name(value)}) has no dimension {dim} to split.")
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return len(value), lambda start, end: value[start:end]
    if _is_a(value, "polars", "DataFrame", "Series"):
        return len(value), lambda start, end: value.slice(start, end - start)
    if _is_a(value, "pyarrow", "Table"):
        return len(value), lambda start, end: _arrow_copy(value.slice(start, end - start))
    if hasattr(value, "iloc"):  # such as a DataFrame or Series of pandas
        return len(value), lambda start, end: value.iloc[start:end]
    if _is_a(value, "datasets", "Dataset"):
        return len(value), lambda start, end: _rows_of(value, start, end)
    raise UsageError(
        f"`{name}` ({type_name(value)}) cannot be split: use a tensor, an array, a list or "
        "tuple, a DataFrame or Series, a table of pyarrow, a Dataset of Hugging Face's "
        "`datasets`, or `list(...)` of it."
    )


def _cutter_of_array(name: str, value: Any, dim: int) -> tuple[int, Slicer]:
    dims = len(value.shape)
    if not -dims <= dim < dims:
        shape = tuple(value.shape)
        raise UsageError(f"`{name}` of shape {shape} has no dimension {dim} to split.")
    if _is_a(value, "torch", "Tensor") and value.layout is not sys.modules["torch"].strided:
        return int(value.shape[dim]), lambda start, end: _sparse_part(name, value, dim, start, end)
    before = (slice(None),) * (dim % dims)
    if _is_sparse_array(value):
        rows = value.tocsr()  # some other formats cannot be sliced
        return value.shape[dim], lambda start, end: rows[(*before, slice(start, end))].asformat(
            value.format
        )
    # If `is_copied` is True, each part is copied to a contiguous array before it is pickled.
    # Pickling a part that is not contiguous would copy the part twice.
    is_copied = bool(before) and _is_a(value, "numpy", "ndarray")

    def part(start: int, end: int) -> Any:
        shown = value[(*before, slice(start, end))]
        return sys.modules["numpy"].ascontiguousarray(shown) if is_copied else shown

    return int(value.shape[dim]), part


def _sparse_part(name: str, value: Any, dim: int, start: int, end: int) -> Any:
    try:
        part = value.detach().to_sparse_coo().narrow_copy(dim, start, end - start)
        return _laid_out_as(value, part)
    except RuntimeError as error:
        raise UsageError(
            f"`{name}` ({value.layout}) cannot be split ({one_line(str(error), 100)}): "
            f"use `{name}.to_dense()`."
        ) from None


def _laid_out_as(value: Any, sparse: Any) -> Any:
    if value.layout is sys.modules["torch"].sparse_coo:
        return sparse
    blocks = tuple(value.values().shape[1:3]) if "bs" in str(value.layout) else None
    return sparse.to_sparse(layout=value.layout, blocksize=blocks)


def _arrow_copy(table: Any) -> Any:
    """Return a copy of a slice of a pyarrow table, whose pickle would contain the whole table."""
    arrow = sys.modules["pyarrow"]
    sink = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write(table)
    return arrow.ipc.open_stream(sink.getvalue()).read_all()


def _rows_of(data: Any, start: int, end: int) -> Any:
    """Return a range of rows of a data set.

    The rows of a data set in memory are copied, because their pickle would contain the whole data
    set.
    """
    rows = data.select(range(start, end))
    if rows.cache_files:  # the pickle of a data set on the disk only names the file
        return rows
    datasets = sys.modules["datasets"]
    table = rows.with_format("arrow")[:].combine_chunks()  # each shuffled row is a chunk of its own
    copy = datasets.table.InMemoryTable(_arrow_copy(table))
    looks = {**rows.format}
    looks |= looks.pop("format_kwargs", {})
    return datasets.Dataset(copy, info=rows.info, split=rows.split).with_format(**looks)


def join(how: Joining, name: str, values: Mapping[int, Any], dim: int = 0) -> Any:
    """Return the values of ranks as one value: stacked along a new dimension, or concatenated.

    Concatenated tables become a table, and concatenated lists a list.  Tensors become a tensor, and
    most other values a numpy array.  `name` is for error messages.  Raises UsageError if the values
    do not fit together.
    """
    kinds = fold_ranks({rank: _shape_text(value) for rank, value in values.items()})
    polars = getattr(sys.modules.get("polars"), "exceptions", None)
    polars_error = (polars.PolarsError,) if polars else ()
    parts = [*values.values()]
    try:
        if how == "cat":
            return _end_to_end(parts, dim)
        if torch := _library_of("torch", "Tensor", parts):
            return _joined_tensors(torch.stack, parts, dim)
        return _array("stack", parts, dim)
    except (ValueError, TypeError, RuntimeError, IndexError, *polars_error) as error:
        has = [f"{kind} on {name_ranks(ranks)}" for kind, ranks in kinds.items()]
        other = ", or `--cat`" if how == "stack" and len(has) > 1 else ""
        raise UsageError(
            f"`{name}` cannot be put together by `--{how}` ({one_line(str(error), 100)}): "
            f"{', '.join(has)}. Gather the list instead{other}."
        ) from None


def _end_to_end(values: Sequence[Any], dim: int) -> Any:
    first = values[0]
    if torch := _library_of("torch", "Tensor", values):
        return _joined_tensors(torch.cat, values, dim)
    for kind in ("DataFrame", "Series"):
        if pandas := _library_of("pandas", kind, values):
            return pandas.concat([*values], axis=dim)
    if datasets := _library_of("datasets", "Dataset", values):
        return datasets.concatenate_datasets([*values])
    if all(map(_is_sparse_array, values)):
        scipy = sys.modules["scipy.sparse"]
        return (scipy.hstack if dim % 2 else scipy.vstack)([*values], format=first.format)
    if polars := _library_of("polars", "DataFrame", values):
        return polars.concat([*values], how="horizontal" if dim else "vertical")
    if dim == 0 and (polars := _library_of("polars", "Series", values)):
        return polars.concat([*values])
    if dim == 0 and (arrow := _library_of("pyarrow", "Table", values)):
        return arrow.concat_tables(values)
    if all(type(value) is type(first) for value in values) and type(first) in (list, tuple):
        return type(first)(chain.from_iterable(values))
    return _array("concatenate", values, dim)


def _joined_tensors(how: Callable[[list[Any], int], Any], values: Sequence[Any], dim: int) -> Any:
    first, torch = values[0], sys.modules["torch"]
    if first.layout in (torch.strided, torch.sparse_coo, torch.jagged):
        return how([*values], dim)
    return _laid_out_as(first, how([value.to_sparse_coo() for value in values], dim))


def _array(how: Literal["stack", "concatenate"], values: Sequence[Any], dim: int) -> Any:
    """Return values joined to a numpy array by the function `how` of numpy.

    Raises TypeError if the result would be an array of Python objects, although no value is an
    array.
    """
    import numpy as np  # a dependency of nbdist, imported only if needed

    if any(isinstance(value, np.ma.MaskedArray) for value in values):
        return getattr(np.ma, how)([*values], dim)  # keeps the mask, unlike the functions of `np`
    made = getattr(np, how)([*values], dim)
    if made.dtype == object and not any(isinstance(value, np.ndarray) for value in values):
        raise TypeError(f"{type_name(values[0])} makes no array")
    return made


def _library_of(library: str, kind: str, values: Sequence[Any]) -> ModuleType | None:
    """Return the library if all values are of its class `kind`; else None."""
    if all(_is_a(value, library, kind) for value in values):
        return sys.modules[library]
    return None


def _is_a(value: Any, library: str, *kinds: str) -> bool:
    """Return True if the value is of one of these classes of a library that was imported."""
    module = sys.modules.get(library)
    return any(isinstance(value, getattr(module, kind, ())) for kind in kinds)


def _shape_text(value: Any) -> str:
    nested = _is_a(value, "torch", "Tensor") and value.is_nested
    shape = None if nested else getattr(value, "shape", None)
    return type_name(value) if shape is None else f"{type_name(value)} {tuple(shape)}"
