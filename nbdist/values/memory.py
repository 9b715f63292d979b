"""Finds out where tensors and arrays are in memory, and of which memory or file they are views.

The notebook and workers use this file.  It needs neither torch nor numpy to be installed: the
functions are called with objects of a library that the caller has imported.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple


def has_plain_memory(torch: Any, tensor: Any) -> bool:
    """Return True if a tensor, or a `Parameter`, is a plain view of memory.

    Return False for other subclasses of `Tensor`, and for sparse, quantized and similar tensors.
    """
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.device.type != "meta"
        and (tensor.numel() == 0 or tensor.data_ptr() != 0)
    )


def is_plain_array(value: Any) -> bool:
    """Return True for a numpy array, but not if its class has methods of its own for pickling."""
    numpy = sys.modules.get("numpy")
    kind = type(value)
    return (
        numpy is not None
        and issubclass(kind, numpy.ndarray)
        and kind.__reduce__ is numpy.ndarray.__reduce__
        and kind.__reduce_ex__ is numpy.ndarray.__reduce_ex__
        and kind.__setstate__ is numpy.ndarray.__setstate__
    )


def attributes_of_array(value: Any) -> dict[str, Any]:
    """Return the attributes of an array whose class `__main__` defines; {} for any other array."""
    return dict(getattr(value, "__dict__", {})) if type(value).__module__ == "__main__" else {}


def span_of_tensor(data: Any) -> tuple[int, int]:
    """Return the address of the first byte of a tensor, and the address after its last byte.

    The tensor must have elements.
    """
    start = data.data_ptr()
    if data.is_contiguous():
        return start, start + data.nbytes
    steps = (step * (size - 1) for size, step in zip(data.shape, data.stride(), strict=True))
    return start, start + (int(sum(steps)) + 1) * data.element_size()


def span_of_array(value: Any) -> tuple[int, int]:
    """Return the address of the lowest byte of a numpy array, and the one after the highest byte.

    The array must have elements.
    """
    at = value.__array_interface__["data"][0]
    steps = [step * (size - 1) for size, step in zip(value.shape, value.strides, strict=True)]
    below = sum(step for step in steps if step < 0)
    above = sum(step for step in steps if step > 0)
    return at + below, at + above + value.itemsize


def is_scattered(data: Any, root: tuple[int, int], start: int, end: int) -> bool:
    """Return True if a tensor shows less than half of the bytes from its beginning to its end.

    `root` has the bounds of the memory of which the tensor is a view.  False for memory of 1 MiB or
    less, which is sent as a whole.
    """
    if root[1] - root[0] <= 1 << 20:
        return False
    shown = data.element_size()
    for size, step in zip(data.shape, data.stride(), strict=True):
        shown *= 1 if step == 0 else size
    return bool(2 * shown < end - start and 2 * shown < root[1] - root[0])


def root_of_array(
    torch: Any, array: Any, span: tuple[int, int]
) -> tuple[tuple[int, int], Callable[[], Any]]:
    """Return (bounds, make_ref) for the memory of which an array is a view.

    If the bounds of the memory are unknown, `bounds` is `span`, the bounds of the array itself.
    `make_ref()` returns a weak reference to the object that keeps the memory alive.  `torch` is the
    module, or None if torch was not imported.
    """
    numpy, owner = sys.modules["numpy"], array
    while isinstance(owner.base, numpy.ndarray):
        owner = owner.base
    base = owner.base
    if torch is not None and isinstance(base, torch.Tensor):
        storage = base.untyped_storage()
        start = storage.data_ptr()
        return (start, start + storage.nbytes()), partial(weakref.ref, storage)
    if owner is array and base is not None:
        return span, partial(weakref.ref, array)
    start = owner.__array_interface__["data"][0]
    if owner.flags.forc:
        return (start, start + owner.nbytes), partial(weakref.ref, owner)
    return span, partial(weakref.ref, owner)


class FileSpan(NamedTuple):
    """The part of a file that a `numpy.memmap` spans."""

    path: str
    inode: int
    start: int
    size: int
    at: int  # the place of the array's first element, in bytes from `start`

    def exists(self) -> bool:
        """Return True if this machine has the same file at the path, with the part in it.

        A file with another inode is another file.
        """
        try:
            status = os.stat(self.path)
        except OSError:
            return False
        return status.st_ino == self.inode and status.st_size >= self.start + self.size


def file_span_of(value: Any) -> FileSpan | None:
    """Return the part of a file that a `numpy.memmap` spans; None for other values.

    None also for an empty memory map, and for mode "c", whose changes do not reach the file.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None or type(value) is not numpy.memmap or not (value.size and value.filename):
        return None
    start, end = span_of_array(value)
    mapping = _shared_file_at(start, end)
    if mapping is None:
        return None
    at = value.__array_interface__["data"][0] - start
    return FileSpan(os.fspath(value.filename), *mapping, end - start, at)


def is_of_file(value: Any) -> bool:
    """Return True if a value is a `numpy.memmap` whose file is still at its path."""
    span = file_span_of(value)
    return span is not None and span.exists()


def reduce_to_file(value: Any) -> Any:
    """Reduce a `numpy.memmap` to its place in its file, if the file is still at its path.

    Return what `__reduce__` would return, or NotImplemented if `is_of_file` is False for the value.
    """
    return reduce_file_array(value) if is_of_file(value) else NotImplemented


def reduce_file_array(value: Any) -> Any:
    """Reduce a `numpy.memmap` to its place in its file, so that the receiver maps the same file.

    Return what `__reduce__` would return, or NotImplemented if `file_span_of` returns None for the
    value.  This function does not check whether the file is still at its path.
    """
    if (span := file_span_of(value)) is None:
        return NotImplemented
    return map_file, (span, value.dtype, value.shape, value.strides, bool(value.flags.writeable))


def map_file(
    span: FileSpan,
    dtype: Any,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    writeable: bool,  # noqa: FBT001 (arguments of a pickle have no names)
) -> Any:
    """Make a `numpy.memmap` of a part of a file; raises OSError if the path has no such file."""
    import numpy as np

    span = FileSpan(*span)
    if not span.exists():
        raise OSError(
            f"it is a memory map of the notebook's file {span.path}, which is not there or is "
            "another file: map a file of this machine in the cell"
        )
    mode: Any = "r+" if writeable else "r"
    whole: Any = np.memmap(span.path, np.uint8, mode, span.start, (span.size,))
    array = np.ndarray.__new__(np.memmap, shape, dtype, whole, span.at, strides)
    vars(array).update(vars(whole))  # the file's name, mode and offset, and the mapping
    return array


def _shared_file_at(start: int, end: int) -> tuple[int, int] | None:
    """Return inode and offset of the file that is mapped as shared memory at these addresses.

    Return None if no file is mapped there, if its mapping is private, or if the addresses are not
    all in one mapping.
    """
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            addresses, access, offset, _, inode, *_ = line.split(maxsplit=5)
            first, last = (int(each, 16) for each in addresses.split("-"))
            if first <= start < last:
                is_whole = end <= last and access.endswith("s") and inode != "0"
                return (int(inode), int(offset, 16) + start - first) if is_whole else None
    return None


EXPANDED_FROM = 1 << 20  # bytes; a smaller array is pickled by numpy, with repeated elements


def reduce_expanded(value: Any) -> Any:
    """Reduce a big read-only array that repeats elements, as `numpy.broadcast_to` makes it.

    Return what `__reduce__` would return, with each repeated element once.  Return NotImplemented
    for any other array, and for an array of less than `EXPANDED_FROM` bytes.
    """
    numpy: Any = sys.modules["numpy"]
    is_wanted = type(value) is numpy.ndarray and not value.flags.writeable
    if not is_wanted or value.nbytes < EXPANDED_FROM or 0 not in value.strides:
        return NotImplemented
    once = value[tuple(slice(1) if step == 0 else slice(None) for step in value.strides)]
    return numpy.broadcast_to, (once.copy(), value.shape)


def memory_at(start: int, size: int) -> memoryview:
    """Return a view of the memory at an address; the caller must keep the memory alive."""
    return memoryview((ctypes.c_char * size).from_address(start)).cast("B")
