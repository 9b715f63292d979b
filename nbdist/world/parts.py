"""Values cut into parts, one for each rank, and put together again from what ranks have.

Tensors, arrays, lists, tables: told by what they can do, since the notebook imports none of
their libraries itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise
from types import ModuleType
from typing import Any, Literal

from nbdist.errors import UsageError
from nbdist.output.wording import fold_ranks
from nbdist.wire.unshippable import type_name
from nbdist.words import name_ranks, one_line

Joining = Literal["stack", "cat"]

Part = Callable[[int, int], Any]
"""Gives the elements from one number to another, the latter not among them."""


# --- cutting ----------------------------------------------------------------------------


def bounds(length: int, parts: int) -> list[int]:
    """Say where parts begin and end: as torch.tensor_split, the first ones may have one more."""
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
    """Say what is counted there."""
    if _is_array(value):
        return f"along dimension {dim or 0}"
    return "elements" if isinstance(value, list | tuple) else "rows"


def _is_array(value: Any) -> bool:
    return _is_a(value, "torch", "Tensor") or _is_a(value, "numpy", "ndarray")


def _cutter(name: str, value: Any, dim: int | None) -> tuple[int, Part]:
    """Say how many elements there are, and how to have some of them."""
    if _is_array(value):
        return _cutter_of_array(name, value, dim or 0)
    if dim:
        raise UsageError(f"`{name}` ({type_name(value)}) has no dimension {dim} to split.")
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return len(value), lambda start, end: value[start:end]
    if hasattr(value, "iloc"):  # DataFrame and Series of pandas
        return len(value), lambda start, end: value.iloc[start:end]
    if hasattr(value, "select") and hasattr(value, "__len__"):  # Dataset of Hugging Face
        return len(value), lambda start, end: _rows_of(value, start, end)
    raise UsageError(
        f"`{name}` ({type_name(value)}) cannot be split: use a tensor, an array, a list or "
        f"tuple, a DataFrame or Series, a Dataset, or `list(...)` of it."
        ""
    )


def _cutter_of_array(name: str, value: Any, dim: int) -> tuple[int, Part]:
    dims = len(value.shape)
    if not -dims <= dim < dims:
        shape = tuple(value.shape)
        raise UsageError(f"`{name}` of shape {shape} has no dimension {dim} to split.")
    before = (slice(None),) * (dim % dims)
    # What numpy has in pieces would be copied into the pickle, and from there again.
    whole = _numpy().ascontiguousarray if before and _is_a(value, "numpy", "ndarray") else None

    def part(start: int, end: int) -> Any:
        shown = value[(*before, slice(start, end))]
        return whole(shown) if whole else shown

    return int(value.shape[dim]), part


def _rows_of(data: Any, start: int, end: int) -> Any:
    """Select rows of a data set; copied where it is in memory, as pyarrow would send all of it."""
    rows = data.select(range(start, end))
    if rows.cache_files:  # its pickle names the file
        return rows
    arrow, datasets = sys.modules["pyarrow"], sys.modules["datasets"]
    table = rows.with_format("arrow")[:].combine_chunks()  # of shuffled rows each is one
    sink = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    copy = datasets.table.InMemoryTable(arrow.ipc.open_stream(sink.getvalue()).read_all())
    looks = {**rows.format}
    looks |= looks.pop("format_kwargs", {})
    return datasets.Dataset(copy, info=rows.info, split=rows.split).with_format(**looks)


# --- putting together -------------------------------------------------------------------


def join(how: Joining, name: str, values: Mapping[int, Any], dim: int = 0) -> Any:
    """Make one of the ranks' values, in their order: stacked along a new dimension, or end to end.

    Tensors make a tensor, tables a table, lists end to end a list, all else an array.
    UsageError where they do not fit together.
    """
    kinds = fold_ranks({rank: _shape_text(value) for rank, value in values.items()})
    try:
        return (_stacked if how == "stack" else _end_to_end)([*values.values()], dim)
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        has = [f"{kind} on {name_ranks(ranks)}" for kind, ranks in kinds.items()]
        other = ", or `--cat`" if how == "stack" and len(has) > 1 else ""
        raise UsageError(
            f"`{name}` cannot be put together by `--{how}` ({one_line(str(error), 100)}): "
            f"{', '.join(has)}. Gather the list instead{other}."
        ) from None


def _stacked(values: Sequence[Any], dim: int) -> Any:
    if torch := _library_of("torch", "Tensor", values):
        return torch.stack([*values], dim)
    return _numpy().stack([*values], dim)


def _end_to_end(values: Sequence[Any], dim: int) -> Any:
    first = values[0]
    if torch := _library_of("torch", "Tensor", values):
        return torch.cat([*values], dim)
    if pandas := _library_of("pandas", "DataFrame", values) or _library_of(
        "pandas", "Series", values
    ):
        return pandas.concat([*values], axis=dim)
    if datasets := _library_of("datasets", "Dataset", values):
        return datasets.concatenate_datasets([*values])
    if all(type(value) is type(first) for value in values) and type(first) in (list, tuple):
        return type(first)(chain.from_iterable(values))
    return _numpy().concatenate([*values], dim)


def _numpy() -> ModuleType:
    import numpy as np  # torch needs it too

    return np


def _library_of(library: str, kind: str, values: Sequence[Any]) -> ModuleType | None:
    """Return the library where all values are of this kind of it."""
    if all(_is_a(value, library, kind) for value in values):
        return sys.modules[library]
    return None


def _is_a(value: Any, library: str, kind: str) -> bool:
    found = getattr(sys.modules.get(library), kind, None)
    return found is not None and isinstance(value, found)


def _shape_text(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type_name(value) if shape is None else f"{type_name(value)} {tuple(shape)}"
