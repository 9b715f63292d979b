"""Where tensors and arrays lie in memory: their bounds, and the memory that they are views of.

It needs neither torch nor numpy: it is called for objects of the library that is there.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any


def has_plain_memory(torch: Any, tensor: Any) -> bool:
    """Return True if a tensor is memory with a shape, and not of a class of its own."""
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
    """Return True for numpy's arrays, and for those of other classes that are pickled alike."""
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
    """Return the attributes of an array whose class the user has made."""
    return dict(getattr(value, "__dict__", {})) if type(value).__module__ == "__main__" else {}


def span_of_tensor(data: Any) -> tuple[int, int]:
    """Return the addresses where a tensor that is not empty begins and ends."""
    start = data.data_ptr()
    if data.is_contiguous():
        return start, start + data.nbytes
    steps = (step * (size - 1) for size, step in zip(data.shape, data.stride(), strict=True))
    return start, start + (int(sum(steps)) + 1) * data.element_size()


def span_of_array(value: Any) -> tuple[int, int]:
    """Return the addresses where a numpy array that is not empty begins and ends."""
    at = value.__array_interface__["data"][0]
    steps = [step * (size - 1) for size, step in zip(value.shape, value.strides, strict=True)]
    below = sum(step for step in steps if step < 0)
    above = sum(step for step in steps if step > 0)
    return at + below, at + above + value.itemsize


def is_scattered(data: Any, root: tuple[int, int], start: int, end: int) -> bool:
    """Return True if a tensor shows only a few elements, far apart, of big memory."""
    if root[1] - root[0] <= 1 << 20:
        return False
    shown = data.element_size()
    for size, step in zip(data.shape, data.stride(), strict=True):
        shown *= 1 if step == 0 else size
    return bool(2 * shown < end - start and 2 * shown < root[1] - root[0])


def root_of_array(
    torch: Any, array: Any, span: tuple[int, int]
) -> tuple[tuple[int, int], Callable[[], Any]]:
    """Return the bounds of the memory that an array is a view of, and how to find its owner."""
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


def memory_at(start: int, size: int) -> memoryview:
    """Return the memory at an address, without keeping it alive."""
    return memoryview((ctypes.c_char * size).from_address(start)).cast("B")
