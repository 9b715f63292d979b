"""The events that the agent of a world has sent and that the notebook has not handled yet.

Runs in the notebook's process.  A link's thread adds the events, and `nbdist.world.inbox` handles
the events on the thread that made the world.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from contextlib import suppress

from nbdist.errors import AgentLost
from nbdist.output.events import Died
from nbdist.system.wake_pipe import WakePipe
from nbdist.wire import messages
from nbdist.wire.messages import BatchAcknowledged

SHORTEST_WAIT = 0.001  # seconds; with a tiny timeout `SimpleQueue.get` can wait for ever

WorldNotice = (
    messages.Located
    | messages.Aborted
    | messages.Decided
    | messages.UsageReport
    | messages.NodeJoined
    | messages.UnresponsiveHosts
)
LinkEvent = messages.RankOutput | BatchAcknowledged | WorldNotice | messages.Healed | AgentLost


class EventQueue:
    """The events of a link that no consumer has handled, in the order of their arrival.

    A consumer handles the first event of `waiting` and then removes the event from `waiting`.
    """

    def __init__(self) -> None:
        self.waiting: deque[LinkEvent] = deque()
        # An event loop watches this pipe.  The pipe becomes readable after an event that must be
        # handled even while no cell runs, such as a death.
        self.idle_signal = WakePipe()
        self.signals_all = False  # if True, `idle_signal` becomes readable after every event
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_woken = False

    def __repr__(self) -> str:
        return f"<EventQueue {len(self.waiting)} events waiting>"

    def add(self, *events: LinkEvent) -> None:
        """Append events, and wake the threads and event loops that wait for events."""
        self.waiting.extend(events)
        self._bell.put(None)
        if self.signals_all or any(map(_can_come_while_idle, events)):
            self.idle_signal.wake()

    def wait(self, timeout: float) -> None:
        """Wait until an event has arrived or `wake` has been called, at most `timeout` seconds.

        Stop may raise KeyboardInterrupt here.  No event is lost by that, since the consumer removes
        an event only after handling the event.
        """
        deadline = time.monotonic() + timeout
        while (
            not (self.waiting or self._is_woken) and (remaining := deadline - time.monotonic()) > 0
        ):
            with suppress(queue.Empty):
                self._bell.get(timeout=max(remaining, SHORTEST_WAIT))
        self._is_woken = False

    def wake(self) -> None:
        """Make the current or the next `wait` return; a signal handler may call this."""
        self._is_woken = True
        self._bell.put(None)

    def close(self) -> None:
        """Close `idle_signal`, which wakes the event loop that watches it; keep all events."""
        self.idle_signal.close()


def _can_come_while_idle(event: LinkEvent) -> bool:
    """Return True if an event must be handled even while no cell runs.

    Such events are deaths, output outside of tasks, and the end of the agent.
    """
    if isinstance(event, tuple):
        return not event[1] or isinstance(event[2], Died)
    return isinstance(event, AgentLost)
