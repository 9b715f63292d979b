"""Whether a magic's value is used: `x = %dist_gather y` is the list, `%dist_gather y` shows none.

IPython makes the same call of both, and shows what the last one of a cell returns.
"""

from __future__ import annotations

import dis
import inspect

BETWEEN = ("nbdist.", "IPython.")
"""Modules whose calls stand between the cell's own code and the magic."""

UNUSED = {("POP_TOP", ""), ("PRINT_EXPR", ""), ("CALL_INTRINSIC_1", "INTRINSIC_PRINT")}
"""What CPython does next with a value that is dropped, or shown as the last one of a cell."""


def is_used() -> bool:
    """Say whether the code that has called IPython, or us, goes on with what that returns."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(BETWEEN):
        frame = frame.f_back
    if frame is None:
        return True
    instructions = dis.get_instructions(frame.f_code)
    following = (each for each in instructions if each.offset > frame.f_lasti)
    after = next(following, None)
    return after is None or (after.opname, after.argrepr) not in UNUSED
