"""Tests of `nbdist.world.stop`: what each Stop does to a task, and when control returns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbdist.config import CONTROL_TIMEOUT, Patience
from nbdist.world.stop import (
    LATE_TIMEOUT,
    SPARE_TIMEOUT,
    TABLE,
    StopAction,
    StopEvent,
    StopPhase,
    StopState,
)

INTERRUPT, RECORD, SPARE, RETURN = StopAction
DUE = CONTROL_TIMEOUT - SPARE_TIMEOUT  # seconds from an interrupt until ranks are spared

HELD = Patience(holds_stop=True)
OF_JOB = Patience(control_timeout=None)


def waited_for(patience: Patience | None = None) -> StopState:
    """Return the state of a task for which a cell has begun to wait."""
    stop = StopState(patience or Patience())
    assert stop.handle(StopEvent.WAIT, 0.0) == ()
    return stop


def press(stop: StopState, now: float = 1.0, times: int = 1) -> tuple[StopAction, ...]:
    """Press Stop, and return what the code that follows the task has to do."""
    stop.presses += times
    return stop.poll(now)


def leave(stop: StopState, now: float = 1.0) -> None:
    """Press Stop twice, and return control while ranks run the task."""
    assert press(stop, now) == (INTERRUPT,)
    assert press(stop, now) == (SPARE,)
    assert stop.handle(StopEvent.SPARED, now) == (RETURN,)


def test_one_stop_interrupts_the_ranks_once() -> None:
    """The ranks are interrupted once, and the work after the task is hurried."""
    stop = waited_for()
    assert (stop.poll(0.5), stop.was_pressed, stop.is_stopping) == ((), False, False)
    stop.presses += 1
    assert (stop.will_interrupt, stop.is_stopping) == (True, False)
    assert (stop.poll(1.0), stop.poll(2.0)) == ((INTERRUPT,), ())
    assert (stop.phase, stop.will_interrupt, stop.is_stopping) == (StopPhase.ASKED, False, True)
    assert stop.handle(StopEvent.FINISHED, 2.5) == ()
    assert (stop.phase, stop.poll(100.0)) == (StopPhase.HURRYING, ())
    assert (stop.interrupts, stop.is_left) == (1, False)


def test_two_stops_return_control() -> None:
    """After the second Stop the agent is asked to spare the ranks, and then control returns."""
    stop = waited_for()
    assert press(stop, 1.0) == (INTERRUPT,)
    assert press(stop, 2.0) == (SPARE,)
    assert (stop.phase, stop.deadline, stop.is_left) == (StopPhase.ASKED_AGAIN, 2.0, False)
    assert stop.poll(2.1) == ()
    assert stop.handle(StopEvent.SPARED, 2.1) == (RETURN,)
    assert (stop.phase, stop.is_left, stop.interrupts) == (StopPhase.LEFT, True, 1)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_stop_while_ranks_are_asked_for_asks_again(times: int) -> None:
    """A further Stop may interrupt the question to the agent, so the question is asked again."""
    stop = waited_for()
    assert [press(stop), press(stop), press(stop, times=times)] == [
        (INTERRUPT,),
        (SPARE,),
        (SPARE,),
    ]


def test_control_returns_if_ranks_finish_after_the_second_stop() -> None:
    """If the ranks finish in time, control returns, but the work after the task is not done."""
    stop = waited_for()
    assert [press(stop), press(stop)] == [(INTERRUPT,), (SPARE,)]
    assert stop.handle(StopEvent.FINISHED, 2.0) == (RETURN,)
    assert (stop.phase, stop.is_left) == (StopPhase.LEFT, False)


def test_stops_at_once_return_control_at_once() -> None:
    """Several Stops between two calls of `poll` interrupt ranks, if need be, and return control."""
    stop = waited_for()
    assert press(stop, times=2) == (INTERRUPT, SPARE)
    stop = waited_for()
    stop.handle(StopEvent.TIMED_OUT, 0.5)
    assert press(stop, times=3) == (SPARE,)
    stop = waited_for()
    assert (press(stop), press(stop, times=2)) == ((INTERRUPT,), (SPARE,))
    assert stop.phase is StopPhase.ASKED_AGAIN


def test_a_stop_while_the_task_is_sent_counts() -> None:
    """A Stop that came before the cell waits for the task interrupts the ranks at once."""
    stop = StopState(Patience())
    stop.presses += 1
    assert (stop.handle(StopEvent.WAIT, 1.0), stop.poll(1.0)) == ((), (INTERRUPT,))
    assert press(stop, 1.5) == (SPARE,)


def test_control_returns_at_the_deadline() -> None:
    """After one Stop control returns at the deadline, after the agent was asked to spare ranks."""
    stop = waited_for()
    assert press(stop, 1.0) == (INTERRUPT,)
    assert (stop.poll(1.0 + DUE - 0.01), stop.poll(1.0 + DUE)) == ((), (SPARE,))
    assert (stop.phase, stop.may_spare) == (StopPhase.ASKED, True)
    assert stop.handle(StopEvent.SPARED, 5.0) == (RETURN,)
    assert (stop.phase, stop.is_left) == (StopPhase.LEFT, True)


def test_ranks_that_finish_at_the_deadline_are_completed() -> None:
    """If the ranks finish while the agent is asked, the work after the task is done in a hurry."""
    stop = waited_for()
    assert (press(stop, 1.0), stop.poll(6.0)) == ((INTERRUPT,), (SPARE,))
    assert stop.handle(StopEvent.FINISHED, 6.1) == ()
    assert stop.phase is StopPhase.HURRYING
    assert (press(stop, 7.0, times=2), stop.phase) == ((RETURN,), StopPhase.LEFT)


def test_the_first_stop_of_a_task_that_holds_it_is_recorded() -> None:
    """The first Stop interrupts no rank; the second Stop, or the deadline, returns control."""
    stop = waited_for(HELD)
    assert press(stop, 1.0) == (RECORD,)
    assert (stop.phase, stop.is_stopping, stop.deadline) == (StopPhase.ASKED, True, 1.0 + DUE)
    assert (press(stop, 2.0), stop.handle(StopEvent.SPARED, 2.0)) == ((SPARE,), (RETURN,))
    assert stop.handle(StopEvent.INTERRUPT, 3.0) == (INTERRUPT,)
    assert press(waited_for(HELD), times=2) == (RECORD, SPARE)
    stop = waited_for(HELD)
    assert stop.handle(StopEvent.INTERRUPT, 1.0) == (RECORD,)
    assert (stop.phase, press(stop)) == (StopPhase.INTERRUPTED, (INTERRUPT,))
    finished = waited_for(HELD)
    assert (finished.handle(StopEvent.FINISHED, 1.0), finished.phase) == ((), StopPhase.COMPLETING)


def test_a_stop_only_interrupts_a_job_again() -> None:
    """For a job each Stop only interrupts the ranks; neither Stop nor time returns control."""
    stop = waited_for(OF_JOB)
    assert stop.is_of_job
    assert [press(stop, times=n) for n in (1, 1, 2)] == [(INTERRUPT,)] * 3
    assert (stop.interrupts, stop.deadline, stop.poll(1e9)) == (3, float("inf"), ())
    assert stop.handle(StopEvent.FINISHED, 2.0) == ()
    assert [press(stop), press(stop)] == [(), ()]
    assert press(waited_for(replace(OF_JOB, holds_stop=True))) == (RECORD,)
    attached = waited_for()
    attached.make_job()
    assert (attached.is_of_job, press(attached, times=2)) == (True, (INTERRUPT,))
    assert attached.deadline == float("inf")


def test_a_late_wait_ends_by_one_stop_or_at_its_deadline() -> None:
    """The next cell waits `LATE_TIMEOUT` seconds; a Stop ends the wait, but no earlier Stop."""
    stop = waited_for()
    leave(stop, 1.0)
    stop.presses += 1  # a Stop that came just before control returned
    for _ in range(2):
        assert stop.handle(StopEvent.LATE_WAIT, 10.0) == ()
        assert stop.handle(StopEvent.WAIT, 10.0) == ()
        assert stop.phase is StopPhase.LATE
        due = 10.0 + LATE_TIMEOUT - SPARE_TIMEOUT
        assert (stop.poll(10.0), stop.poll(due - 0.1), stop.poll(due)) == ((), (), (SPARE,))
        assert stop.phase is StopPhase.LATE
    assert (stop.handle(StopEvent.SPARED, 41.0), stop.phase) == ((RETURN,), StopPhase.LEFT)
    for times in (1, 2):
        stop.handle(StopEvent.LATE_WAIT, 50.0)
        before = stop.interrupts
        assert (press(stop, 51.0, times), stop.phase) == ((RETURN,), StopPhase.LEFT)
        assert stop.handle(StopEvent.INTERRUPT, 51.0) == (INTERRUPT,)
        assert (stop.phase, stop.interrupts) == (StopPhase.LEFT, before + 1)
    assert stop.is_left


def test_a_late_wait_for_finished_ranks_completes_the_task() -> None:
    """If the ranks finish, the next cell does the work after the task; one Stop ends that wait."""
    stop = waited_for()
    leave(stop)
    stop.handle(StopEvent.LATE_WAIT, 10.0)
    assert stop.handle(StopEvent.FINISHED, 11.0) == ()
    assert (stop.phase, stop.poll(1e9)) == (StopPhase.HURRYING, ())
    assert (press(stop, 12.0), stop.phase) == ((RETURN,), StopPhase.LEFT)


LATER = [phase for phase in StopPhase if phase not in (StopPhase.RUNNING, StopPhase.HOLDING)]
"""The phases of a task that was stopped, for which the next cell may wait."""


@pytest.mark.parametrize("phase", LATER)
def test_the_next_cell_can_wait_in_each_phase(phase: StopPhase) -> None:
    """The next cell can wait in any phase, as a cell whose output failed to show may leave any."""
    stop = waited_for()
    stop.phase = phase
    assert (stop.handle(StopEvent.LATE_WAIT, 1.0), stop.phase) == ((), StopPhase.LATE)


@pytest.mark.parametrize(
    ("phase", "after"),
    [
        (StopPhase.ASKED, StopPhase.INTERRUPTED),
        (StopPhase.ASKED_AGAIN, StopPhase.INTERRUPTED),
        (StopPhase.LEFT, StopPhase.INTERRUPTED),
        (StopPhase.HURRYING, StopPhase.COMPLETING),
    ],
)
def test_another_wait_counts_its_own_stops(phase: StopPhase, after: StopPhase) -> None:
    """If `%dist_interrupt` waits for a stopped task, two Stops return control again."""
    stop = waited_for()
    stop.phase = phase
    assert (stop.handle(StopEvent.WAIT, 1.0), stop.phase) == ((), after)


def test_stop_interrupts_ranks_again_that_were_interrupted_without_it() -> None:
    """After `--timeout` or `World.interrupt` the next Stop is the first, with its own deadline."""
    for event, action in [(StopEvent.TIMED_OUT, RECORD), (StopEvent.INTERRUPT, INTERRUPT)]:
        stop = waited_for()
        stop.spared = frozenset({1})
        assert stop.handle(event, 1.0) == (action,)
        assert (stop.phase, stop.is_stopping, stop.spared) == (StopPhase.INTERRUPTED, True, set())
        assert stop.handle(StopEvent.TIMED_OUT, 1.5) == ()
        assert press(stop, 2.0) == (INTERRUPT,)
        assert (stop.interrupts, stop.may_spare, stop.deadline) == (2, False, 2.0 + DUE)
        assert press(stop, 3.0) == (SPARE,)
    stop = waited_for(HELD)
    assert (stop.handle(StopEvent.TIMED_OUT, 1.0), stop.phase) == ((RECORD,), StopPhase.INTERRUPTED)
    assert press(stop) == (INTERRUPT,)


def test_ranks_interrupted_without_stop_return_control_in_time() -> None:
    """After `--timeout` control returns at the deadline; if ranks finish, the task is completed."""
    stop, finished = waited_for(), waited_for()
    for each in (stop, finished):
        each.handle(StopEvent.TIMED_OUT, 1.0)
        assert (each.poll(1.0 + DUE - 0.01), each.poll(1.0 + DUE)) == ((), (SPARE,))
    assert (stop.handle(StopEvent.SPARED, 6.0), stop.phase) == ((RETURN,), StopPhase.LEFT)
    assert (finished.handle(StopEvent.FINISHED, 6.0), finished.phase) == ((), StopPhase.COMPLETING)


RUNS = [StopPhase.INTERRUPTED, StopPhase.ASKED, StopPhase.ASKED_AGAIN, StopPhase.LEFT]
RUNS += [StopPhase.LATE]


@pytest.mark.parametrize("phase", RUNS)
def test_ranks_can_be_interrupted_in_each_phase(phase: StopPhase) -> None:
    """`World.interrupt` interrupts stopped ranks again and sets a new deadline; the phase stays."""
    stop = waited_for()
    stop.phase = phase
    assert stop.handle(StopEvent.INTERRUPT, 7.0) == (INTERRUPT,)
    assert (stop.phase, stop.interrupts, stop.deadline) == (phase, 1, 7.0 + DUE)


def test_two_stops_end_the_work_after_the_task() -> None:
    """The first Stop hurries work such as healing, and the second returns control."""
    stop = waited_for()
    assert stop.handle(StopEvent.FINISHED, 1.0) == ()
    with stop.counting_presses(raises=True):
        assert not stop.must_hurry
        raise KeyboardInterrupt
    assert (stop.poll(1.0), stop.phase, stop.is_stopping) == ((), StopPhase.HURRYING, False)
    assert not stop.must_hurry
    with stop.counting_presses(raises=True):
        assert stop.must_hurry
    assert (press(stop), stop.phase) == ((RETURN,), StopPhase.LEFT)
    stop = waited_for()
    stop.handle(StopEvent.FINISHED, 1.0)
    assert (press(stop, times=2), stop.phase) == ((RETURN,), StopPhase.LEFT)


def test_only_keyboard_interrupts_count_as_presses() -> None:
    """A KeyboardInterrupt in the block counts as a press of Stop; other errors are raised."""
    stop = waited_for()
    with stop.counting_presses():
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="drawn"), stop.counting_presses():
        raise ValueError("drawn")
    assert (stop.presses, stop.is_interruptible) == (1, False)
    assert repr(stop) == "<StopState RUNNING presses 1 interrupts 0>"


def test_the_table_has_all_phases_and_each_row_changes_something() -> None:
    """The table has a row for each phase, and no entry that changes no phase and has no action."""
    assert [*TABLE] == [*StopPhase]
    idle = [
        (phase, event) for phase, row in TABLE.items() for event in row if row[event] == (phase,)
    ]
    assert idle == []


def returns_control(stop: StopState, actions: tuple[StopAction, ...]) -> bool:
    """Carry out actions for ranks that never finish; return True if control returns."""
    return RETURN in actions or (SPARE in actions and RETURN in stop.handle(StopEvent.SPARED, 1.0))


@pytest.mark.parametrize("phase", [phase for phase in StopPhase if phase is not StopPhase.LEFT])
def test_two_stops_return_control_in_each_phase(phase: StopPhase) -> None:
    """Pressing Stop twice returns control, whatever the phase of the task."""
    for times in ([2], [1, 1]):
        stop = waited_for()
        stop.phase = phase
        assert any(returns_control(stop, press(stop, times=each)) for each in times)
