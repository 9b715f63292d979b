"""Starts and ends the workers of a world, and takes over workers that are running already.

Runs in the notebook's process, on the thread that made the world.  `nbdist.world.restarts.restart`,
which `%dist_restart` calls, and `nbdist.world.recovery` end and start all workers with these
functions.  `%dist_restart -r` and `%dist_scale` do not use this module: they let the agent form the
group again (`nbdist.world.recovery.regroup`).
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
from nbdist.wire.messages import Attached, Starting
from nbdist.wire.world_facts import WorldFacts
from nbdist.words import count
from nbdist.world.agent_link import CALL_TIMEOUT, Link
from nbdist.world.agents import module_of
from nbdist.world.engine import Engine, KeptVariables
from nbdist.world.moving_line import MovingLine
from nbdist.world.name_table import NameTable
from nbdist.world.states import Event, WorldState
from nbdist.world.task_run import TaskRun

log = logging.getLogger("nbdist.world")

COMING_TIMEOUT = 90_000.0  # seconds to wait for queued machines; must exceed the head's timeout
STOP_GRACE, RESTART_GRACE = 2.0, 0.3  # seconds that idle workers have to run their exit handlers
STOP_TIMEOUT = 25.0  # seconds for an agent to end the workers; then the agent is ended too
QUIET_SECONDS = 2.0  # a shorter start on this machine shows no line


def starting(engine: Engine) -> Iterator[Starting]:
    """Start the workers of a world that is STOPPED or LOST; yield the progress of the start.

    Does nothing in other states.  Raises StartError if a worker or the agent cannot start, after
    ending all that was started.
    """
    if engine.state not in (WorldState.STOPPED, WorldState.LOST):
        return
    engine.advance(Event.START)
    engine.reset()
    table, connection = engine.rank_table, engine.connection
    try:
        if not connection.is_up:
            module = module_of(engine.config.launcher_name)
            connection.adopt(Link(module, fork_server=table.spec.config.fork))
            connection.link.open()
            if engine.code is not None:
                engine.code.forget()
        engine.remember()
        if engine.code is not None:
            yield from engine.code.send_changes(connection.link.calling, to_new=True)
        timeout = CALL_TIMEOUT if engine.config.launcher_name == LOCAL else COMING_TIMEOUT
        request = messages.StartWorld(table.spec)
        match started := (yield from connection.link.calling(request, timeout)):
            case messages.StartFailure(rank, host, command, reason, last_lines):
                raise StartError(rank, host, command, reason, last_lines)
        assert isinstance(started, WorldFacts)
        # The facts of a head have the final spec: the machines that have come determine the size.
        table.apply(started, connection.link.agent.host)
        engine.start_notes.missing = started.missing
        # Other machines have come since the first `send_changes`, and may not share the folder.
        if engine.code is not None and table.is_elsewhere:
            yield from engine.code.send_changes(connection.link.calling, to_new=True)
    except BaseException:  # also after Stop, end everything that was started
        engine.advance(Event.START_FAILED)
        if leftovers := connection.close():
            log.warning("%s", leftovers)
        raise
    engine.kept = KeptVariables()
    engine.advance(Event.STARTED)


def starting_texts(engine: Engine) -> Iterator[str]:
    """Start the workers; yield a line such as `starting 4 workers: 2 ready`, again and again.

    Yields "" in place of a line that is the same as the last one.  In the first `QUIET_SECONDS` it
    yields "" in place of all lines but those about other machines.
    """
    last_text, begun = "", time.monotonic()
    for progress in starting(engine):
        ready = f"{progress.up} ready" if progress.up < engine.size else "forming their group"
        text = f"starting {count(engine.size, 'worker')}: {ready}"
        if progress.text:  # a line about other machines, which determine the number of workers
            text = f"starting: {progress.text}" + (f" · {progress.up} ready" if progress.up else "")
        elif time.monotonic() - begun < QUIET_SECONDS:
            text = ""
        yield text if text != last_text else ""
        last_text = text or last_text


def start(engine: Engine) -> None:
    """Start the workers if there are none; show a slow start on stderr if that is a terminal."""
    line, last_text = MovingLine(sys.stderr), ""
    try:
        for text in starting_texts(engine):
            line.show(last_text := text or last_text, time.monotonic())
    finally:
        line.clear()


def start_anew(engine: Engine, *, agent_too: bool = False) -> None:
    """End all workers, and start new ones by `RankTable.spec`; the set-up cells are not run.

    With `agent_too` the agent is ended as well, and a new agent is started.
    """
    # In the state STOPPING, an earlier call has requested the workers' end, and Stop has ended the
    # wait for it.  So request their end again.
    are_there = engine.state.has_workers or engine.state is WorldState.STOPPING
    if engine.connection.is_up and are_there:
        engine.advance(Event.STOP)
        _stop(engine, RESTART_GRACE)
        engine.advance(Event.STOPPED)
    # Drop the tasks of the old workers, and all messages about these workers.
    engine.task_table.forget()
    engine.outputs.pop_late()
    if engine.connection.link_or_none is not None:
        engine.connection.link_or_none.drop_events()
    if agent_too:
        engine.connection.close()
    start(engine)


def shutdown(engine: Engine) -> str:
    """End all workers and their agent, and forget the set-up cells.

    Returns a sentence about processes that are left on other machines, "" for none.
    """
    engine.setup.forget()
    engine.kept = KeptVariables()
    engine.advance(Event.STOP)
    leftovers = _stop(engine, STOP_GRACE) if engine.connection.is_up else ""
    leftovers = leftovers or engine.connection.close()
    engine.task_table.runs = []
    engine.advance(Event.STOPPED)
    return leftovers


def _stop(engine: Engine, grace: float) -> str:
    """Let the agent end the workers; if it does not do so in time, end the agent too.

    Idle workers have `grace` seconds to run their exit handlers.  Returns a sentence about
    processes that are left on other machines, "" for none.
    """
    try:
        engine.connection.link.call(messages.StopWorld(grace), STOP_TIMEOUT)
    except (AgentLost, StartError):
        return engine.connection.close()
    return ""


def attach(engine: Engine, link: Link, attached: Attached, namespace: dict[str, Any]) -> None:
    """Take over the running workers of an agent that another notebook has started.

    `attached` is the agent's description of the world; `namespace` has the notebook's variables.
    """
    engine.connection.adopt(link)
    engine.names, facts = NameTable(namespace), attached.facts
    engine.names.record_attached(attached.bound, facts.pids)
    engine.start_notes.missing = facts.missing
    engine.past.forgotten = attached.forgotten
    # The agent holds the shared memory with the values that the set-up cells use.
    engine.setup.tasks |= dict(attached.memory.setup)
    engine.rank_table.apply(facts, link.agent.host)
    engine.advance(Event.START)
    engine.advance(Event.STARTED)
    for task in attached.tasks:
        running = TaskRun.from_attached(attached, task, engine.members)
        engine.task_table.runs.append(running)
        engine.task_table.last = running
    if facts.dead:
        engine.advance(Event.RANK_DIED)
    if not facts.is_whole:
        engine.advance(Event.ABORTED)
    # The agent first sends all outputs that the last notebook has not acknowledged, and then
    # answers this request.  Without these outputs, the ranks of a task that has ended would seem
    # busy.
    link.call(messages.SpareRanks(()))
