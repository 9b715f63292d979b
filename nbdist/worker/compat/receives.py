"""Ends gloo's waits for a message, as the C++ in torch can and its Python cannot.

The end of the connections, which ends all other waits in gloo, does not reach a wait for a
message from any rank: it belongs to none of them.  C++ has a method for it,
`RecvWork::abort`, which torch exports and Python's `Work` lacks (torch 2.13 and 2.14).  It
is called only where the object behind a `Work` says by its table of virtual methods that it
is a `RecvWork`.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

import torch
import torch.distributed as dist

LIBRARY = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
ABORT_RECEIVE = "_ZN4c10d16ProcessGroupGloo8RecvWork5abortEv"
RECEIVES = "_ZTVN4c10d16ProcessGroupGloo8RecvWorkE"

WORD = ctypes.sizeof(ctypes.c_void_p)
HEAD = object.__basicsize__
"""Where an object that pybind11 has made holds the address of the one in C++."""

FIRST_METHOD = 2 * WORD
"""Objects point there into their class's table: first come an offset and the type."""


@cache
def _receives() -> tuple[ctypes._NamedFuncPointer, int] | None:
    """Find `RecvWork::abort`, and what every `RecvWork` begins with; None where missing."""
    try:
        library = ctypes.CDLL(LIBRARY)
        table = ctypes.addressof(ctypes.c_char.in_dll(library, RECEIVES))
        abort = library[ABORT_RECEIVE]
    except (OSError, AttributeError, ValueError):
        return None
    abort.argtypes, abort.restype = [ctypes.c_void_p], None
    return abort, table + FIRST_METHOD


def can_end_receives() -> bool:
    """Say whether this torch has what `end_receive` needs."""
    return _receives() is not None


def end_receive(work: dist.Work) -> bool:
    """Have a receive of gloo's that is waited for, or will be, return False; from any thread.

    False where it is none of gloo's.
    """
    found = _receives()
    if found is None:
        return False
    abort, begin = found
    address = ctypes.c_void_p.from_address(id(work) + HEAD).value
    if not address or ctypes.c_void_p.from_address(address).value != begin:
        return False
    abort(address)
    return True
