"""Texts and errors about failed and dead ranks, what was done about them, and new world sizes.

Runs in the notebook's process.  The functions only read the engine and the task.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from nbdist import errors
from nbdist.errors import Blame, WorkerDied, WorldBroken
from nbdist.output import events
from nbdist.output.events import Died, Failure, RankError
from nbdist.values.payload import MODULE, OPTIMIZER, SHARDED
from nbdist.words import name_ranks, one_line
from nbdist.world.code_sync import missing_text
from nbdist.world.engine import Engine
from nbdist.world.name_table import list_names
from nbdist.world.replicas import differing_text, occurring_names, occurring_or_all
from nbdist.world.states import size_text
from nbdist.world.task_error import error_of
from nbdist.world.task_run import TaskRun

NOT_RETRIED_ERRORS = {events.NAME_PROBLEM, events.LEFT_DEBUGGER, "KeyboardInterrupt", "SyntaxError"}
NOT_RETRIED_ERRORS |= {"IndentationError", "TabError"}
"""Names of failures after which a task is not restarted: it would fail again, or was stopped."""


# --- how a task ended ---------------------------------------------------------------------------


def outside_text(running: TaskRun) -> str:
    """Say that ranks of a task have shared a collective with ranks that ran another task.

    Returns "" if they have not.
    """
    outside = {rank: done.outside for rank, done in running.transcript.done.items() if done.outside}
    others = set[int]().union(*outside.values())
    if not others:
        return ""
    # The collective has ended, so the other ranks have taken part in it from another task.
    return (
        f"{name_ranks(outside)} called a collective of a group with {name_ranks(others)}, which "
        "ran another cell at the same time: the cells may have exchanged values"
    )


def lacking_text(engine: Engine, running: TaskRun) -> str:
    """Say which ranks have a name that is undefined on the failed rank, and how to copy it.

    If a module or file is missing on the rank's machine, say where it is.  Return "" for other
    errors, and if nothing is known that helps.
    """
    rank, failure = running.transcript.root_cause() or (0, None)
    if not isinstance(failure, Failure):
        return ""
    if name := undefined_name(failure):
        ranks = engine.names.ranks_with(name)
        if not ranks or rank in ranks:
            return ""
        verb = "has" if len(ranks) == 1 else "have"
        return f"{name_ranks(ranks)} {verb} `{name}`: `%dist_sync {name} --from {ranks[0]}`."
    if not engine.rank_table.is_elsewhere:
        return ""
    host, cwd = engine.rank_table.machines.name(rank), Path(engine.rank_table.spec.cwd)
    return missing_text(failure.message, host, cwd, sys.path, engine.code)


def replicas_text(engine: Engine, running: TaskRun) -> str:
    """Say at which optimizer steps the ranks of a stopped or failed training ended.

    Returns "" if the task was neither stopped nor failed, or if replicas seem to be equal.
    """
    if not (running.stop.is_stopping or running.transcript.errors):
        return ""
    source, names = running.task.source, engine.names
    sharded, modules = names.names_of_kind(SHARDED), names.names_of_kind(MODULE)
    modules = occurring_or_all(source, [*sharded, *modules])
    optimizers = occurring_or_all(source, names.names_of_kind(OPTIMIZER))
    trained = [*map(names.ranks_with, occurring_names(source, [*modules, *optimizers]))]
    transcript, aborted = running.transcript, running.releases.aborted
    were_cut = running.stop.is_stopping or bool(aborted or transcript.deaths)
    # A rank without steps, and without models and optimizers of the cell, holds no replica.
    done = {
        rank: each
        for rank, each in transcript.done.items()
        if each.steps or not trained or any(rank in ranks for ranks in trained)
    }
    return differing_text(done, modules, optimizers, sharded={*sharded}, were_cut=were_cut)


def undefined_name(error: RankError) -> str:
    """Return the name that an error says is not defined; "" if the error does not say that."""
    if not isinstance(error, Failure) or error.name != "NameError":
        return ""
    match = re.match(r"name '(\w+)' is not defined", error.message)
    return match[1] if match else ""


# --- deaths and new sizes ------------------------------------------------------------------------


def death_error(engine: Engine, dead: Mapping[int, Died]) -> WorkerDied:
    """Return the error about ranks that died between two tasks; it says what was done."""
    (rank, died), table = next(iter(dead.items())), engine.rank_table
    host, pid = table.machines.name(rank), died.pid or table.pids.get(rank, 0)
    error = WorkerDied(Blame(rank, host, pid, {**dead}), None, died.exit_code, died.end)
    error.add(healing_text(engine, dead))
    return error


def broken_error(engine: Engine) -> WorldBroken:
    """Return the error which says that the ranks share no group.

    Its text also names the variables that a restart keeps, and that the ranks get back later.
    """
    return WorldBroken(engine.rank_table.problem, list_names(engine.kept.names))


def restart_text(engine: Engine, running: TaskRun) -> str:
    """Write `rank 2 was killed by SIGKILL: restart 1 of 3`; "" if the task is not run again."""
    done, max_restarts = running.task.attempt.number, running.task.attempt.most
    cause = running.transcript.root_cause()
    if done >= max_restarts or cause is None or running.stop.was_pressed or not engine.is_whole:
        return ""
    error = error_of(running)
    if not isinstance(error, errors.WorkerError) or isinstance(error, errors.RanksReleased):
        return ""
    rank, first = cause
    if isinstance(first, Died):
        did = first.end
    elif first.name in NOT_RETRIED_ERRORS:
        return ""
    else:
        did = "failed" if first.name == events.SCRIPT_FAILED else f"raised {first.name}"
        did += f": {one_line(first.message)}" if first.message.strip() else ""
    return f"rank {rank} {did}: restart {done + 1} of {max_restarts}"


def healing_text(engine: Engine, dead: Iterable[int]) -> str:
    """Return a text that says what was done about dead ranks, and which variables are lost.

    If the group is still broken, the text says how to repair the group.
    """
    table = engine.rank_table
    if engine.is_broken:
        if busy := engine.task_table.unfinished:
            return _deferred_text(engine, dead, busy)
        if not table.problem:
            return "`%dist_restart` restarts all workers; their variables are lost."
        text = str(broken_error(engine))
        return text[0].upper() + text[1:]
    if table.last_policy == "stop":
        return "All workers were ended (`--on-failure stop`); the next cell starts new ones."
    if table.last_policy == "restart-all":
        if table.problem:
            return f"All workers were ended, and could not be restarted: {table.problem}"
        done = "All workers were restarted (`--on-failure restart-all`)"
        return f"{done}; their variables are lost.{engine.setup.problem}"
    ranks, renumbering = tuple(dead), table.renumbering
    if renumbering.after < renumbering.before:
        size = size_text(renumbering.after, renumbering.moved)
        text = f"No other machine can take {name_ranks(ranks)}: {size}"
        back = f" {table.rejoin_hint}" if table.rejoin_hint else ""
        return f"{text}; the other ranks keep their variables.{back}{engine.setup.problem}"
    did = "was restarted and its" if len(ranks) == 1 else "were restarted and their"
    lacking = f" ({lost})" if (lost := engine.names.lacking_text(ranks)) else ""
    text = f"{name_ranks(ranks)} {did} variables{lacking} are gone"
    return f"{text}{_others_text(engine, ranks)}.{engine.setup.problem}"


def _deferred_text(engine: Engine, dead: Iterable[int], busy: Collection[int]) -> str:
    """Say what is done about dead ranks once other ranks, `busy`, have ended another task."""
    dead, have = {*dead}, "has" if len(busy) == 1 else "have"
    then = f"once {name_ranks(busy)} {have} ended another cell"
    are_all = any(not died.by_restart for died in engine.rank_table.dead.values())
    if are_all and engine.config.on_failure == "stop":
        return f"All workers are ended (`--on-failure stop`) {then}."
    if are_all and engine.config.on_failure == "restart-all":
        policy = "`--on-failure restart-all`"
        return f"All workers are restarted ({policy}), and their variables are lost, {then}."
    verb, theirs = ("is", "its") if len(dead) == 1 else ("are", "their")
    return (
        f"{name_ranks(dead)} {verb} replaced, and {theirs} variables are gone, {then}; "
        "other ranks are unaffected."
    )


def stop_text(engine: Engine, killed: Iterable[int]) -> str:
    """Write `ranks 0-3 ignored Stop and were restarted; variables lost: model, x`."""
    ranks = tuple(killed)
    text = f"{name_ranks(ranks)} ignored Stop"
    if engine.is_broken or engine.rank_table.last_policy != "heal":
        healing = healing_text(engine, ranks)
        return f"{text}. {healing[0].upper()}{healing[1:]}"
    text += " and was restarted" if len(ranks) == 1 else " and were restarted"
    if lost := engine.names.lacking_text(ranks):
        text += f"; variables lost: {lost}"
    return f"{text}{_others_text(engine, ranks)}.{engine.setup.problem}"


def late_stop_text(running: TaskRun) -> str:
    """Write `Stop came too late: ranks 0-1 have bound x`; call this only after a Stop.

    Returns "" if the first Stop interrupts the task's ranks (see `Patience.holds_stop`), or if the
    task has not succeeded on all ranks.
    """
    if not running.patience.holds_stop or running.unfinished or running.transcript.errors:
        return ""
    ranks, names = running.task.ranks, {*running.shipped_names(), *running.made}
    verb = "has" if len(ranks) == 1 else "have"
    return f"Stop came too late: {name_ranks(ranks)} {verb} bound {list_names(names)}"


def scaled_text(engine: Engine) -> str:
    """Write `now 4 workers`, which ranks have new numbers, and which variables new ranks lack."""
    renumbering = engine.rank_table.renumbering
    new, text = renumbering.new, size_text(renumbering.after, renumbering.moved)
    if not new:
        return text
    verb = "does" if len(new) == 1 else "do"
    if lacking := engine.names.lacking_text(new):
        text += f" · new {name_ranks(new)} {verb} not have {lacking}"
        sources = engine.names.sources_of_lacking(new)
        lines = [f"`%dist_sync {' '.join(names)} --from {rank}`" for rank, names in sources.items()]
        copies = "copies" if len(lines) == 1 else "copy"
        them = "it" if sum(map(len, sources.values())) == 1 else "them"
        text += f": {' and '.join(lines)} {copies} {them} there" if lines else ""
    problem = f" ·{engine.setup.problem.rstrip('.')}" if engine.setup.problem else ""
    return text + problem


def _others_text(engine: Engine, ranks: Collection[int]) -> str:
    return "; other ranks are unaffected" if len(set(ranks)) < engine.size else ""
