"""The states of a world as one table; all that changes a state goes through `next_state`."""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """What a world is doing; the value is what people read."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    RUNNING = "running a cell"
    INTERRUPTING = "interrupting a cell"
    STUCK = "waiting for ranks that have not stopped yet"
    BROKEN = "broken: the process group must be rebuilt"
    HEALING = "rebuilding the process group"
    LOST = "lost: the agent has ended"
    STOPPING = "stopping"

    @property
    def takes_tasks(self) -> bool:
        """Whether a task can start now."""
        return self is State.READY

    @property
    def has_workers(self) -> bool:
        """Whether there are worker processes to look at or to end."""
        return self not in (State.STOPPED, State.STOPPING, State.STARTING, State.LOST)


class Event(Enum):
    """What can happen to a world."""

    START = "start"
    STARTED = "started"
    START_FAILED = "start failed"
    TASK = "task started"
    TASK_DONE = "task done"
    INTERRUPT = "interrupt"
    GAVE_UP = "gave up waiting"
    RANK_DIED = "rank died"
    ABORTED = "collectives aborted"
    HEAL = "heal"
    SCALE = "scale"
    HEALED = "healed"
    HEAL_FAILED = "heal failed"
    AGENT_LOST = "agent lost"
    STOP = "stop"
    STOPPED = "all stopped"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.STOPPED, Event.START): State.STARTING,
    (State.STARTING, Event.STARTED): State.READY,
    (State.STARTING, Event.START_FAILED): State.STOPPED,
    (State.STARTING, Event.STOP): State.STOPPING,
    (State.READY, Event.TASK): State.RUNNING,
    (State.RUNNING, Event.TASK_DONE): State.READY,
    (State.RUNNING, Event.INTERRUPT): State.INTERRUPTING,
    (State.INTERRUPTING, Event.INTERRUPT): State.INTERRUPTING,
    (State.INTERRUPTING, Event.TASK_DONE): State.READY,
    (State.INTERRUPTING, Event.GAVE_UP): State.STUCK,
    (State.STUCK, Event.INTERRUPT): State.STUCK,
    (State.STUCK, Event.GAVE_UP): State.STUCK,
    # The ranks that did not stop have come back after all.
    (State.STUCK, Event.TASK_DONE): State.READY,
    (State.READY, Event.RANK_DIED): State.BROKEN,
    (State.RUNNING, Event.RANK_DIED): State.BROKEN,
    (State.INTERRUPTING, Event.RANK_DIED): State.BROKEN,
    (State.STUCK, Event.RANK_DIED): State.BROKEN,
    (State.BROKEN, Event.RANK_DIED): State.BROKEN,
    # A failed task had left collectives under way.
    (State.READY, Event.ABORTED): State.BROKEN,
    (State.RUNNING, Event.ABORTED): State.BROKEN,
    (State.INTERRUPTING, Event.ABORTED): State.BROKEN,
    (State.STUCK, Event.ABORTED): State.BROKEN,
    (State.BROKEN, Event.ABORTED): State.BROKEN,
    (State.BROKEN, Event.TASK_DONE): State.BROKEN,
    (State.BROKEN, Event.HEAL): State.HEALING,
    (State.READY, Event.SCALE): State.HEALING,
    (State.HEALING, Event.HEALED): State.READY,
    (State.HEALING, Event.HEAL_FAILED): State.BROKEN,
    (State.HEALING, Event.RANK_DIED): State.HEALING,
    (State.HEALING, Event.STOP): State.STOPPING,
    (State.BROKEN, Event.INTERRUPT): State.BROKEN,
    (State.BROKEN, Event.GAVE_UP): State.BROKEN,
    (State.READY, Event.STOP): State.STOPPING,
    (State.RUNNING, Event.STOP): State.STOPPING,
    (State.INTERRUPTING, Event.STOP): State.STOPPING,
    (State.STUCK, Event.STOP): State.STOPPING,
    (State.BROKEN, Event.STOP): State.STOPPING,
    (State.STOPPING, Event.STOP): State.STOPPING,
    (State.STOPPING, Event.STOPPED): State.STOPPED,
    (State.LOST, Event.START): State.STARTING,
    (State.LOST, Event.STOP): State.STOPPING,
    (State.STOPPED, Event.STOP): State.STOPPING,
    **{(state, Event.AGENT_LOST): State.LOST for state in State},
}


def next_state(state: State, event: Event) -> State:
    """Return where `event` leads from `state`; RuntimeError for one that cannot happen there."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise RuntimeError(f"{event} cannot happen to a world that is {state}") from None
