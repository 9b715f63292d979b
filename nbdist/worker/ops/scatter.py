"""A part of a value of the notebook's, of which each rank gets its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nbdist.values.payload import Payload

if TYPE_CHECKING:
    from nbdist.worker.op import Context


def take(context: Context, name: str, parts: Mapping[int, Payload]) -> None:
    """Take this rank's part, for `bind`; those of others are not even opened."""
    part = context.open(parts[context.rank])
    context.namespace.take({name: part}, context.task_id)


def bind(context: Context) -> None:
    """Bind the name to the part, which is the rank's own from now on."""
    context.bound |= context.namespace.bind_taken()
