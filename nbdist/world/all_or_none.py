"""Values that the notebook has ranks bind: all of them do, or none does.

In two tasks.  With the first the ranks take the values, which is what takes long, what Stop
ends and what can fail; they have nothing of it then.  Once all have taken them they are told to
bind them, and Stop waits for that: it comes too late.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

from nbdist.output.events import Died
from nbdist.wire.task import Task, Work
from nbdist.world import recovery
from nbdist.world.names import Shipped
from nbdist.world.running import RunningTask
from nbdist.world.session import Session


def binding(
    session: Session, take: Task, work: Work, shipped: Mapping[str, Shipped] | None = None
) -> Iterator[RunningTask]:
    """Yield the two tasks, each to be followed; the second only where nothing ended the first.

        for running in binding(session, take, Call("values.bind_scattered")):
            session.wait(running)
        session.check(running)

    `shipped` is what the names are, where they are the notebook's.  Raises as `Session.submit`.
    """
    taken, bound = session.submit(take), None
    try:
        yield taken
        if not (taken.stops or taken.error()):
            bound = commit(session, work, shipped)
    finally:
        if bound is None and session.state.has_workers:
            session.let_go_of(take, take.ranks)
    if bound is not None:
        yield bound


def commit(
    session: Session, work: Work, shipped: Mapping[str, Shipped] | None = None
) -> RunningTask:
    """Have the ranks of the last task bind what they have taken with it, to be followed.

    Raises what keeps one of them from it, with nothing bound on any.
    """
    taken = session.running
    assert taken is not None
    session.receive_waiting()
    recovery.heal(session)
    session.check_ready()
    before, ranks = taken.crew.pids, taken.task.ranks
    if gone := [rank for rank in ranks if session.pids.get(rank) != before[rank]]:
        died = session.take_replaced()
        lost = Died(None, time.time_ns())
        error = recovery.death(session, {rank: died.get(rank, lost) for rank in gone})
        error.add("Nothing was bound.")
        raise error
    patience = replace(taken.patience, holds_stop=True)
    return session.send(session.task(work, ranks=ranks), patience, shipped)


def bind(session: Session, take: Task, work: Work) -> RunningTask:
    """Do both, and wait; return the last.  Raises its error, or KeyboardInterrupt after Stop."""
    for running in binding(session, take, work):
        session.wait(running)
    session.check(running)
    return running
