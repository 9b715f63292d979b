"""Handles the messages of a world's agent: updates the tables, the state and the running tasks.

Runs in the notebook's process, on the thread that made the world.
"""

from __future__ import annotations

import time
from typing import Any

from nbdist.errors import AgentLost, UsageError
from nbdist.output.events import (
    Died,
    Done,
    Failure,
    InputRequest,
    ItemsWanted,
    Record,
    Tracked,
    TransferProgress,
    Visible,
    Warned,
)
from nbdist.wire import messages
from nbdist.wire.messages import BatchAcknowledged, RequestBody, SendInput
from nbdist.wire.work import InputReply
from nbdist.world.engine import Engine
from nbdist.world.result import hand_over
from nbdist.world.sent_objects import NOTHING_SENT
from nbdist.world.states import NO_INPUT, Event

ITEMS_FROM_WORLD = (
    "the items of World.map come from code that uses the world itself, which is busy with the map: "
    "make a list of the items first, `world.map(function, list(items))`."
)
NO_ITEMS = "the notebook that called World.map has ended, so no rank can get further items"


def receive(engine: Engine, timeout: float) -> None:
    """Wait at most `timeout` seconds for a message, then handle all messages that have arrived."""
    engine.connection.link.events.wait(timeout)
    receive_waiting(engine)


def receive_waiting(engine: Engine) -> None:
    """Handle the messages that have arrived before this call, without waiting.

    Messages that arrive during the call are left, since ranks may print without end.  Raises
    UsageError while `World.map` reads items from the user's iterable, which must not use the world.
    """
    if (link := engine.connection.link_or_none) is None:
        return
    if engine.task_table.is_reading_items:
        raise UsageError(ITEMS_FROM_WORLD)
    for _ in range(len(link.events.waiting)):
        match link.events.waiting[0]:
            case AgentLost() as lost:
                handle_agent_loss(engine, lost)
            case BatchAcknowledged() as batch:
                link.socket.acknowledge(batch)
            case messages.Healed() as healed:
                engine.apply_healed(healed)
            case messages.NodeJoined(host):
                engine.rank_table.joined[host] = None
            case (rank, task_id, output):
                _handle_output(engine, rank, task_id, output)
            case message:
                _advance_state(engine, message)
                for run in engine.task_table.known_runs:
                    run.handle_message(message, time.monotonic())
        link.events.waiting.popleft()
        if engine.connection.link_or_none is not link:
            return


def ask(engine: Engine, request: RequestBody) -> Any:
    """Send the agent a request about ranks, which may be busy, and return the reply.

    Returns an empty tuple if there are no workers or if the agent has ended.
    """
    receive_waiting(engine)
    if not engine.state.has_workers:
        return ()
    try:
        return engine.rank_table.with_host_names(engine.connection.link.call(request))
    except AgentLost as lost:
        handle_agent_loss(engine, lost)
        return ()


def _advance_state(engine: Engine, message: messages.Up) -> None:
    """Change the state of the world if a message says that the agent aborts collectives."""
    is_abort = isinstance(message, messages.Aborted) and bool(engine.task_table.known_runs)
    if isinstance(message, messages.Decided) and engine.task_table.find_run(message.task_id):
        is_abort = message.decision is messages.Decision.ABORT
    if is_abort:
        engine.advance(Event.ABORTED)


def handle_agent_loss(engine: Engine, lost: AgentLost) -> None:
    """Record that the agent and its workers have ended, and close the link."""
    engine.connection.lost = lost
    engine.outputs.end_widgets()
    for run in engine.task_table.known_runs:
        run.handle_agent_loss(lost)
    engine.advance(Event.AGENT_LOST)
    engine.connection.close()


def _handle_output(engine: Engine, rank: int, task_id: str, output: Any) -> None:
    """Pass a rank's output to the part of the notebook's process that handles it.

    This is a log handler, the widgets, a table of the world, or the rank's task.
    """
    if isinstance(output, Record):
        host = engine.rank_table.machines.name(rank) or output.host
        hand_over(output._replace(host=host), is_shown=engine.config.show)
        return
    output = engine.outputs.pass_to_widgets(rank, output)
    if output is None:
        return
    tasks, connection = engine.task_table, engine.connection
    running = tasks.find_run(task_id)
    if isinstance(output, Died):
        engine.rank_table.dead[rank] = output
        engine.advance(Event.RANK_DIED)
        if running is not None:
            tasks.failed_runs.append(running)
    if isinstance(output, Tracked):
        output = engine.outputs.curves.with_continued_steps(task_id, output)
        engine.outputs.curves.add(rank, task_id, output, engine.size)
        if running is not None:
            running.transcript.curves.add(rank, task_id, output, engine.size)
        return
    if isinstance(output, Warned):
        if running is not None:
            running.transcript.warn(output.text)
        return
    if isinstance(output, Visible) and not task_id:
        # If a rank prints something after it has finished a cell, the output belongs to the cell as
        # long as other ranks still run the cell.
        running = next((run for run in tasks.runs if run.waits_after(rank)), None)
    if isinstance(output, Done):
        is_received = running is not None and output.received
        received = running.received_parcel(rank) if running and is_received else NOTHING_SENT
        engine.names.record_finished(rank, output, received, running.sent_at if running else None)
    if isinstance(output, ItemsWanted):
        answer = running.answer_items if running is not None else None
        refusal = InputReply(output.number, problem=NO_ITEMS)
        tasks.is_reading_items = True
        try:
            reply = answer(rank, output, time.monotonic()) if answer is not None else refusal
        finally:
            tasks.is_reading_items = False
        connection.link.send(SendInput(rank, reply))
        return
    if running is None:
        if isinstance(output, InputRequest):
            refusal = InputReply(output.number, problem=NO_INPUT)
            connection.link.send(SendInput(rank, refusal))
        elif not isinstance(output, TransferProgress):
            engine.outputs.add_late(rank, output)
    elif isinstance(output, TransferProgress):
        running.reports.moved[rank] = output
    else:
        # If an abort, a death or gloo itself has closed connections, the group is broken.
        if isinstance(output, Failure) and output.connections and running.rules.has_group:
            engine.advance(Event.ABORTED)
        if running.is_of_earlier_task(rank, output):
            engine.outputs.add_late(rank, output)
        running.receive(rank, output)
