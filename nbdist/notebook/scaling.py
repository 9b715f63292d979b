"""`%dist_scale` and `%dist_sync` at a desk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nbdist.errors import UsageError, WorldNotStarted, count, name_ranks
from nbdist.notebook.desk import ranks_of
from nbdist.world.scaling import parse_size, scaled_text

if TYPE_CHECKING:
    from nbdist.notebook.desk import Desk


def scale(desk: Desk, text: str) -> None:
    """Have as many workers as the text says, and say so."""
    world, display = desk.world, desk.display()
    if world is None:
        raise WorldNotStarted("`%dist_scale`")
    before = world.size
    display.wait_for(f"world {before} -> {parse_size(text, before)} …")
    try:
        world.scale(text)
    finally:
        desk.ledger.forget(world.losses.take_replaced())
    if world.size == before:
        display.say(f"there are {count(before, 'worker')} already")
        return
    if world.warning:
        display.note(world.warning)
    display.say(scaled_text(world, before))


def sync(desk: Desk, names: Sequence[str], source: str, ranks: str | None) -> None:
    """Copy names between ranks, and say who has got them."""
    world, display = desk.world, desk.display()
    if world is None:
        raise WorldNotStarted("`%dist_sync`")
    sources = ranks_of(source, world)
    if len(sources) != 1:
        raise UsageError(f"`%dist_sync --from {source}`: it takes one rank to copy from.")
    to = None if ranks is None else ranks_of(ranks, world)
    listed = ", ".join(names)
    display.wait_for(f"copying {listed} …")
    try:
        got = world.sync(names, sources[0], to)
    finally:
        desk.ledger.forget(world.losses.take_replaced())
    desk.ledger.bound_on_workers(names, {sources[0], *got})
    if got:
        display.say(f"{listed}: rank {sources[0]} -> {name_ranks(got)}")
    else:
        display.say(f"all ranks have {listed} already; `-r all` copies to all of them")
