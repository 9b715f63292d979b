"""Names copied from one rank to others, through their group and not through the notebook."""

from __future__ import annotations

from collections.abc import Sequence

from nbdist.errors import BadRanks, UsageError, WorkerError
from nbdist.output.events import NAME_PROBLEM, Failure
from nbdist.wire.task import Call
from nbdist.world.all_or_none import bind
from nbdist.world.names import check_are_free
from nbdist.world.session import Session


def sync(
    session: Session, names: Sequence[str], source: int, ranks: Sequence[int] | None
) -> tuple[int, ...]:
    """Copy them to all ranks that are to have them, or to none; the ranks that have got them.

    All ranks take part, as in any collective.
    """
    if not names:
        raise UsageError("`%dist_sync`: which names? `%dist_sync model opt --from 0`.")
    if bad := [name for name in names if not name.isidentifier()]:
        raise UsageError(f"`%dist_sync {bad[0]}`: a name is copied, not an expression.")
    check_are_free(names, "`%dist_sync`")
    if not session.has_group and session.state.has_workers:
        raise UsageError(
            "`%dist_sync` copies through the process group, and these workers have none "
            "(`--backend none`)."
        )
    for rank in (source, *(ranks or ())):
        if not 0 <= rank < session.size:
            raise BadRanks(str(rank), session.size, f"there is no rank {rank}")
    to = None if ranks is None else tuple(rank for rank in ranks if rank != source)
    wanted = tuple(dict.fromkeys(names))
    take = Call("values.sync", {"wanted": wanted, "source": source, "to": to})
    try:
        running = bind(session, session.task(take), Call("values.bind_synced", {"wanted": wanted}))
    except WorkerError:
        assert session.running is not None
        for rank, failure in session.running.transcript.errors.items():
            if isinstance(failure, Failure) and failure.name == NAME_PROBLEM:
                raise UsageError(f"`%dist_sync`, rank {rank}: {failure.message}") from None
        raise
    return tuple(
        track.rank
        for track in running.transcript
        if track.rank != source and track.done is not None and track.done.bound >= {*names}
    )
