"""Names copied from one rank to others, through their group and not through the notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from nbdist.errors import BadRanks, UsageError
from nbdist.wire.messages import Sync
from nbdist.wire.outputs import NAME_PROBLEM, Failure

if TYPE_CHECKING:
    from nbdist.world.running import RunningCell
    from nbdist.world.world import World


def sync(
    world: World, names: Sequence[str], source: int, ranks: Sequence[int] | None
) -> tuple[int, ...]:
    """Copy them; the ranks that have got them.  All ranks take part, as in any collective."""
    if not names:
        raise UsageError("`%dist_sync`: which names? `%dist_sync model opt --from 0`.")
    if bad := [name for name in names if not name.isidentifier()]:
        raise UsageError(f"`%dist_sync {bad[0]}`: a name is copied, not an expression.")
    if not world.can_free and world.state.has_workers:
        raise UsageError(
            "`%dist_sync` copies through the process group, and these workers have none "
            "(`--backend none`)."
        )
    for rank in (source, *(ranks or ())):
        if not 0 <= rank < world.size:
            raise BadRanks(str(rank), world.size, f"there is no rank {rank}")
    to = None if ranks is None else tuple(rank for rank in ranks if rank != source)
    orders = Sync(tuple(dict.fromkeys(names)), source, to)
    running = world.submit(replace(world.cell(""), sync=orders))
    running.wait()
    _check(running)
    got = tuple(
        track.rank
        for track in running.transcript
        if track.done is not None and track.done.bound >= {*names}
    )
    for rank in got:
        world.losses.give_back(rank, names)
    return got


def _check(running: RunningCell) -> None:
    error = running.error()
    if error is None:
        return
    for rank, failure in running.transcript.errors.items():
        if isinstance(failure, Failure) and failure.name == NAME_PROBLEM:
            raise UsageError(f"`%dist_sync`, rank {rank}: {failure.message}")
    raise error
