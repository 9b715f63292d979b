"""Restarts all workers or some, and changes their number; `--keep` carries variables over.

Runs in the notebook's process, on the thread that made the world.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from nbdist import errors
from nbdist.errors import UsageError, WorldNotStarted
from nbdist.output.events import TO_BE_RESTARTED
from nbdist.topology import RankSelection
from nbdist.values.payload import open_payload
from nbdist.wire.messages import Heal, Kill, Scale
from nbdist.wire.work import OpCall
from nbdist.wire.world_facts import Renumbering
from nbdist.words import name_ranks
from nbdist.world import dispatch, inbox, lifecycle, recovery
from nbdist.world.agents import module_of
from nbdist.world.engine import Engine, KeptVariables
from nbdist.world.name_table import list_names
from nbdist.world.outcome_texts import broken_error
from nbdist.world.spec import parse_size, scaled

RANKS_KILLED_TIMEOUT = 60.0  # seconds for killed ranks to end; long, as the machine may be busy


def restart(
    engine: Engine, n: int | str | None = None, keep: Sequence[str] = (), **changes: Any
) -> tuple[str, ...]:
    """End all workers and start new ones, which get the variables in `keep`; see `World.restart`.

    Returns the names of the variables that were kept.  If the start fails or is interrupted, the
    old options are valid again, and this process keeps the variables for the next restart.  Raises
    the error of a set-up cell that failed in the new workers.
    """
    kept, table = engine.kept, engine.rank_table
    if engine.state.has_workers or not kept.names:
        kept = KeptVariables(tuple(keep), fetch_kept(engine, keep, table.everyone))
    elif lacking := [name for name in keep if name not in kept.names]:
        have = list_names(kept.names)
        raise UsageError(f"`--keep`: there is no `{lacking[0]}`; kept from before: {have}.")
    # Configured again, since the notebook's environment, path or folder may have changed.
    before, size = engine.config, engine.size
    after = before.with_changes(n, **changes)
    if is_moved := after.agent_options != before.agent_options:
        module_of(after.launcher_name)  # raises UsageError before any worker is ended
    engine.configure(after, name=table.spec.name)
    try:
        lifecycle.start_anew(engine, agent_too=is_moved)
    except BaseException:  # also KeyboardInterrupt by Stop
        if not engine.state.has_workers:
            engine.kept = kept
            engine.configure(before, name=table.spec.name)
        raise
    # The new size is known only now, because other machines can change it during the start.
    engine.setup.renumber(Renumbering(size, engine.size, {}))
    try:
        error = recovery.replay(engine, table.everyone)
    except BaseException:  # also KeyboardInterrupt by Stop
        if engine.is_whole:
            dispatch.bind_kept(engine, kept.frames)
        raise
    if engine.state.has_workers:
        dispatch.bind_kept(engine, kept.frames)
    else:  # such as after a death in a set-up cell, if the policy is "stop"
        engine.kept = kept
    if error:
        raise error
    return kept.names


def replace(engine: Engine, ranks: RankSelection, keep: Sequence[str] = ()) -> None:
    """Restart ranks in place; they get the variables in `keep` back (see `World.replace`).

    If the ranks cannot form a group, raises an error; `dispatch.make_whole` binds the variables
    later, once it has formed the group.
    """
    inbox.receive_waiting(engine)
    ranks = engine.select_ranks(ranks)
    others = set(engine.task_table.unfinished) - set(ranks)
    if others or not (engine.is_whole or engine.is_broken):
        dispatch.check_ready(engine)
    # `engine.kept` has variables if an earlier restart has failed.
    kept, ending, table = engine.kept, {*ranks}, engine.rank_table
    if keep:
        kept = KeptVariables(tuple(keep), fetch_kept(engine, keep, ranks))
    recovery.record_changes(engine, table.everyone)
    engine.kept = kept
    inbox.ask(engine, Kill((*ending,), TO_BE_RESTARTED))
    deadline = time.monotonic() + RANKS_KILLED_TIMEOUT
    while engine.connection.lost is None and (alive := ending - table.dead.keys()):
        if time.monotonic() > deadline:
            seconds = f"{RANKS_KILLED_TIMEOUT:.0f} s"
            table.problem = f"{name_ranks(alive)} did not end within {seconds}"
            raise broken_error(engine)
        inbox.receive(engine, max(0.0, deadline - time.monotonic()))
    if engine.is_broken:
        recovery.regroup(engine, Heal())
    _check_formed(engine)
    dispatch.make_whole(engine)


def scale(engine: Engine, n: int | str | None = None, ranks: RankSelection | None = None) -> None:
    """Change the number of workers to `n`, or keep only these ranks; see `World.scale`."""
    inbox.receive_waiting(engine)
    table = engine.rank_table
    engine.hooks.wait_until_free(table.everyone)
    if engine.task_table.is_idle:
        dispatch.make_whole(engine)
    if not engine.state.has_workers:
        raise engine.connection.lost or WorldNotStarted("`%dist_scale`")
    dispatch.check_ready(engine)
    before = engine.size
    if ranks is not None:
        keep = tuple(sorted(engine.select_ranks(ranks)))
        size = len(keep)
    elif n is not None:
        size = parse_size(n, before)
        keep = table.everyone[:size]
    else:
        forms = "a number of workers (4, +2) or the ranks to keep (`-r 0,2-3`)"
        raise UsageError(f"`%dist_scale` takes {forms}.")
    if size == before:
        return
    spec, engine.start_notes.warning = scaled(table.spec, size, keep=keep)
    _, why = recovery.regroup(engine, Scale(spec, keep))
    # If a head manages the workers, `Engine.apply_healed` does not change the size in the config,
    # because machines come and go.  But the user has requested this change of the size.
    if table.is_elsewhere and engine.connection.lost is None:
        engine.config = engine.config.with_size(engine.size)
    _check_formed(engine)
    if why:
        raise errors.ScaleError(before, size, why)


def _check_formed(engine: Engine) -> None:
    """Raise an error if the agent was lost, or if the ranks share no group."""
    if engine.connection.lost is not None:
        raise engine.connection.lost
    if engine.is_broken:
        raise broken_error(engine)


def fetch_kept(
    engine: Engine, names: Sequence[str], ranks: Iterable[int]
) -> dict[int, list[bytes]]:
    """Return, by rank, the pickles of the named variables, as frames for `dispatch.bind_kept`.

    Raises UsageError if there is a variable that no rank has, and the errors of `dispatch.run`.
    """
    if not names:
        return {}
    keep = OpCall("values.keep", {"names": tuple(names)})
    running = dispatch.submit(engine, engine.task(keep, ranks=tuple(ranks)))
    dispatch.wait(engine, running)
    lacking = [name for name in names if not engine.names.ranks_with(name)]
    if running.transcript.errors and lacking:
        raise UsageError(f"`--keep`: no rank has `{lacking[0]}`; all workers are as they were.")
    dispatch.check(engine, running)
    kept = {
        rank: [bytes(memoryview(frame)) for frame in open_payload(payload)]
        for rank, payload in running.result().by_rank.items()
    }
    engine.connection.release_lent_values(running.task, running.task.ranks)
    return kept
