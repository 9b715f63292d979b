"""Handles the messages of a world's agent: changes the tables, the state and the running tasks.

Runs in the notebook's process, on the thread that made the world.  The functions act on `Workers`;
`Session` has them as methods.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from nbdist.errors import AgentLost, UsageError
from nbdist.output.events import (
    Comm,
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
from nbdist.wire.messages import BatchAcknowledged, SendInput
from nbdist.wire.work import InputReply
from nbdist.world.result import hand_over
from nbdist.world.sent_objects import NOTHING_SENT
from nbdist.world.states import NO_INPUT, Event
from nbdist.world.workers import Workers

if TYPE_CHECKING:
    from nbdist.output.events import Output


ITEMS_FROM_WORLD = (
    "the items of World.map come from code that uses the world itself, which is busy with the map: "
    "make a list of the items first, `world.map(function, list(items))`."
)
NO_ITEMS = "the notebook that called World.map has ended, so no rank can get further items"


def receive(workers: Workers, timeout: float) -> None:
    """Wait at most `timeout` seconds for a message, then handle all messages that have arrived."""
    workers.link.wait(timeout)
    receive_waiting(workers)


def receive_waiting(workers: Workers) -> None:
    """Handle the messages that have arrived, but not messages that arrive meanwhile.

    So the function returns even if ranks print without end.
    """
    if (link := workers.link_or_none) is None:
        return
    if workers.is_reading_items:
        raise UsageError(ITEMS_FROM_WORLD)
    for _ in range(len(link.arrived)):
        match link.arrived[0]:
            case AgentLost() as lost:
                handle_agent_loss(workers, lost)
            case BatchAcknowledged() as batch:
                link.acknowledge(batch)
            case messages.NodeJoined(host):
                workers.joined[host] = None
            case (rank, task_id, output):
                _handle_output(workers, rank, task_id, output)
            case message:
                _advance_state(workers, message)
                for run in workers.known_runs:
                    run.handle_message(message, time.monotonic())
        link.arrived.popleft()
        if workers.link_or_none is not link:
            return


def _advance_state(workers: Workers, message: messages.Up) -> None:
    """Change the state of the world if the agent aborts collectives."""
    is_abort = isinstance(message, messages.Aborted) and bool(workers.known_runs)
    if isinstance(message, messages.Decided) and workers.find_run(message.task_id) is not None:
        is_abort = message.decision is messages.Decision.ABORT
    if is_abort:
        workers.advance(Event.ABORTED)


def handle_agent_loss(workers: Workers, lost: AgentLost) -> None:
    """Record that the agent and its workers have ended, and close the link."""
    workers.lost = lost
    if workers.widgets is not None:
        workers.widgets.end()
    for run in workers.known_runs:
        run.handle_agent_loss(lost)
    workers.advance(Event.AGENT_LOST)
    workers.close_link()


def _handle_output(workers: Workers, rank: int, task_id: str, output: Any) -> None:
    """Pass a rank's output to log handlers, widgets, the world's tables or the rank's task."""
    if isinstance(output, Record):
        host = workers.machines.name(rank) or output.host
        hand_over(output._replace(host=host), is_shown=workers.config.show)
        return
    if workers.widgets is not None or isinstance(output, Comm):
        output = _pass_to_widgets(workers, rank, output)
        if output is None:
            return
    running = workers.find_run(task_id)
    if isinstance(output, Died):
        workers.dead[rank] = output
        workers.advance(Event.RANK_DIED)
        if running is not None:
            workers.failed_runs.append(running)
    if isinstance(output, Tracked):
        output = workers.curves.with_continued_steps(task_id, output)
        workers.curves.add(rank, task_id, output, workers.size)
        if running is not None:
            running.transcript.curves.add(rank, task_id, output, workers.size)
        return
    if isinstance(output, Warned):
        if running is not None:
            running.transcript.warn(output.text)
        return
    if isinstance(output, Visible) and not task_id:
        # Output of a rank after its cell counts as output of the cell while others still run it.
        running = next((run for run in workers.runs if run.waits_after(rank)), None)
    if isinstance(output, Done):
        is_received = running is not None and output.received
        received = running.received_parcel(rank) if running and is_received else NOTHING_SENT
        workers.names.record_finished(rank, output, received, running.sent_at if running else None)
    if isinstance(output, ItemsWanted):
        answer = running.answer_items if running is not None else None
        refusal = InputReply(output.number, problem=NO_ITEMS)
        workers.is_reading_items = True
        try:
            reply = answer(rank, output, time.monotonic()) if answer is not None else refusal
        finally:
            workers.is_reading_items = False
        workers.link.send(SendInput(rank, reply))
        return
    if running is None:
        if isinstance(output, InputRequest):
            workers.link.send(SendInput(rank, InputReply(output.number, problem=NO_INPUT)))
        elif not isinstance(output, TransferProgress):
            workers.late.append((rank, output))
    elif isinstance(output, TransferProgress):
        running.moved[rank] = output
    else:
        # If an abort, a death or gloo itself has closed connections, the group is broken.
        if isinstance(output, Failure) and output.connections and running.rules.has_group:
            workers.advance(Event.ABORTED)
        if running.is_of_earlier_task(rank, output):
            workers.late.append((rank, output))
        running.receive(rank, output)


def _pass_to_widgets(workers: Workers, rank: int, output: Output) -> Output | None:
    """Pass an output to `Widgets`; return the output that the cell shows, or None.

    The first message of a widget makes the `Widgets`, if a page can show widgets.
    """
    if workers.widgets is None:
        if not workers.shows_widgets:
            return None
        # Not imported at the top of the file, since most worlds have no widgets.
        from nbdist.world.widgets import Widgets

        workers.widgets = Widgets()
    return workers.widgets.handle_output(rank, output)
