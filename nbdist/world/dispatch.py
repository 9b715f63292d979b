"""Sends tasks to ranks that are ready for them, and waits for their results.

Runs in the notebook's process, on the thread that made the world.
"""

from __future__ import annotations

import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any

from nbdist import errors
from nbdist.config import Patience, read_restarts
from nbdist.errors import WorldNotStarted
from nbdist.values.payload import pack_frames
from nbdist.wire.messages import Grow
from nbdist.wire.work import Attempt, OpCall, Task
from nbdist.world import inbox, recovery
from nbdist.world.engine import Engine, KeptVariables
from nbdist.world.outcome_texts import broken_error, death_error, healing_text, late_stop_text
from nbdist.world.result import CellResult
from nbdist.world.sent_objects import Parcel
from nbdist.world.states import WorldState
from nbdist.world.stop import StopEvent
from nbdist.world.task_error import error_of, not_stopped
from nbdist.world.task_run import TaskRun
from nbdist.world.world_outputs import LATE_KEPT


def submit(
    engine: Engine,
    task: Task,
    patience: Patience | None = None,
    shipped: Mapping[int, Parcel] | None = None,
) -> TaskRun:
    """Send a task to its ranks once they are ready; return without waiting for the task's end.

    First waits until the ranks have left a stopped task, and in a notebook until no job runs on
    them.  Stop during that wait raises KeyboardInterrupt.  Then heals a broken group, if no rank of
    the world runs a task.  Other ranks may go on with another task.

    `patience` has the timeouts of the task, by default the world's.  `shipped` has by rank the
    names and objects that the task brings to the rank.  If the task cannot run, it is not sent, and
    an error says why, such as WorldNotStarted, WorldBusy, RanksNotStopped, WorkerDied, WorldBroken,
    AgentLost or CodeNotSent.
    """
    inbox.receive_waiting(engine)
    engine.hooks.wait_until_free(task.ranks)
    if damage := wait_for_stop(engine, task.ranks):
        warnings.warn(f"The task before was stopped late. {damage}", stacklevel=2)
    before = engine.rank_table.everyone
    if engine.task_table.is_idle:
        make_whole(engine)
    check_ready(engine, task.ranks)
    if engine.code is not None:
        for _ in engine.code.send_changes(engine.connection.link.calling):
            pass
    return engine.send(engine.with_current_ranks(task, before), patience, shipped)


def attempts(task: Task, max_restarts: int) -> Iterator[Task]:
    """Yield copies of a task: for the first attempt, and for at most `max_restarts` restarts.

    The caller submits each copy and follows it to its end.  If `Ending.restart_text` then says that
    the task is run again, the caller takes the next copy.
    """
    for number in range(read_restarts(max_restarts) + 1):
        yield replace(task, id=uuid.uuid4().hex, attempt=Attempt(number, max_restarts))


def run(engine: Engine, task: Task) -> CellResult[Any]:
    """Send a task and return its result; raise its error, or KeyboardInterrupt after Stop."""
    return finish(engine, submit(engine, task))


def finish(engine: Engine, running: TaskRun) -> CellResult[Any]:
    """Wait for a task that was sent; return its result, or raise the errors of `run`."""
    wait(engine, running)
    check(engine, running)
    return running.result()


def wait(engine: Engine, running: TaskRun) -> None:
    """Wait as `recovery.follow` does for a task's end, without showing the task's output."""
    for _ in recovery.follow(engine, running):
        pass


def check(engine: Engine, running: TaskRun) -> None:
    """Raise the error of a task that was followed to its end; do nothing if it has succeeded.

    Raises KeyboardInterrupt after Stop, even if the task has succeeded.
    """
    if running.stop.was_pressed:
        recovery_text = late_stop_text(running)
        damage = running.ending.damage
        if recovery_text or damage:
            raise errors.Interrupted(running.task.ranks, recovery_text, damage)
        raise KeyboardInterrupt
    if error := error_of(running):
        engine.rank_table.mark_reported(running.ending.recovered_ranks)
        raise error


def stopped_run(engine: Engine, ranks: Collection[int] | None = None) -> TaskRun | None:
    """Return the stopped task that the next task on `ranks` has to wait for, or None.

    See `TaskTable.stopped_run`.  The tasks of all ranks count if `ranks` is None.  They also count
    if the group is broken, because healing the group needs all ranks.
    """
    if ranks is None or engine.is_broken:
        ranks = engine.rank_table.everyone
    return engine.task_table.stopped_run(ranks)


def wait_for_stop(
    engine: Engine,
    ranks: Collection[int] | None = None,
    show_wait: Callable[[], object] | None = None,
) -> str:
    """Wait for ranks that still run a stopped task, at most `stop.LATE_TIMEOUT` seconds.

    The stopped task is `stopped_run(engine, ranks)`; if there is none, returns "" at once.  Returns
    sentences about variables that the task has left incomplete or different (`Ending.damage`).
    Returns "" if there are no such sentences, or if they are the same as before the wait.  Another
    Stop interrupts the ranks again, and raises KeyboardInterrupt.  The newest outputs of the wait
    can be read by `TaskRun.pop_outputs`.

    `show_wait` tells the user about the wait; it is not called if all ranks have left the task.
    """
    if (running := stopped_run(engine, ranks)) is None:
        return ""
    reported_damage = running.ending.damage
    before = running.stop.presses
    running.stop.handle(StopEvent.LATE_WAIT, time.monotonic())
    if show_wait is not None and running.unfinished:
        with running.stop.counting_presses():
            show_wait()
    newest: deque[tuple[int, Any]] = deque(maxlen=LATE_KEPT)
    for outputs in recovery.follow(engine, running):
        newest += outputs
    running.return_outputs(newest)
    if running.stop.presses > before:
        recovery.interrupt(engine, running)
        raise KeyboardInterrupt
    damage = running.ending.damage
    return "" if damage == reported_damage else damage


def check_ready(engine: Engine, ranks: Collection[int] | None = None) -> None:
    """Raise an error unless a task for `ranks`, by default all, can be sent now.

    The error says why the task cannot be sent.
    """
    tasks, table = engine.task_table, engine.rank_table
    running = tasks.failed_runs[-1] if tasks.failed_runs else None
    ranks = table.everyone if ranks is None or engine.is_broken else ranks
    busy = tasks.run_on(ranks)
    if engine.is_whole and busy is None:
        return
    if engine.state in (WorldState.STOPPED, WorldState.STARTING, WorldState.STOPPING):
        raise WorldNotStarted("The cell")
    if engine.connection.lost is not None:
        raise engine.connection.lost
    if busy is not None:
        if busy.stop.is_stopping and not busy.stop.is_of_job:
            raise not_stopped(busy)
        raise errors.WorldBusy(busy.unfinished, busy.age)
    # Until the group is repaired, new tasks raise the error of the last task in which ranks died,
    # with a text about what helps now.
    if running is not None and (deaths := running.transcript.deaths):
        running.ending = replace(running.ending, recovery_text=healing_text(engine, deaths))
        if error := error_of(running):
            raise error
    dead = {rank: died for rank, died in table.dead.items() if not died.by_restart}
    raise death_error(engine, dead) if dead else broken_error(engine)


def make_whole(engine: Engine) -> None:
    """Repair a broken group as `on_failure` says; then add ranks on machines that have joined.

    Then bind the variables that a restart has kept for new workers (`Engine.kept`).  If a worker
    cannot unpickle them, they are lost, and the errors of `run` are raised.  Does nothing while a
    rank runs a task.
    """
    recovery.heal(engine)
    if engine.rank_table.joined and engine.is_whole and engine.task_table.is_idle:
        engine.rank_table.joined = {}
        recovery.regroup(engine, Grow())
    if engine.kept.frames and engine.is_whole and engine.task_table.is_idle:
        kept, engine.kept = engine.kept, KeptVariables()
        bind_kept(engine, kept.frames)


def bind_kept(engine: Engine, kept: Mapping[int, list[bytes]]) -> None:
    """Bind on each rank the variables that `restarts.fetch_kept` has returned for the rank.

    Ranks beyond the present size of the world are left out.
    """
    for rank, frames in kept.items():
        if rank >= engine.size:
            continue
        payload, segment = pack_frames(frames)
        with closing(segment) if segment else nullcontext():
            task = engine.task(OpCall("values.bind_kept", {"packed": payload}), ranks=(rank,))
            running = submit(engine, task)
            finish(engine, running)
            engine.names.objects.record_gained(rank, running.gained(rank))
