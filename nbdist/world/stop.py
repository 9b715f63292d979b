"""What Stop does to a running task: phases of the task, events, and a table with the actions.

Runs in the notebook's process and does no I/O.  While `nbdist.world.recovery` follows a task, it
passes the events to this module and carries out the actions that this module returns.  The agent
decides by itself when it interrupts or kills a rank (`nbdist.agent.interrupts`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto

from nbdist.config import Patience

SPARE_TIMEOUT = 0.6  # seconds before control is returned, to learn which ranks are spared
LATE_TIMEOUT = 30.0  # seconds that the next task waits for ranks that have not left a stopped task


class StopPhase(Enum):
    """How far Stop has come in a task; the value describes the phase.

    A *wait* is a call of `recovery.follow`, in which a cell waits for the task.  After two Stops in
    one wait the user gets control.  So the phases count only the Stops of the present wait.
    """

    RUNNING = "ranks run the task, and Stop has not come"
    HOLDING = "the same, but the first Stop will interrupt no rank (`Patience.holds_stop`)"
    INTERRUPTED = "ranks were interrupted, but not by a Stop of this wait"
    ASKED = "Stop was pressed once in this wait"
    ASKED_AGAIN = "Stop was pressed again, so that the user gets control"
    LEFT = "the user has got control, maybe while ranks still run the task"
    LATE = "the next cell waits for ranks that still run the task"
    COMPLETING = "all ranks have finished, and the work after the task is done, such as healing"
    HURRYING = "the same, and the next Stop returns control to the user"


class StopEvent(Enum):
    """An event that can change the phase; the value describes the event."""

    WAIT = "a cell begins to wait for the task"
    LATE_WAIT = "the next cell begins to wait for the task; WAIT follows"
    STOP = "Stop was pressed"
    STOPS = "Stop was pressed several times since the presses were looked at last"
    INTERRUPT = "`World.interrupt` or `%dist_interrupt` was called, or Stop was pressed for a job"
    TIMED_OUT = "the agent has stopped the task, because its `--timeout` has expired"
    DEADLINE = "control must be returned soon"
    SPARED = "ranks still run the task after the agent was asked to spare them"
    FINISHED = "all ranks have finished the task"


class StopAction(Enum):
    """What the code that follows a task has to do after an event."""

    INTERRUPT = auto()  # send the agent an interrupt of the ranks that still run the task
    RECORD = auto()  # send nothing: the agent has interrupted ranks itself, or the phase is HOLDING
    SPARE = auto()  # ask the agent not to kill ranks, if `may_spare`; pass SPARED if ranks remain
    RETURN = auto()  # return control to the user


_Transitions = dict[StopEvent, tuple[StopPhase, *tuple[StopAction, ...]]]

_PRESSED = (StopEvent.STOP, StopEvent.STOPS)

TABLE: dict[StopPhase, _Transitions] = {
    StopPhase.RUNNING: {
        StopEvent.STOP: (StopPhase.ASKED, StopAction.INTERRUPT),
        StopEvent.STOPS: (StopPhase.ASKED_AGAIN, StopAction.INTERRUPT, StopAction.SPARE),
        StopEvent.INTERRUPT: (StopPhase.INTERRUPTED, StopAction.INTERRUPT),
        StopEvent.TIMED_OUT: (StopPhase.INTERRUPTED, StopAction.RECORD),
        StopEvent.FINISHED: (StopPhase.COMPLETING,),
    },
    StopPhase.HOLDING: {
        StopEvent.STOP: (StopPhase.ASKED, StopAction.RECORD),
        StopEvent.STOPS: (StopPhase.ASKED_AGAIN, StopAction.RECORD, StopAction.SPARE),
        StopEvent.INTERRUPT: (StopPhase.INTERRUPTED, StopAction.RECORD),
        StopEvent.TIMED_OUT: (StopPhase.INTERRUPTED, StopAction.RECORD),
        StopEvent.FINISHED: (StopPhase.COMPLETING,),
    },
    StopPhase.INTERRUPTED: {
        StopEvent.LATE_WAIT: (StopPhase.LATE,),
        StopEvent.STOP: (StopPhase.ASKED, StopAction.INTERRUPT),
        # No further interrupt: the user has pressed Stop several times, and wants control.
        StopEvent.STOPS: (StopPhase.ASKED_AGAIN, StopAction.SPARE),
        StopEvent.INTERRUPT: (StopPhase.INTERRUPTED, StopAction.INTERRUPT),
        StopEvent.DEADLINE: (StopPhase.INTERRUPTED, StopAction.SPARE),
        StopEvent.SPARED: (StopPhase.LEFT, StopAction.RETURN),
        StopEvent.FINISHED: (StopPhase.COMPLETING,),
    },
    StopPhase.ASKED: {
        StopEvent.WAIT: (StopPhase.INTERRUPTED,),
        StopEvent.LATE_WAIT: (StopPhase.LATE,),
        **dict.fromkeys(_PRESSED, (StopPhase.ASKED_AGAIN, StopAction.SPARE)),
        StopEvent.INTERRUPT: (StopPhase.ASKED, StopAction.INTERRUPT),
        StopEvent.DEADLINE: (StopPhase.ASKED, StopAction.SPARE),
        StopEvent.SPARED: (StopPhase.LEFT, StopAction.RETURN),
        StopEvent.FINISHED: (StopPhase.HURRYING,),
    },
    StopPhase.ASKED_AGAIN: {
        StopEvent.WAIT: (StopPhase.INTERRUPTED,),
        StopEvent.LATE_WAIT: (StopPhase.LATE,),
        **dict.fromkeys(_PRESSED, (StopPhase.ASKED_AGAIN, StopAction.SPARE)),
        StopEvent.INTERRUPT: (StopPhase.ASKED_AGAIN, StopAction.INTERRUPT),
        StopEvent.SPARED: (StopPhase.LEFT, StopAction.RETURN),
        # Return at once, because the user has waited long enough.  The next cell does the work
        # after the task, such as healing.
        StopEvent.FINISHED: (StopPhase.LEFT, StopAction.RETURN),
    },
    StopPhase.LEFT: {
        StopEvent.WAIT: (StopPhase.INTERRUPTED,),
        StopEvent.LATE_WAIT: (StopPhase.LATE,),
        StopEvent.INTERRUPT: (StopPhase.LEFT, StopAction.INTERRUPT),
    },
    StopPhase.LATE: {
        # `dispatch.wait_for_stop`, which gets control, then interrupts the ranks again.
        **dict.fromkeys(_PRESSED, (StopPhase.LEFT, StopAction.RETURN)),
        StopEvent.INTERRUPT: (StopPhase.LATE, StopAction.INTERRUPT),
        StopEvent.DEADLINE: (StopPhase.LATE, StopAction.SPARE),
        StopEvent.SPARED: (StopPhase.LEFT, StopAction.RETURN),
        StopEvent.FINISHED: (StopPhase.HURRYING,),
    },
    StopPhase.COMPLETING: {
        StopEvent.LATE_WAIT: (StopPhase.LATE,),
        StopEvent.STOP: (StopPhase.HURRYING,),
        StopEvent.STOPS: (StopPhase.LEFT, StopAction.RETURN),
    },
    StopPhase.HURRYING: {
        StopEvent.WAIT: (StopPhase.COMPLETING,),
        StopEvent.LATE_WAIT: (StopPhase.LATE,),
        **dict.fromkeys(_PRESSED, (StopPhase.LEFT, StopAction.RETURN)),
    },
}
"""By phase and event: the next phase, then the actions.  Events without an entry change nothing."""


class StopState:
    """What Stop does to a task; all times are monotonic seconds.

        for action in running.stop.poll(time.monotonic()):
            ...  # see `recovery.follow`

    A signal handler or `counting_presses` counts Stops in `presses`, and `poll` acts on them.
    """

    def __init__(self, patience: Patience) -> None:
        """Begin without a Stop.  A job is a task whose `patience` has no `control_timeout`."""
        self.phase = StopPhase.HOLDING if patience.holds_stop else StopPhase.RUNNING
        self.presses = 0
        self.is_interruptible = False  # True in a block of `counting_presses(raises=True)`
        # How many actions were `StopAction.INTERRUPT` or `RECORD`.  So a timeout counts, too, and a
        # Stop in the phase HOLDING, which interrupts no rank.
        self.interrupts = 0
        self.spared: frozenset[int] = frozenset()  # ranks that are killed only if Stop comes again
        # At this time the agent is asked to spare the ranks.  Then the user gets control.
        self.deadline = float("inf")
        self.is_left = (
            False  # True once the user has got control although ranks ran the stopped task
        )
        self.was_stalled = False  # if the network was stalled at the last interrupt or timeout
        self._handled = 0  # presses that `poll` has acted on, or that LATE_WAIT has dropped
        self._control_timeout = patience.control_timeout

    def __repr__(self) -> str:
        return f"<StopState {self.phase.name} presses {self.presses} interrupts {self.interrupts}>"

    @property
    def is_of_job(self) -> bool:
        """Whether the task is a job: after Stop no cell waits for it to end."""
        return self._control_timeout is None

    def make_job(self) -> None:
        """Make the task a job, for which no cell waits after Stop from now on."""
        self._control_timeout = None

    @property
    def was_pressed(self) -> bool:
        """Whether the user has pressed Stop, even if `poll` has not acted on it yet."""
        return self.presses > 0

    @property
    def is_stopping(self) -> bool:
        """Whether the ranks were interrupted, or a Stop was recorded without interrupting them."""
        return self.interrupts > 0

    @property
    def will_interrupt(self) -> bool:
        """Whether the next `poll` handles a Stop, and the task was not stopped before."""
        return self.presses > self._handled and not self.is_stopping

    @property
    def may_spare(self) -> bool:
        """Whether the agent may be asked not to kill ranks: only until their second interrupt."""
        return self.interrupts <= 1

    @property
    def must_hurry(self) -> bool:
        """Whether the work after the task, such as healing, has to end soon because of a Stop.

        This is so while a cell waits for the work and the user has pressed Stop.  Healing then has
        `recovery.HEAL_AFTER_STOP` seconds.
        """
        return self.is_interruptible and self.was_pressed and not self.is_of_job

    @contextmanager
    def counting_presses(self, *, raises: bool = False) -> Iterator[None]:
        """Count a Stop that comes in this block, for `follow` to act on; raise nothing.

        Consumers of `follow` use this while they show output.  In a magic, the handler of SIGINT
        only counts the Stop, and the block runs to its end.  In a script, and with `raises` also in
        a magic, KeyboardInterrupt ends the block and is caught here (`Engine.count_stop`).
        """
        self.is_interruptible = raises
        try:
            yield
        except KeyboardInterrupt:
            self.presses += 1
        finally:
            self.is_interruptible = False

    def poll(self, now: float) -> tuple[StopAction, ...]:
        """Handle the Stops since the last call, and a deadline that has passed; return the actions.

        For a job, a Stop only interrupts the ranks; it never returns control.
        """
        actions: tuple[StopAction, ...] = ()
        if pending := self.presses - self._handled:
            self._handled += pending
            event = StopEvent.STOP if pending == 1 else StopEvent.STOPS
            actions += self.handle(StopEvent.INTERRUPT if self.is_of_job else event, now)
        if now >= self.deadline:
            actions += self.handle(StopEvent.DEADLINE, now)
        return actions

    def handle(self, event: StopEvent, now: float) -> tuple[StopAction, ...]:
        """Change the phase after an event, as `TABLE` says, and return the actions."""
        self.phase, *actions = TABLE[self.phase].get(event, (self.phase,))
        if StopAction.INTERRUPT in actions or StopAction.RECORD in actions:
            self.interrupts, self.spared = self.interrupts + 1, frozenset()
            self._set_deadline(now, self._control_timeout)
        if StopAction.SPARE in actions:
            self.deadline = now  # do not wait for the old deadline, which may be far off
        self.is_left |= event is StopEvent.SPARED
        if event is StopEvent.LATE_WAIT:
            self._handled = self.presses  # an earlier Stop was meant for an earlier cell
            self._set_deadline(now, LATE_TIMEOUT)
        return tuple(actions)

    def _set_deadline(self, now: float, timeout: float | None) -> None:
        self.deadline = float("inf") if timeout is None else now + timeout - SPARE_TIMEOUT
