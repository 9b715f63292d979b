"""Where CPython keeps the calls of a thread, for who reads them from outside.

The numbers are offsets of members of structs in its headers: _ts and _PyCFrame
(cpython/pystate.h), _PyInterpreterFrame (internal/pycore_frame.h) and PyCodeObject
(cpython/code.h).  They are the same in all releases of a minor version.  A
build whose objects begin otherwise, as those without a GIL, is noticed by the reader: nothing
in such memory is of the type that it should be.
"""

from __future__ import annotations

import ctypes
import sys
from types import CodeType

from nbdist.wire.call_layout import CallLayout

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
