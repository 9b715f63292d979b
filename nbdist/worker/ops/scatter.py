"""A part of a value of the notebook's, of which each rank gets its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nbdist.wire.payload import Payload

if TYPE_CHECKING:
    from nbdist.worker.op import Context


def scatter(context: Context, name: str, parts: Mapping[int, Payload]) -> None:
    """Bind the name to this rank's part; those of others are not even opened."""
    part = context.open(parts[context.rank])
    context.names[name] = part
    context.bound.add(name)
