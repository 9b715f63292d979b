"""Tests of `nbdist.world.states`: states of a world, numbers of ranks, machines and prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist.errors import BadRanks, UsageError, WorkerDied, WorkerError
from nbdist.output.events import InputRequest
from nbdist.topology import Position
from nbdist.wire.spec import WorldSpec
from nbdist.world import states
from nbdist.world.outcome_texts import scaled_text
from nbdist.world.states import Event, Machines, Prompts, WorldState, next_state
from nbdist.world.world import World
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world


def reachable(start: WorldState) -> set[WorldState]:
    """Return all states that events lead to from this state."""
    reached: set[WorldState] = set()
    newest = {start}
    while newest:
        reached |= newest
        newest = {
            goal for (origin, _), goal in states.TRANSITIONS.items() if origin in newest
        } - reached
    return reached


def test_every_state_can_stop_or_lose_its_agent():
    """A world in any state can stop or lose its agent; a death breaks the group of its workers."""
    derived = {WorldState.RUNNING, WorldState.INTERRUPTING, WorldState.STUCK}
    assert reachable(WorldState.STOPPED) == {*WorldState} - derived
    assert {next_state(state, Event.AGENT_LOST) for state in WorldState} == {WorldState.LOST}
    assert {next_state(state, Event.STOP) for state in WorldState} == {WorldState.STOPPING}
    assert next_state(WorldState.STOPPING, Event.STOPPED) is WorldState.STOPPED
    assert all(WorldState.STOPPED in reachable(state) for state in WorldState)
    for state in (state for state in WorldState if state.has_workers and state not in derived):
        goal = next_state(state, Event.RANK_DIED)
        assert goal is (WorldState.HEALING if state is WorldState.HEALING else WorldState.BROKEN)
    with pytest.raises(RuntimeError, match=r"HEAL cannot happen to a world that is .*STOPPED"):
        next_state(WorldState.STOPPED, Event.HEAL)


def test_new_numbers_of_ranks_are_written_out() -> None:
    """Renumbered ranks that keep their order are named together, and others each by itself."""
    assert states.size_text(2, {3: 0}) == "now 2 workers · rank 3 is now rank 0"
    assert states.size_text(3, {}) == "now 3 workers"
    assert states.moved_text({2: 1, 3: 2}) == "ranks 2-3 are now ranks 1-2"
    assert states.moved_text({4: 0, 5: 1, 7: 2}) == "ranks 4-5,7 are now ranks 0-2"
    assert states.moved_text({2: 3, 3: 2}) == "rank 2 is now rank 3, rank 3 is now rank 2"


def test_machines_are_named_with_their_ranks() -> None:
    """Machines are named in the order of their ranks, and many machines are only counted."""
    one = Machines.one("here", 3)
    assert one.by_rank == {rank: ("here", rank) for rank in range(3)}
    assert (one.who([2, 0, 1]), one.who([1]), str(one)) == ("ranks 0-2", "rank 1", "here")
    three = Machines({0: ("a", 0), 1: ("a", 1), 2: ("b", 0), 3: ("c", 0), 4: ("a", 2)})
    assert three.who(range(5)) == "ranks 0-1,4 on a, 2 on b, 3 on c"
    assert (three.who([2]), three.names) == ("rank 2 on b", ("a", "b", "c"))
    assert (str(three), three.name(3), three.name(9)) == ("a, b and c", "c", "")
    many = Machines({rank: (f"n{rank}", 0) for rank in range(9)})
    assert (str(many), str(Machines())) == ("n0 and 8 other machines", "")
    slots = (Position(0, 0), Position(2, 1))
    spec = WorldSpec(2, None, {}, "/", (), 1, "python", slots=slots)
    assert Machines.of({0: "a", 1: "c"}, spec).by_rank == {0: ("a", 0), 1: ("c", 1)}


# --- prompts ----------------------------------------------------------------------------------


def prompts_of(*ranks: int, by_debugger: bool = False) -> Prompts:
    prompts = Prompts()
    for rank in ranks:
        prompts.receive(rank, InputRequest(rank + 1, "> ", by_debugger=by_debugger), 0.0)
    return prompts


def test_prompts_come_in_the_order_of_ranks():
    """The lowest rank that asks within a moment comes first, even if another rank asked before."""
    prompts = prompts_of(2)
    assert prompts.next(0.0, unfinished={0, 1, 2}) is None
    prompts.receive(1, InputRequest(2, "> "), states.SETTLE_SECONDS / 2)
    assert prompts.next(states.SETTLE_SECONDS, unfinished={0, 1, 2}) is None
    assert prompts.next(states.SETTLE_SECONDS * 2, unfinished={0, 1, 2}) == 1
    assert prompts.next(states.SETTLE_SECONDS / 2, unfinished={1, 2}) == 1  # rank 0 has finished
    assert prompts.ranks == (1, 2)


def test_an_answered_rank_comes_first_again():
    """An answered rank has a moment to ask again before others; overlapping waits count once."""
    prompts = prompts_of(0, 1)
    prompts.answered(0, 1.0)
    assert prompts.next(1.0, unfinished={0, 1}) is None
    prompts.receive(0, InputRequest(9, "> "), 1.1)
    assert prompts.next(1.1, unfinished={0, 1}) == 0
    prompts.answered(0, 2.0)
    assert prompts.next(2.0 + 2 * states.STAY_SECONDS, unfinished={0, 1}) == 1
    assert prompts.next(2.0, unfinished={1}) == 1  # rank 0 has finished
    prompts.drop(1, 3.0)
    assert prompts.seconds(10.0) == 3.0
    prompts.receive(1, InputRequest(5, "> "), 10.0)
    assert prompts.seconds(12.0) == 5.0


def test_a_typed_line_is_for_one_rank():
    """The prompt names the rank; outside the debugger, `-r` in a typed line has no meaning."""
    prompts = prompts_of(0, 1, 3)
    assert prompts.prompt(3) == "[rank 3] > "
    assert prompts.answers(3, "-r all c", size=4) == {3: "-r all c"}
    assert prompts.text == "ranks 0-1,3 wait for your input, one at a time"


def test_a_typed_line_can_go_to_several_debuggers():
    """A line that begins with `-r` goes to those of the named ranks that wait in the debugger."""
    prompts = prompts_of(0, 1, 3, by_debugger=True)
    assert prompts.answers(0, "-r all n", size=4) == {0: "n", 1: "n", 3: "n"}
    assert prompts.answers(0, "-r 1:3 p x + 1", size=4) == {1: "p x + 1"}
    for line in ("p x", "-r"):
        assert prompts.answers(0, line, size=4) == {0: line}
    with pytest.raises(UsageError, match="`-r 2 c`: none of these ranks is in the debugger"):
        prompts.answers(0, "-r 2 c", size=4)
    with pytest.raises(UsageError):
        prompts.answers(0, "-r 9 c", size=4)
    text = "ranks 0-1,3 are in the debugger, one at a time · `-r all c` goes to all of them"
    assert prompts.text == text
    prompts = prompts_of(2, by_debugger=True)
    assert prompts.text == "rank 2 is in the debugger"
    prompts.drop(2, 1.0)
    assert (prompts.next(2.0, unfinished={2}), prompts.text) == (None, "")


# --- in a world -------------------------------------------------------------------------------


WHO = """
[rank, local_rank, world_size, dist.get_rank(), dist.get_world_size(),
 *(int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
                                       "ROLE_WORLD_SIZE")),
 os.environ["OMP_NUM_THREADS"] == str(torch.get_num_threads()),
 Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent.name]
"""


@pytest.fixture(scope="module")
def started(new_world: NewWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with new_world(3, log_dir=str(tmp_path_factory.mktemp("logs"))) as world:
        world.execute("import os, logging\nfrom pathlib import Path", setup=True)
        yield world


@pytest.fixture
def world(started: World) -> World:
    """The world with three ranks, each with its present number in `was`."""
    started.scale(3)
    started.execute("was = rank")
    return started


def test_ranks_keep_variables_when_another_rank_leaves(world: World) -> None:
    """A renumbered rank keeps its variables and has its new number everywhere."""
    pids = dict(world.pids)
    world.execute("pair = dist.new_group([0, 1])\nmine = rank")
    world.execute("only = rank; print('before')", ranks=[2])
    earlier_log = world.logs[2]
    world.scale(ranks=[0, 2])
    assert scaled_text(world.engine) == "now 2 workers · rank 2 is now rank 1"
    assert world.pids == {0: pids[0], 1: pids[2]}
    assert world.gather("was") == [0, 2]
    assert world.gather(WHO) == [[r, r, 2, r, 2, r, r, 2, 2, 2, True, str(r)] for r in range(2)]
    assert world.engine.names.ranks_that_own("only") == {1}
    world.execute("print('after')", ranks=[1])
    log = f"[nbdist: this was rank 2 until now, and wrote to {earlier_log}/stdout.log]\nafter\n"
    assert Path(world.logs[1], "stdout.log").read_text() == log
    with pytest.raises(WorkerError, match="this group ended when the world was scaled, 3 -> 2"):
        world.execute("dist.barrier(pair)")
    with pytest.raises(WorkerDied, match="rank 1 "):
        world.execute("if rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()")
    assert world.state is WorldState.READY
    assert world.gather("globals().get('was')") == [0, None]
    assert world.gather(WHO)[1] == [1, 1, 2, 1, 2, 1, 1, 2, 2, 2, True, "1"]
    world.execute("dist.all_reduce(torch.ones(1))")


def test_set_up_cells_follow_their_ranks(world: World) -> None:
    """A set-up cell of a rank runs under the rank's new number, also in the history for exports."""
    world.execute("special = 'setup'", ranks=[2], setup=True)
    world.scale(ranks=[0, 2])
    assert [task.ranks for task in world.engine.setup.tasks.values()] == [(0, 1), (1,)]
    past = [task.ranks for task in world.engine.past.tasks if task.text.startswith("special")]
    assert past == [(1,)]
    world.replace([1])
    assert world.gather("globals().get('special')") == [None, "setup"]
    world.engine.setup.forget()
    world.execute("import os, logging\nfrom pathlib import Path", setup=True)
    world.scale(ranks=[0])
    world.scale(3)
    assert scaled_text(world.engine).startswith("now 3 workers · new ranks 1-2 do not have ")
    assert world.gather("globals().get('was')") == [0, None, None]
    assert world.gather(WHO) == [[r, r, 3, r, 3, r, r, 3, 3, 3, True, str(r)] for r in range(3)]


def test_scaling_to_unknown_ranks_is_refused(world: World) -> None:
    """Scaling to unknown ranks, or to none, changes nothing; the error names the ranks."""
    for ranks in ([], [0, 7]):
        with pytest.raises(BadRanks, match="There are ranks 0-2"):
            world.scale(ranks=ranks)
    with pytest.raises(UsageError, match="or the ranks to keep"):
        world.scale()
    assert world.size == 3
