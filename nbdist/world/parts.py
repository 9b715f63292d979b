"""Values cut into parts, one for each rank, and put together again from what ranks have.

The notebook imports none of the libraries of tensors, arrays and tables itself.
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

Part = Callable[[int, int], Any]
"""Returns the elements from one number to another, the latter not among them."""


def bounds(length: int, parts: int) -> list[int]:
    """Return where parts begin and end: as torch.tensor_split, the first may have one more."""
    each, more = divmod(length, parts)
    return [number * each + min(number, more) for number in range(parts + 1)]


def split(name: str, value: Any, parts: int, dim: int | None = None) -> list[Any]:
    """Cut a value along a dimension, by default the first; UsageError for what has none.

    Tensors' and arrays' parts are views of them; a table's rows are cut, and a data set's.
    """
    length, part = _cutter(name, value, dim)
    return [part(start, end) for start, end in pairwise(bounds(length, parts))]


def length_of(part: Any, dim: int | None = None) -> int:
    """Count the elements of a part, along the dimension that was cut."""
    return int(part.shape[dim or 0]) if _is_array(part) else len(part)


def unit_of(value: Any, dim: int | None = None) -> str:
    """Name what `length_of` counts."""
    if _is_array(value):
        return f"along dimension {dim or 0}"
    return "elements" if isinstance(value, list | tuple) else "rows"


def _is_array(value: Any) -> bool:
    if _is_a(value, "torch", "Tensor"):
        return not value.is_nested
    return _is_a(value, "numpy", "ndarray") or _is_sparse_array(value)


def _is_sparse_array(value: Any) -> bool:
    return _is_a(value, "scipy.sparse", "spmatrix", "sparray")


def _cutter(name: str, value: Any, dim: int | None) -> tuple[int, Part]:
    """Return the number of elements, and what returns some of them."""
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
    if hasattr(value, "iloc"):  # DataFrame and Series of pandas
        return len(value), lambda start, end: value.iloc[start:end]
    if _is_a(value, "datasets", "Dataset"):
        return len(value), lambda start, end: _rows_of(value, start, end)
    raise UsageError(
        f"`{name}` ({type_name(value)}) cannot be split: use a tensor, an array, a list or "
        "tuple, a DataFrame or Series, a table of pyarrow, a Dataset of Hugging Face's "
        "`datasets`, or `list(...)` of it."
    )


def _cutter_of_array(name: str, value: Any, dim: int) -> tuple[int, Part]:
    dims = len(value.shape)
    if not -dims <= dim < dims:
        shape = tuple(value.shape)
        raise UsageError(f"`{name}` of shape {shape} has no dimension {dim} to split.")
    if _is_a(value, "torch", "Tensor") and value.layout is not sys.modules["torch"].strided:
        return int(value.shape[dim]), lambda start, end: _sparse_part(name, value, dim, start, end)
    before = (slice(None),) * (dim % dims)
    if _is_sparse_array(value):
        rows = value.tocsr()  # of which parts can be taken
        return value.shape[dim], lambda start, end: rows[(*before, slice(start, end))].asformat(
            value.format
        )
    # What numpy has in pieces would be copied into the pickle, and from there again.
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
    """Copy rows of a table of pyarrow's, whose pickle has all that they are a part of."""
    arrow = sys.modules["pyarrow"]
    sink = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write(table)
    return arrow.ipc.open_stream(sink.getvalue()).read_all()


def _rows_of(data: Any, start: int, end: int) -> Any:
    """Select rows of a data set; copied where it is in memory, as pyarrow would send all of it."""
    rows = data.select(range(start, end))
    if rows.cache_files:  # its pickle names the file
        return rows
    datasets = sys.modules["datasets"]
    table = rows.with_format("arrow")[:].combine_chunks()  # of shuffled rows each is one
    copy = datasets.table.InMemoryTable(_arrow_copy(table))
    looks = {**rows.format}
    looks |= looks.pop("format_kwargs", {})
    return datasets.Dataset(copy, info=rows.info, split=rows.split).with_format(**looks)


def join(how: Joining, name: str, values: Mapping[int, Any], dim: int = 0) -> Any:
    """Make one of the ranks' values, in their order: stacked along a new dimension, or end to end.

    Tensors make a tensor, tables a table, lists end to end a list, numbers an array.
    UsageError where they do not fit together.
    """
    kinds = fold_ranks({rank: _shape_text(value) for rank, value in values.items()})
    polars = getattr(sys.modules.get("polars"), "exceptions", None)
    own = (polars.PolarsError,) if polars else ()
    parts = [*values.values()]
    try:
        if how == "cat":
            return _end_to_end(parts, dim)
        if torch := _library_of("torch", "Tensor", parts):
            return _joined_tensors(torch.stack, parts, dim)
        return _array("stack", parts, dim)
    except (ValueError, TypeError, RuntimeError, IndexError, *own) as error:
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
    """Make one array; TypeError where that would be an array of objects."""
    import numpy as np  # torch needs it too

    if any(isinstance(value, np.ma.MaskedArray) for value in values):
        return getattr(np.ma, how)([*values], dim)  # which keeps what is masked
    made = getattr(np, how)([*values], dim)
    if made.dtype == object and not any(isinstance(value, np.ndarray) for value in values):
        raise TypeError(f"{type_name(values[0])} makes no array")
    return made


def _library_of(library: str, kind: str, values: Sequence[Any]) -> ModuleType | None:
    """Return the library where all values are of this kind of it."""
    if all(_is_a(value, library, kind) for value in values):
        return sys.modules[library]
    return None


def _is_a(value: Any, library: str, *kinds: str) -> bool:
    """Return True if it is of one of these classes of a library that was imported."""
    module = sys.modules.get(library)
    return any(isinstance(value, getattr(module, kind, ())) for kind in kinds)


def _shape_text(value: Any) -> str:
    nested = _is_a(value, "torch", "Tensor") and value.is_nested
    shape = None if nested else getattr(value, "shape", None)
    return type_name(value) if shape is None else f"{type_name(value)} {tuple(shape)}"
