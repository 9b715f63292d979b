"""The ops of `%dist_diff`, which run in workers: describe a rank's value, compare it with others.

A value is divided into leaves: a module into its parameters and buffers, an optimizer and any other
object with a `state_dict` into the items of that dict, a list or mapping into its items, and most
other objects into their attributes.

Leaves with equal digests count as equal.  Tensors that differ only in the sign of a zero, or in the
bits of a NaN, have different digests.  `distance` then finds that their numbers are equal.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import pickle
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nbdist.values.digests import digest_bytes
from nbdist.wire.ops import Brought, Distance, Looked, ValueDigest
from nbdist.words import one_line

if TYPE_CHECKING:
    from nbdist.values.payload import Payload
    from nbdist.worker.namespace import Context


def diff(context: Context, expression: str) -> Looked:
    """Return, by path, the digests of a value's leaves, the parts that are not divided.

    `expression` gives the value.  If the value cannot be computed or divided, the result says why.
    """
    try:
        parts = leaves(eval(expression, context.names))
        return Looked({path: part_of(leaf) for path, leaf in parts.items()})
    except NameError as error:
        return Looked(missing=error.name or expression)
    except TooManyLeaves:
        return Looked(problem=f"it has more than {MAX_LEAVES:,} parts: compare one of them")
    except Exception as error:  # noqa: BLE001 (the expression and its classes are the user's)
        return Looked(problem=f"{type(error).__name__}: {error}")


def lend(context: Context, expression: str, paths: Sequence[str]) -> Brought:
    """Return the leaves of this rank's value at `paths`, packed for `compare` on other ranks.

    `expression` gives the value.  In place of leaves that are no numbers, None is packed.
    """
    parts = leaves(eval(expression, context.names))
    return Brought(packed=context.lend({path: comparable(parts.get(path)) for path in paths}))


def compare(context: Context, expression: str, packed: Payload) -> dict[str, Distance]:
    """Return by path how far leaves of this rank's value are from the leaves of another rank.

    `expression` gives the value on this rank, and `packed` has the other rank's leaves.  Leaves
    that this rank lacks, that are no numbers, or that have another shape, are left out.
    """
    parts, other_parts = leaves(eval(expression, context.names)), context.namespace.open(packed)
    both = {path: (comparable(parts.get(path)), tensor) for path, tensor in other_parts.items()}
    return {
        path: distance(mine, other)
        for path, (mine, other) in both.items()
        if mine is not None and other is not None and mine.shape == other.shape
    }


ROW_WORDS, ROWS_AT_ONCE = 1024, 4096
"""How many words of four bytes a row of `fold` has, and how many rows are multiplied at a time.

The products of these rows need 32 MiB.
"""

COMPARED_AT_ONCE = 1 << 18
"""The number of elements compared at a time, so that the results fit into a processor's cache."""

LONGEST_TEXT = 60


def part_of(leaf: Any) -> ValueDigest:
    """Return the type, size and digest of a leaf; the digest is "" if it cannot be compared."""
    if isinstance(leaf, np.ndarray):
        data = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
        kind = f"{leaf.dtype} {leaf.shape}"
        return ValueDigest(kind, digest_bytes(data.data), size=leaf.nbytes, count=leaf.size)
    return _part_of_tensor(leaf) if isinstance(leaf, torch.Tensor) else _part_of_plain(leaf)


def comparable(leaf: Any) -> torch.Tensor | None:
    """Return an array or dense tensor of numbers as a dense tensor; None for any other leaf."""
    if isinstance(leaf, np.ndarray):
        try:
            return torch.from_numpy(np.array(leaf))
        except TypeError:  # torch has no type for dates and texts
            return None
    if isinstance(leaf, torch.Tensor) and _is_dense(leaf):
        return _local(leaf).detach()
    return None


# --- tensors ----------------------------------------------------------------------------


def _part_of_tensor(tensor: torch.Tensor) -> ValueDigest:
    kind, where = f"{str(tensor.dtype)[6:]} {tuple(tensor.shape)}", tensor.device.type
    kind, digest = kind if where == "cpu" else f"{kind} on {where}", ""
    if is_sharded(tensor):
        kind += ", sharded"
    elif tensor.is_sparse:
        kind, both = f"{kind}, sparse", tensor.coalesce()
        digest = digest_of(both.indices()) + digest_of(both.values())
    elif _is_dense(tensor):
        digest = digest_of(_local(tensor))
    size = tensor.numel() * tensor.element_size()
    return ValueDigest(kind, digest, size=size, count=tensor.numel())


def _is_dense(tensor: torch.Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    return is_plain and tensor.device.type != "meta" and not is_sharded(tensor)


def is_sharded(tensor: Any) -> bool:
    """Return True for a DTensor that is not replicated, so that each rank has a part of its own."""
    return not all(place.is_replicate() for place in getattr(tensor, "placements", ()))


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "placements") else tensor
    return local


def digest_of(tensor: torch.Tensor) -> str:
    """Return the digest of a tensor's elements in logical order.

    For a tensor on a GPU, the GPU computes `fold`, and only the result is copied to the CPU.
    """
    data = bytes_of(tensor)
    return digest_bytes((data if data.is_cpu else fold(data).cpu()).numpy().data)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements in logical order, as a tensor on the same device."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def fold(data: torch.Tensor) -> torch.Tensor:
    """Reduce bytes on a device to few numbers, of which the CPU then makes a digest.

    The bytes are laid out as a table of words.  The returned tensor has a weighted sum of each row,
    then the words and bytes after the last full row.  The sums have 2 bytes for each KiB of `data`.

    Each word of a row is multiplied by an odd factor of its own, modulo 2**64.  So a change of one
    word always changes the sum of its row, and changes of several words hardly ever cancel each
    other.
    """
    if data.storage_offset() % 4:
        data = data.clone()
    words, tail = data[: data.numel() // 4 * 4].view(torch.int32), data[data.numel() // 4 * 4 :]
    table = words[: words.numel() // ROW_WORDS * ROW_WORDS].view(-1, ROW_WORDS)
    pieces = (table[at : at + ROWS_AT_ONCE] for at in range(0, len(table), ROWS_AT_ONCE))
    sums = [(rows * _factors(data.device)).sum(1) for rows in pieces]
    return torch.cat([*sums, words[table.numel() :].long(), tail.long()])


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    """Return an odd factor for each word of a row; the factors are the same in all processes."""
    random = np.random.default_rng(20).integers(-(2**63), 2**63 - 1, ROW_WORDS, dtype=np.int64)
    return torch.from_numpy(random | 1).to(device)


# --- how far apart ----------------------------------------------------------------------


def distance(tensor: torch.Tensor, reference: torch.Tensor) -> Distance:
    """Return how far two tensors of equal shape and dtype differ; NaN equals NaN, -0.0 equals 0."""
    flat, other = tensor.reshape(-1), reference.reshape(-1)
    largest, differing, odd = 0.0, 0, 0
    for start in range(0, flat.numel(), COMPARED_AT_ONCE):
        a = flat[start : start + COMPARED_AT_ONCE]
        b = other[start : start + COMPARED_AT_ONCE].to(a.device)
        if torch.equal(a, b):
            continue
        if a.dtype.is_floating_point and a.element_size() < 4:  # torch may lack `!=` for them
            a, b = a.float(), b.float()
        differs = (a != b) & ~((a != a) & (b != b))
        wide = torch.complex128 if a.is_complex() else torch.float64
        apart = (a[differs].to(wide) - b[differs].to(wide)).abs()
        finite = apart[apart.isfinite()]
        largest = max(largest, finite.max().item() if finite.numel() else 0.0)
        differing += int(differs.sum())
        odd += apart.numel() - finite.numel()
    return Distance(float(largest), differing, odd)


# --- everything else --------------------------------------------------------------------


def _part_of_plain(leaf: Any) -> ValueDigest:
    kind = type(leaf).__qualname__
    if isinstance(leaf, Again):
        return ValueDigest("itself again", "=")
    if isinstance(leaf, CALLABLE):
        code = getattr(leaf, "__code__", None)
        description = repr((leaf.__qualname__, code and code.co_code, code and code.co_consts))
        return ValueDigest(kind, _digest_of_text(description), leaf.__qualname__)
    if isinstance(leaf, set | frozenset):
        return ValueDigest(f"{kind} of {len(leaf)}", _digest_of_text(repr(sorted(map(repr, leaf)))))
    if isinstance(leaf, bytes | bytearray | str):
        data = leaf.encode("utf-8", "surrogatepass") if isinstance(leaf, str) else leaf
        text = one_line(repr(leaf[:LONGEST_TEXT]), LONGEST_TEXT)
        return ValueDigest(kind, digest_bytes(data), text, len(data))
    if "__repr__" in {name for each in type(leaf).__mro__[:-1] for name in vars(each)}:
        text = repr(leaf + 0.0 if isinstance(leaf, float) else leaf)  # + 0.0 turns -0.0 into 0.0
        return ValueDigest(kind, _digest_of_text(text), one_line(text, LONGEST_TEXT))
    pickler = pickle.Pickler(file := BytesIO(), 5)
    pickler.fast = True  # no memo: two parts that are one object are pickled like two equal objects
    try:
        pickler.dump(leaf)
    except Exception:  # noqa: BLE001 (a user's __reduce__ can raise anything)
        return ValueDigest(kind, "")
    return ValueDigest(kind, digest_bytes(file.getbuffer()))


def _digest_of_text(text: str) -> str:
    return digest_bytes(text.encode("utf-8", "surrogatepass"))


MAX_LEAVES, MAX_DIFF_DEPTH = 100_000, 60

MIN_ARRAY_LENGTH = 32
"""The least length of a list of numbers that is compared as one array, not number by number."""

ATOMS = (type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, enum.Enum)
WHOLE = (torch.dtype, torch.device, torch.Size, np.dtype, np.generic, type, types.ModuleType)
CALLABLE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
LEAF_TYPES = (torch.Tensor, np.ndarray, *ATOMS, *WHOLE, *CALLABLE, frozenset, set)
"""The types of values that are leaves: they are not divided into parts."""


class TooManyLeaves(Exception):
    """The value has more than `MAX_LEAVES` leaves."""


def leaves(value: Any) -> dict[str, Any]:
    """Divide a value into its leaves; return them by path, such as "layer1.weight" or "['lr']".

    If the value itself is a leaf, its path is "".  Raises TooManyLeaves, and any error that a class
    of the user raises.
    """
    leaf_by_path: dict[str, Any] = {}
    for path, leaf in _walk(value, "", ()):
        leaf_by_path[path] = leaf
        if len(leaf_by_path) > MAX_LEAVES:
            raise TooManyLeaves
    return leaf_by_path


class Again:
    """Stands for a container inside of itself, or for a value that is nested too deep."""


def _walk(value: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    if id(value) in above or len(above) > MAX_DIFF_DEPTH:
        yield path, Again()
        return
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = value.tolist()
    if (numbers := _as_numbers(value)) is not None:
        value = numbers
    steps = None if isinstance(value, LEAF_TYPES) else _steps(value)
    if steps is None:
        yield path, value
        return
    above = *above, id(value)
    for step, part in steps:
        # A path does not begin with a dot: `weight`, not `.weight`.
        yield from _walk(part, path + step if path else step.removeprefix("."), above)


def _steps(value: Any) -> list[tuple[str, Any]] | None:
    """Return (step, part) for each part of a value; a step is a text such as `.weight` or `[0]`.

    The path of a part consists of such steps.  Return None for a value that has no parts.
    """
    match value:
        case torch.nn.Module():
            named = [*value.named_parameters(), *value.named_buffers()]
            return [(f".{name}", part) for name, part in named]
        case Mapping():
            return [(_key(key), part) for key, part in value.items()]
        case tuple() if fields := getattr(value, "_fields", None):
            return [(f".{name}", part) for name, part in zip(fields, value, strict=True)]
        case list() | tuple() | deque():
            return [(f"[{number}]", part) for number, part in enumerate(value)]
    if hasattr(type(value), "to_numpy"):  # such as a DataFrame or a Series of pandas
        index = [(".index", value.index)] if hasattr(value, "index") else []
        if hasattr(value, "columns"):
            return [*((_key(each), value[each].to_numpy()) for each in value.columns), *index]
        return [("", value.to_numpy()), *index]
    if callable(getattr(value, "state_dict", None)):
        return [("." + str(key), part) for key, part in value.state_dict().items()]
    if dataclasses.is_dataclass(value):
        names = [each.name for each in dataclasses.fields(value)]
        return [(f".{name}", getattr(value, name, None)) for name in names]
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict) and attributes:
        return [(f".{name}", part) for name, part in attributes.items()]
    return None


def _key(key: Any) -> str:
    text = repr(key) if isinstance(key, (*ATOMS, tuple)) else f"{type(key).__qualname__} {key}"
    return f"[{text if len(text) <= 60 else text[:57] + '...'}]"


def _as_numbers(value: Any) -> np.ndarray[Any, Any] | None:
    """Return a long list of numbers of one type as an array; None for other values."""
    if type(value) not in (list, tuple) or len(value) < MIN_ARRAY_LENGTH:
        return None
    kinds = {*map(type, value)}
    if len(kinds) != 1 or not kinds <= {bool, int, float, complex}:
        return None
    try:
        array = np.array(value)
    except OverflowError:
        return None
    return None if array.dtype == object else array
