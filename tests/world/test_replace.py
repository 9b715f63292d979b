"""Tests of `restarts.replace`: restarts of ranks in place, and what follows a failed restart."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from nbdist.config import OnFailure
from nbdist.errors import AgentLost, WorldBroken
from nbdist.world import restarts
from nbdist.world.outcome_texts import healing_text
from nbdist.world.states import WorldState
from nbdist.world.world import World
from tests.waiting import once, press_stop, wait_until
from tests.worlds import each_new_worker

pytestmark = pytest.mark.shared_world(3)

RESTARTED = "rank 2 was restarted and its variables (kept) are gone; other ranks are unaffected."


@pytest.fixture(params=["heal", "stop", "restart-all"])
def policy(request: pytest.FixtureRequest, ready: World) -> OnFailure:
    """A policy for deaths, as `--on-failure` sets it, which the world has during the test."""
    ready.engine.config = ready.engine.config.with_changes(on_failure=request.param)
    return ready.engine.config.on_failure


@pytest.fixture
def ready(world: World) -> Iterator[World]:
    """The world of three ranks with `kept`, which will not report restarts before the test."""
    world.engine.rank_table.pop_replaced()
    world.execute("kept = rank")
    yield world
    world.engine.config = world.engine.config.with_changes(on_failure="heal")


def fail_to_replace(world: World, keep: tuple[str, ...] = ()) -> WorldBroken:
    """Try to restart rank 2 while each new worker dies at its start; return the error."""
    with each_new_worker(world, psutil.Process.kill), pytest.raises(WorldBroken) as caught:
        world.replace([2], keep)
    assert world.state is WorldState.BROKEN
    return caught.value


def kept(world: World) -> list[int | None]:
    """Return each rank's `kept`, None for a rank without the name."""
    return world.gather("globals().get('kept')")


def test_a_requested_restart_follows_no_policy(ready: World, policy: OnFailure) -> None:
    """Whatever the policy for deaths, only the given rank is restarted, and the text says so."""
    before = dict(ready.pids)
    ready.replace([2])
    assert healing_text(ready.engine, [2]) == RESTARTED
    assert {rank for rank in before if before[rank] != ready.pids[rank]} == {2}
    ready.execute("dist.barrier()")


def test_the_next_task_completes_a_failed_restart(ready: World, policy: OnFailure) -> None:
    """A failed restart is an error; the next task restarts that rank alone, whatever the policy."""
    before = dict(ready.pids)
    error = fail_to_replace(ready)
    assert str(error).startswith("the workers could not rebuild their process group: rank 2 could")
    assert kept(ready) == [0, 1, None]
    assert {rank for rank in before if before[rank] != ready.pids[rank]} == {2}
    assert healing_text(ready.engine, [2]) == RESTARTED
    (died,) = ready.engine.rank_table.pop_replaced().values()
    assert died.by_restart


def test_a_failed_restart_is_no_death_in_later_errors(ready: World) -> None:
    """If the next task cannot form the group either, its error is the same and names no death."""
    first = fail_to_replace(ready)
    with each_new_worker(ready, psutil.Process.kill), pytest.raises(WorldBroken) as caught:
        ready.execute("pass")
    assert str(caught.value) == str(first)


def test_a_death_beside_a_requested_restart_follows_the_policy(ready: World) -> None:
    """After a failed restart, the death of another rank ends all workers if the policy says so."""
    ready.engine.config = ready.engine.config.with_changes(on_failure="restart-all")
    fail_to_replace(ready)
    before = dict(ready.pids)
    os.kill(ready.pids[0], signal.SIGKILL)
    wait_until(lambda: ready.status()[0].state == "dead")
    assert kept(ready) == [None] * 3
    assert before[1] != ready.pids[1]
    assert "All workers were restarted" in healing_text(ready.engine, [0, 2])


@pytest.mark.parametrize("how", ["next task", "replace", "replace another", "replace with keep"])
def test_variables_to_keep_outlive_a_failed_restart(ready: World, how: str) -> None:
    """As the error says, the next restart that succeeds gives the rank its kept variables, once."""
    ready.execute("other = rank")
    error = fail_to_replace(ready, keep=("kept",))
    assert "The next cell tries again, and gives back kept; " in str(error)
    if how == "replace":
        ready.replace([2])
    elif how == "replace another":
        ready.replace([1], keep=())
    elif how == "replace with keep":
        ready.replace([2], keep=["kept"])
    assert kept(ready) == [0, None if how == "replace another" else 1, 2]
    assert ready.engine.names.lacking_text([2]) == "other"
    ready.replace([2])
    assert kept(ready)[2] is None


def test_stop_in_a_restart_keeps_the_variables(ready: World) -> None:
    """If Stop interrupts the restart of a rank, the next task gives the variables to the rank."""
    presses = each_new_worker(ready, lambda _: press_stop())
    with presses, pytest.raises(KeyboardInterrupt):
        ready.replace([2], keep=["kept"])
    assert kept(ready) == [0, 1, 2]


def test_a_full_restart_drops_what_a_failed_restart_kept(ready: World) -> None:
    """`World.restart` without `keep` clears all variables, also those of the failed restart."""
    fail_to_replace(ready, keep=("kept",))
    ready.restart()
    assert kept(ready) == [None] * 3


def test_a_variable_that_cannot_be_given_back_fails_once(ready: World) -> None:
    """If the new rank cannot unpickle a kept variable, only the next task raises the error."""
    ready.execute("class Fragile:\n    def __reduce__(self): return int, ('x',)\nkept = Fragile()")
    fail_to_replace(ready, keep=("kept",))
    with pytest.raises(Exception, match="invalid literal"):
        ready.execute("pass")
    assert ready.gather("'kept' in globals()") == [True, True, False]


def test_a_rank_that_does_not_end_is_an_error(
    ready: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the killed rank does not end in time, `replace` raises an error instead of returning."""
    monkeypatch.setattr(restarts, "RANKS_KILLED_TIMEOUT", 0.0)
    with pytest.raises(WorldBroken, match="rank 2 did not end within"):
        ready.replace([2])
    monkeypatch.undo()
    ready.replace([2])
    assert kept(ready) == [0, 1, None]


SEIZE, OF_ANY_KIND = 0x4206, 0x40000000  # PTRACE_SEIZE of ptrace(2), and __WALL of waitpid(2)


@pytest.mark.own_agent
def test_the_loss_of_the_agent_ends_the_wait() -> None:
    """If the agent dies while `replace` waits for killed ranks, the agent's loss is the error."""
    with World(2, log_dir="") as world:
        world.execute("kept = rank")
        rank = psutil.Process(world.pids[1])
        agent = psutil.Process(rank.ppid())
        # The exit of a traced process is first reported to its tracer, which is this process: the
        # agent cannot see the death before `lose_agent` has called `waitpid`.
        ptrace = ctypes.CDLL(None, use_errno=True).ptrace
        ptrace.argtypes = [ctypes.c_long] * 4
        assert ptrace(SEIZE, rank.pid, 0, 0) == 0, os.strerror(ctypes.get_errno())

        def lose_agent() -> None:
            agent.kill()
            os.waitpid(rank.pid, OF_ANY_KIND)

        loses = once(lambda: rank.status() == psutil.STATUS_ZOMBIE, lose_agent)
        with loses, pytest.raises(AgentLost):
            world.replace([1], keep=["kept"])
        assert world.state is WorldState.LOST
        world.restart()
        assert kept(world) == [None, 1]
