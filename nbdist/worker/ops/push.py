"""Names of the notebook, which it has its ranks bind whoever owns them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.values.payload import Payload

if TYPE_CHECKING:
    from nbdist.worker.op import Context


def take(context: Context, packed: Payload) -> None:
    """Take the values by their names, for `bind`."""
    context.namespace.take(context.open(packed), context.task_id)


def bind(context: Context) -> None:
    """Bind them; they are the notebook's."""
    context.namespace.received.note(context.namespace.bind_taken())
