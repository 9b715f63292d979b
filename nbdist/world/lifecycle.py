"""Starts and ends the workers of a world, and takes over workers that are running already.

Runs in the notebook's process, on the thread that made the world.  The functions act on `Workers`;
`Session` has them as methods, and `nbdist.world.recovery` restarts or ends workers with them.
`%dist_restart` calls `Session.restart`, which ends and starts workers with the functions here.
`%dist_restart -r` and `%dist_scale` call `Session.replace` and `Session.scale`, which let the agent
form the group again instead (`nbdist.world.recovery.regroup`).
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from typing import Any

from nbdist.config import LOCAL
from nbdist.errors import AgentLost, StartError
from nbdist.wire import messages
from nbdist.wire.messages import Attached, BatchAcknowledged, Starting
from nbdist.words import count
from nbdist.world.agent_link import CALL_TIMEOUT, Link
from nbdist.world.agents import module_of
from nbdist.world.moving_line import MovingLine
from nbdist.world.name_table import NameTable
from nbdist.world.states import Event, WorldState
from nbdist.world.task_run import TaskRun
from nbdist.world.workers import KeptVariables, Workers

log = logging.getLogger("nbdist.world")

COMING_TIMEOUT = 90_000.0  # seconds to wait for queued machines; must exceed the head's timeout
STOP_GRACE, RESTART_GRACE = 2.0, 0.3  # seconds that idle workers have to run their exit handlers
STOP_TIMEOUT = 25.0  # seconds for an agent to end the workers; then the agent is ended too
QUIET_SECONDS = 2.0  # a shorter start on this machine shows no line


def starting(workers: Workers) -> Iterator[Starting]:
    """Start the workers of a world that has none; yield the progress of the start.

    Raises StartError if a worker or the agent cannot start, after ending all that was started.
    """
    if workers.state not in (WorldState.STOPPED, WorldState.LOST):
        return
    workers.advance(Event.START)
    workers.reset()
    try:
        if not workers.is_connected:
            module = module_of(workers.config.launcher_name)
            workers.link_or_none = link = Link(module, fork_server=workers.spec.config.fork)
            link.open()
            if workers.code is not None:
                workers.code.forget()
        workers.remember()
        if workers.code is not None:
            yield from workers.code.send_changes(workers.link.calling, to_new=True)
        timeout = CALL_TIMEOUT if workers.config.launcher_name == LOCAL else COMING_TIMEOUT
        request = messages.StartWorld(workers.spec)
        match started := (yield from workers.link.calling(request, timeout)):
            case messages.StartFailure(rank, host, command, reason, last_lines):
                raise StartError(rank, host, command, reason, last_lines)
        assert isinstance(started, messages.WorldStarted)
        # A head returns the spec, since its machines determine the size.
        workers.spec, workers.missing = started.spec or workers.spec, started.missing
        workers.record_processes(started, workers.link.agent.host)
        # Other machines have come since the first `send_changes`, and may not share the folder.
        if workers.code is not None and workers.is_elsewhere:
            yield from workers.code.send_changes(workers.link.calling, to_new=True)
    except BaseException:  # also after Stop, end everything that was started
        workers.advance(Event.START_FAILED)
        if leftovers := workers.close_link():
            log.warning("%s", leftovers)
        raise
    workers.kept = KeptVariables()
    workers.advance(Event.STARTED)


def starting_texts(workers: Workers) -> Iterator[str]:
    """Start the workers; yield `starting 4 workers: 2 ready`, or "" if the line is unchanged.

    In the first `QUIET_SECONDS` only lines about other machines are yielded.
    """
    last_text, begun = "", time.monotonic()
    for progress in starting(workers):
        ready = f"{progress.up} ready" if progress.up < workers.size else "forming their group"
        text = f"starting {count(workers.size, 'worker')}: {ready}"
        if progress.text:  # a line about other machines, which determine the number of workers
            text = f"starting: {progress.text}" + (f" · {progress.up} ready" if progress.up else "")
        elif time.monotonic() - begun < QUIET_SECONDS:
            text = ""
        yield text if text != last_text else ""
        last_text = text or last_text


def start(workers: Workers) -> None:
    """Start the workers of a world that has none; show a slow start if stderr is a terminal."""
    line, last_text = MovingLine(sys.stderr), ""
    try:
        for text in starting_texts(workers):
            line.show(last_text := text or last_text, time.monotonic())
    finally:
        line.clear()


def start_anew(workers: Workers, *, agent_too: bool = False) -> None:
    """End all workers, with `agent_too` also their agent, and start new workers by `workers.spec`.

    The set-up cells are not run here.
    """
    # In STOPPING, Stop has interrupted an earlier wait for the workers' end, so request it again.
    are_there = workers.state.has_workers or workers.state is WorldState.STOPPING
    if workers.is_connected and are_there:
        workers.advance(Event.STOP)
        _stop(workers, RESTART_GRACE)
        workers.advance(Event.STOPPED)
    workers.running, workers.runs = None, []  # drop all messages of the old workers
    workers.late.clear()
    while (link := workers.link_or_none) is not None and link.arrived:
        item = link.arrived.popleft()
        if isinstance(item, BatchAcknowledged) and link.is_up:
            link.acknowledge(item)
    if agent_too:
        workers.close_link()
    start(workers)


def shutdown(workers: Workers) -> str:
    """End all workers and their agent, and forget the set-up cells.

    Returns a sentence about processes that are left on other machines, "" for none.
    """
    workers.setup.forget()
    workers.kept = KeptVariables()
    workers.advance(Event.STOP)
    leftovers = _stop(workers, STOP_GRACE) if workers.is_connected else ""
    leftovers = leftovers or workers.close_link()
    workers.runs = []
    workers.advance(Event.STOPPED)
    return leftovers


def _stop(workers: Workers, grace: float) -> str:
    """Let the agent end the workers; if it does not do so in time, end the agent too.

    Returns a sentence about processes that are left on other machines, "" for none.
    """
    try:
        workers.link.call(messages.StopWorld(grace), STOP_TIMEOUT)
    except (AgentLost, StartError):
        return workers.close_link()
    return ""


def attach(workers: Workers, link: Link, attached: Attached, namespace: dict[str, Any]) -> None:
    """Take over the running workers of an agent that another notebook has started.

    `attached` is the agent's description of the world; `namespace` has the notebook's variables.
    """
    workers.link_or_none, workers.namespace = link, namespace
    workers.names = NameTable(namespace)
    workers.names.record_attached(attached.bound, attached.pids)
    workers.missing, workers.dead = attached.missing, dict(attached.dead)
    workers.joined = dict.fromkeys(attached.came)
    workers.past.forgotten = attached.forgotten
    # The agent holds the shared memory with the values that the set-up cells use.
    workers.setup.tasks |= dict(attached.memory.setup)
    workers.record_processes(attached, link.agent.host)
    workers.advance(Event.START)
    workers.advance(Event.STARTED)
    for task in attached.tasks:
        workers.running = TaskRun.from_attached(attached, task, workers.members)
        workers.runs.append(workers.running)
    if attached.dead:
        workers.advance(Event.RANK_DIED)
    if not attached.is_whole:
        workers.advance(Event.ABORTED)
    # The agent sends outputs that the last notebook has not received before it answers a request.
    # With these outputs a task may have ended, whose ranks would seem to be busy.
    workers.link.call(messages.SpareRanks(()))
