"""The error of a task: which rank failed first, what was done about it, and what the user can do.

Runs in the notebook's process.  The functions only read the task.
"""

from __future__ import annotations

from nbdist import errors
from nbdist.errors import NO_VARIABLES_LOST, NbdistError
from nbdist.output.events import Died, Failure, RankError
from nbdist.output.transcript import is_consequence
from nbdist.world import hangs
from nbdist.world.result import Contents, as_raised
from nbdist.world.task_run import TaskRun
from nbdist.world.wait_texts import activity_text


def error_of(running: TaskRun) -> NbdistError | None:
    """Return the error that a failed or unfinished task raises; None if all ranks succeeded."""
    ending, cause = running.ending, running.transcript.root_cause()
    if ending.lost is not None:
        return ending.lost
    is_of_stop = cause is None or is_consequence(cause[1]) or getattr(cause[1], "by_stop", False)
    if ending.timed_out is not None and is_of_stop:
        damage, unfinished = ending.damage, running.unfinished
        is_safe = _is_safe(running) and not (running.transcript.killed_by_stop or damage)
        timeout = running.patience.timeout or 0.0
        stopped = errors.CellTimeout(timeout, ending.timed_out, unfinished, is_safe=is_safe)
        _add_facts(stopped, damage)
        return stopped
    if running.unfinished:
        return not_stopped(running)
    return None if cause is None else _failure_error(running, *cause)


def not_stopped(running: TaskRun) -> errors.RanksNotStopped:
    """Return the error which says that ranks still run the task, and whether they may be killed."""
    is_safe = _is_safe(running)
    return errors.RanksNotStopped(running.unfinished, activity_text(running), is_safe=is_safe)


def _is_safe(running: TaskRun) -> bool:
    return running.stop.spared.issuperset(running.unfinished)


def _failure_error(running: TaskRun, rank: int, first: RankError) -> NbdistError:
    """Return the error of a task that has ended; `rank` has failed first, by the error `first`."""
    ending, releases, members = running.ending, running.releases, running.members
    failed, is_stopping = running.transcript.errors, running.stop.is_stopping
    own_errors = {other: each for other, each in failed.items() if not is_consequence(each)}
    # Usually a KeyboardInterrupt is a consequence of Stop.  If the task was not stopped, the cell
    # has raised it by itself, and it counts as the rank's own error.
    if not own_errors and not is_stopping:
        own_errors = {
            other: each
            for other, each in failed.items()
            if isinstance(each, Failure) and each.connections != "ended"
        }
        rank, first = min(
            own_errors.items(), key=lambda item: item[1].time_ns, default=(rank, first)
        )
    host, pid = members.machines.name(rank), members.pids.get(rank, 0)
    blame = errors.Blame(rank, host, pid, failed)
    seconds = running.clock.seconds_until(first.time_ns)
    deaths = running.transcript.deaths.values()
    why_ended = next((f"{each.why}." for each in deaths if each.why and not each.by_stop), "")
    recovery, damage = ending.recovery_text, ending.damage
    if isinstance(first, Died):
        died = errors.WorkerDied(blame, seconds, first.exit_code, first.end)
        _add_facts(died, why_ended, ending.why_died, recovery, damage, ending.item_text)
        return died
    if not own_errors and releases.aborted and not is_stopping:
        facts = " ".join(filter(None, (recovery, damage)))
        return errors.RanksReleased(blame, releases.why, facts)
    blame = errors.Blame(rank, host, pid, own_errors or failed)
    who, description = members.machines.who([rank]), (first.name, first.message)
    kept = "" if recovery or damage else NO_VARIABLES_LOST
    released = f"{hangs.released_text(releases.aborted)}{kept}." if releases.aborted else ""
    differing = f"Before that: {releases.differing}." if releases.differing else ""
    error = errors.WorkerError(blame, len(running.task.ranks), seconds, description, who)
    cures = recovery, differing, ending.lacking_text, damage, ending.item_text
    _add_facts(error, released, why_ended, *cures)
    done = running.transcript[rank].done
    contents = Contents.read(done.values if done else None, members.namespace)
    return as_raised(error, first.kinds, contents)


def _add_facts(error: NbdistError, *facts: str) -> None:
    """Add sentences to an error, without those that are ""."""
    for fact in filter(None, facts):
        error.add(fact)
