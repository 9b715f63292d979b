"""What a value is made of on this rank, and how far it is from what another rank has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nbdist.wire.ops import Brought, Distance, Looked
from nbdist.worker.digests import comparable, distance, part_of
from nbdist.worker.leaves import MOST_LEAVES, TooManyLeaves, leaves

if TYPE_CHECKING:
    from nbdist.values.payload import Payload
    from nbdist.worker.op import Context


def diff(context: Context, expression: str) -> Looked:
    """Describe each part of the value, with a digest of its contents."""
    try:
        found = leaves(_value(context, expression))
        return Looked({path: part_of(leaf) for path, leaf in found.items()})
    except NameError as error:
        return Looked(missing=error.name or expression)
    except TooManyLeaves:
        return Looked(problem=f"it has more than {MOST_LEAVES:,} parts: compare one of them")
    except Exception as error:  # noqa: BLE001 (the expression and its classes are the user's)
        return Looked(problem=f"{type(error).__name__}: {error}")


def lend(context: Context, expression: str, paths: Sequence[str]) -> Brought:
    """Pack these parts for other ranks to compare theirs with."""
    found = leaves(_value(context, expression))
    return Brought(packed=context.lend({path: comparable(found.get(path)) for path in paths}))


def compare(context: Context, expression: str, packed: Payload) -> dict[str, Distance]:
    """Say how far this rank's parts are from those."""
    found, theirs = leaves(_value(context, expression)), context.open(packed)
    both = {path: (comparable(found.get(path)), tensor) for path, tensor in theirs.items()}
    return {
        path: distance(mine, other)
        for path, (mine, other) in both.items()
        if mine is not None and other is not None and mine.shape == other.shape
    }


def _value(context: Context, expression: str) -> Any:
    return eval(expression, context.names)
