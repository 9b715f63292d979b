"""How CPython keeps the calls of a thread, and where, for who reads them from outside.

The numbers are offsets of members of structs in its headers: _ts and _PyCFrame
(cpython/pystate.h), _PyInterpreterFrame (internal/pycore_frame.h) and PyCodeObject
(cpython/code.h).  They are the same in all releases of a minor version.  A
build whose objects begin otherwise, as those without a GIL, is noticed by the reader: nothing
in such memory is of the type that it should be.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import TypeVar

from nbdist.wire.views import CallLayout

Result = TypeVar("Result")

OFFSETS = {
    # holder, call; code, previous, instruction, owner; file, name, first_line, lines
    (3, 11): ((56, 8), (32, 48, 56, 69), (112, 120, 72, 136)),
    (3, 12): ((56, 0), (0, 8, 56, 70), (112, 120, 68, 136)),
    (3, 13): ((0, 72), (0, 8, 56, 70), (112, 120, 68, 136)),
}


def call_layout() -> CallLayout | None:
    """Say where the calls of this thread are; None for a Python that is not known."""
    if sys.implementation.name != "cpython" or sys.version_info[:2] not in OFFSETS:
        return None
    state, call, code = OFFSETS[sys.version_info[:2]]
    this_thread = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyThreadState_Get", ctypes.pythonapi))
    return CallLayout(
        this_thread(),
        id(CodeType),
        id(str),
        *(*state, *call, *code),
        instructions=CodeType.__basicsize__,
        # After the head: nothing and its end, or a letter and its end with 2 bytes each.
        ascii=sys.getsizeof("") - 1,
        other=sys.getsizeof(chr(256)) - 4,
    )


# --- frames of other threads ------------------------------------------------------------------


def innermost_frames() -> dict[int, FrameType]:
    """Give the innermost frame of each thread, by its identifier."""
    return _uncollected(sys._current_frames)


def outer_frame(frame: FrameType) -> FrameType | None:
    """Give the frame that has called this one, which may be of another thread."""
    return _uncollected(lambda: frame.f_back)


def _uncollected(get: Callable[[], Result]) -> Result:
    """Do what makes a frame object, and have no garbage collected meanwhile.

    In Python 3.11 making one can begin a collection, in which a destructor may let go of the GIL:
    the thread goes on, its call ends, and the object is of memory that is something else by then.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        return get()
    finally:
        if was_on:
            gc.enable()
