"""Values that outlive their worker: taken from it before it ends, given to the one after it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from nbdist.wire.payload import Payload, open_payload, pack_frames

if TYPE_CHECKING:
    from nbdist.world.world import World

Kept = dict[int, list[bytes]]
"""By rank, the frames of a pickle, which is not opened here."""


def take(world: World, names: Sequence[str], ranks: Iterable[int]) -> Kept:
    """What these names are on these ranks; raises what a cell raises that cannot bring them."""
    if not names:
        return {}
    running = world.submit(world.cell("", ranks=tuple(ranks), fetch=tuple(names)))
    running.result()
    if error := running.error():
        raise error
    return {
        rank: [bytes(memoryview(frame)) for frame in open_payload(payload)]
        for rank, payload in running.payloads().items()
    }


def give_back(world: World, names: Sequence[str], kept: Kept) -> None:
    """Bind them again; ranks that there are no more are left out."""
    for rank, frames in kept.items():
        if rank < world.size:
            _bind(world, rank, frames)
            world.losses.give_back(rank, names)


def _bind(world: World, rank: int, frames: Sequence[bytes]) -> None:
    payload: Payload
    payload, segment = pack_frames(frames)
    try:
        running = world.submit(world.cell("", ranks=(rank,), names=payload))
        running.result()
    finally:
        if segment is not None:
            segment.close()
    if error := running.error():
        raise error
