"""Tests of `nbdist.world.states`: the table of what can happen to a world."""

from __future__ import annotations

import pytest

from nbdist.world.states import TRANSITIONS, Event, State, next_state


def reachable(start: State) -> set[State]:
    """Every state that some events lead to."""
    found, waiting = {start}, [start]
    while waiting:
        state = waiting.pop()
        for (origin, _), goal in TRANSITIONS.items():
            if origin is state and goal not in found:
                found.add(goal)
                waiting.append(goal)
    return found


def test_every_state_is_reachable():
    """A new world can come into every state."""
    assert reachable(State.STOPPED) == {*State}


@pytest.mark.parametrize("state", State)
def test_every_state_leads_to_stopped(state: State):
    """There is a way out of every state."""
    assert State.STOPPED in reachable(state)


@pytest.mark.parametrize("state", [state for state in State if state is not State.STOPPED])
def test_stop_ends_every_state(state: State):
    """A shutdown is possible in every state, and takes two events."""
    stopping = next_state(state, Event.STOP)
    assert stopping is State.STOPPING
    assert next_state(stopping, Event.STOPPED) is State.STOPPED


@pytest.mark.parametrize("state", State)
def test_agent_can_be_lost_always(state: State):
    """The agent's end is never an illegal event."""
    assert next_state(state, Event.AGENT_LOST) is State.LOST


@pytest.mark.parametrize("state", [state for state in State if state.has_workers])
def test_worker_can_die_whenever_there_are_workers(state: State):
    """A death is known as such, whatever the world was doing."""
    goal = next_state(state, Event.RANK_DIED)
    assert goal is (State.HEALING if state is State.HEALING else State.BROKEN)


@pytest.mark.parametrize("state", [State.RUNNING, State.INTERRUPTING, State.STUCK, State.BROKEN])
def test_stop_button_is_legal_while_a_cell_may_run(state: State):
    """Interrupting again and again never raises."""
    goal = next_state(state, Event.INTERRUPT)
    assert next_state(goal, Event.INTERRUPT) is goal


def test_cells_run_only_in_a_ready_world():
    """A cell starts from the one state that says it takes cells."""
    assert {state for (state, event) in TRANSITIONS if event is Event.TASK} == {State.READY}
    assert {state for state in State if state.takes_tasks} == {State.READY}


def test_what_is_not_in_the_table_raises():
    """An event that cannot happen is a fault of ours, told with both names."""
    with pytest.raises(RuntimeError, match=r"TASK cannot happen to a world that is .*STOPPED"):
        next_state(State.STOPPED, Event.TASK)


def test_values_are_words_for_people():
    """`repr(world)` reads as a sentence: every state has its own lower-case words."""
    assert len({state.value for state in State}) == len(State)
    assert all(state.value == state.value.lower() for state in State)
