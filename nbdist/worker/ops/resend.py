"""What the notebook asks before it sends again what its ranks have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.worker.op import Context


def changed(context: Context, names: Sequence[str]) -> list[str]:
    """List those of these variables that this rank has changed since they were sent to it."""
    return sorted(context.namespace.received.changed(names))
