"""Has a worker say what its memory is used for, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.worker.memory_use import measure

if TYPE_CHECKING:
    from nbdist.wire.ops import Memory
    from nbdist.worker.op import Context

SEARCH_SECONDS = 2.0
"""For names: of a list of a million tensors what was found until then."""


def memory(context: Context) -> Memory:
    """Measure memory, its peak since the last cell began, and what names and tracebacks hold."""
    return measure(context.shell, context.peaks, SEARCH_SECONDS)
