"""Tests of `nbdist.world.states`: the table of what can happen to a world."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from nbdist.errors import BadRanks, UsageError, WorkerDied, WorkerError
from nbdist.topology import Position
from nbdist.wire.node_messages import Processes, processes
from nbdist.world.recovery import scaled_text
from nbdist.world.states import (
    TRANSITIONS,
    Event,
    Renumbering,
    State,
    compare,
    moved_text,
    next_state,
    size_text,
)
from nbdist.world.world import World
from tests.worlds import NewWorld


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
    """A new world can come into every state, and out of each; any can lose its agent."""
    assert reachable(State.STOPPED) == {*State}
    assert {next_state(state, Event.AGENT_LOST) for state in State} == {State.LOST}
    assert all(State.STOPPED in reachable(state) for state in State)


@pytest.mark.parametrize("state", [state for state in State if state is not State.STOPPED])
def test_stop_ends_every_state(state: State):
    """A shutdown is possible in every state, and takes two events."""
    stopping = next_state(state, Event.STOP)
    assert stopping is State.STOPPING
    assert next_state(stopping, Event.STOPPED) is State.STOPPED


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
    """A cell starts from one state."""
    assert {state for (state, event) in TRANSITIONS if event is Event.TASK} == {State.READY}


def test_what_is_not_in_the_table_raises():
    """An event that cannot happen is a fault of ours, told with both names."""
    with pytest.raises(RuntimeError, match=r"TASK cannot happen to a world that is .*STOPPED"):
        next_state(State.STOPPED, Event.TASK)


pytestmark = pytest.mark.shared_world


def ranks(*pids: int) -> Processes:
    """Processes of one machine, by rank."""
    return processes(dict(enumerate(pids)), ())


@pytest.mark.parametrize(
    ("before", "after", "became", "new"),
    [
        (ranks(10, 11), ranks(10, 11), {0: 0, 1: 1}, ()),
        (ranks(10, 11), ranks(10, 11, 12), {0: 0, 1: 1}, (2,)),
        (ranks(10, 11, 12), ranks(10, 11), {0: 0, 1: 1}, ()),
        (ranks(10, 11, 12, 13), ranks(10, 12, 13), {0: 0, 2: 1, 3: 2}, ()),
        # One was replaced: with the others where they were, and while they moved.
        (ranks(10, 11), ranks(10, 20), {0: 0, 1: 1}, ()),
        (ranks(10, 11, 12, 13), ranks(10, 12, 20), {0: 0, 2: 1}, (2,)),
        # One left, and one came.
        (ranks(10, 11, 12), ranks(10, 12, 20), {0: 0, 2: 1}, (2,)),
    ],
)
def test_processes_are_compared(
    before: Processes, after: Processes, became: Mapping[int, int], new: tuple[int, ...]
) -> None:
    """A process that is there still is the same rank, whatever its number; others are new."""
    found = compare(before, after)
    assert found == Renumbering(len(before), len(after), became)
    assert found.new == new
    assert found.moved == {old: now for old, now in became.items() if old != now}


def test_processes_of_two_machines_can_have_one_number() -> None:
    """They are told apart by the node."""
    seats = (Position(0, 0), Position(1, 0))
    before = processes({0: 17, 1: 17}, seats)
    assert compare(before, processes({0: 17}, seats[1:])).became == {1: 0}


def test_one_after_the_other() -> None:
    """What became of a rank is what became of what it became."""
    both = compare(ranks(10, 11, 12, 13), ranks(11, 13)).then(compare(ranks(11, 13), ranks(13, 14)))
    assert both == Renumbering(4, 2, {3: 0})
    assert size_text(2, both.moved) == "now 2 workers · rank 3 is now rank 0"
    assert size_text(3, {}) == "now 3 workers"


def test_ranks_of_a_task() -> None:
    """They are those that are left, by their new numbers."""
    assert compare(ranks(10, 11, 12, 13), ranks(13, 12)).of((0, 2, 3)) == (0, 1)


@pytest.mark.parametrize(
    ("moved", "text"),
    [
        ({3: 1}, "rank 3 is now rank 1"),
        ({2: 1, 3: 2}, "ranks 2-3 are now ranks 1-2"),
        ({4: 0, 5: 1, 7: 2}, "ranks 4-5,7 are now ranks 0-2"),
        ({2: 3, 3: 2}, "rank 2 is now rank 3, rank 3 is now rank 2"),
    ],
)
def test_words(moved: Mapping[int, int], text: str) -> None:
    """Ranks that moved in order are said together."""
    assert moved_text(moved) == text


# --- in a world -------------------------------------------------------------------------------

WHO = """
[rank, local_rank, world_size, dist.get_rank(), dist.get_world_size(),
 *(int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")),
 Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent.name]
"""

TRAIN = """
for step in range(3):
    torch.manual_seed(10 * step + rank)
    optimizer.zero_grad()
    net(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
"""

MODEL = """
torch.manual_seed(0)
layers = [torch.nn.Linear(64, 64) for _ in range(6)]
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.02)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
"""


@pytest.fixture(scope="module")
def started(new_world: NewWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with new_world(3, log_dir=str(tmp_path_factory.mktemp("logs"))) as world:
        world.execute("import os, logging\nfrom pathlib import Path", setup=True)
        yield world


@pytest.fixture
def world(started: World) -> World:
    """Three ranks with `was`, their ranks by now."""
    started.scale(3)
    started.execute("was = rank")
    return started


def test_the_rank_in_the_middle_leaves(world: World) -> None:
    """The others keep what they have; whatever says who they are follows, and their model."""
    pids = dict(world.pids)
    world.execute(MODEL + TRAIN)
    world.execute("pair = dist.new_group([0, 1])\nmine = rank", ranks=[0, 1, 2])
    world.execute("only = rank", ranks=[2])
    world.scale(ranks=[0, 2])
    assert scaled_text(world.session) == "now 2 workers · rank 2 is now rank 1"
    assert world.pids == {0: pids[0], 1: pids[2]}
    assert world.gather("was") == [0, 2]
    assert world.gather(WHO) == [[r, r, 2, r, 2, r, r, 2, 2, str(r)] for r in range(2)]
    assert world.session.names.ranks_that_own("only") == {1}
    world.execute(TRAIN)
    first, other = world.gather("torch.cat([p.detach().flatten() for p in net.parameters()])")
    assert first.equal(other)
    assert first.isfinite().all()
    with pytest.raises(WorkerError, match="this group ended when the world was scaled, 3 -> 2"):
        world.execute("dist.barrier(pair)")


def test_it_is_healed_by_its_new_number(world: World) -> None:
    """The rank that moved dies: it is that one which is replaced, and the others live on."""
    world.scale(ranks=[1, 2])
    with pytest.raises(WorkerDied, match="rank 1 "):
        world.execute("if rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()")
    assert world.state is State.READY
    assert world.gather("globals().get('was')") == [1, None]
    assert world.gather(WHO)[1] == [1, 1, 2, 1, 2, 1, 1, 2, 2, "1"]
    world.execute("dist.all_reduce(torch.ones(1))")


def test_new_ranks_after_that(world: World) -> None:
    """They have the numbers after those that stayed, and their set-up cells."""
    world.scale(ranks=[2])
    world.scale(3)
    assert scaled_text(world.session).startswith("now 3 workers · new ranks 1-2 do not have ")
    assert world.gather("globals().get('was')") == [2, None, None]
    assert world.gather(WHO) == [[r, r, 3, r, 3, r, r, 3, 3, str(r)] for r in range(3)]


def test_what_users_have_bound_stays(world: World) -> None:
    """A `rank` that a cell has bound is theirs; torchrun's variables that they set are, too."""
    world.execute("rank, os.environ['ROLE_RANK'] = 'mine', 'mine'", ranks=[2])
    world.scale(ranks=[0, 2])
    assert world.gather("rank") == [0, "mine"]
    assert world.gather("os.environ['ROLE_RANK']") == ["0", "mine"]
    world.execute("del rank", ranks=[1])
    world.scale(1)  # that rank, with what it has of its own, is not for others


def test_cells_that_follow_their_ranks(world: World) -> None:
    """A set-up cell of one rank runs where that rank is now, and what was run is exported so."""
    world.execute("special = 'setup'", ranks=[2], setup=True)
    world.scale(ranks=[0, 2])
    assert [task.ranks for task in world.session.setup.tasks.values()] == [(0, 1), (1,)]
    past = [task.ranks for task in world.session.past.tasks if task.text.startswith("special")]
    assert past == [(1,)]
    world.replace([1])
    assert world.gather("globals().get('special')") == [None, "setup"]
    world.session.setup.forget()
    world.execute("import os, logging\nfrom pathlib import Path", setup=True)


def test_what_it_writes_and_logs(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Goes under its new number, and the first line of its log says what it was."""
    world.execute("print('before')", ranks=[2])
    earlier = Path(world.logs[2])
    world.scale(ranks=[0, 2])
    with caplog.at_level(logging.WARNING, "nbdist"):
        world.execute("print('after')\nlogging.getLogger('odd').warning('x')", ranks=[1])
    assert [*world.session.running.transcript.ranks] == [1]
    log = Path(world.logs[1], "stdout.log").read_text()
    assert log == f"[nbdist: this was rank 2 until now, and wrote to {earlier}/stdout.log]\nafter\n"
    assert (earlier / "stdout.log").read_text().endswith("before\n")
    records = [vars(record) for record in caplog.records if record.name == "odd"]
    assert [(each["rank"], each["local_rank"]) for each in records] == [(1, 1)]


@pytest.mark.parametrize("ranks", [[], [3], [0, 7]])
def test_ranks_that_are_not_there(world: World, ranks: list[int]) -> None:
    """Nothing happens; it is said which there are."""
    with pytest.raises(BadRanks, match="There are ranks 0-2"):
        world.scale(ranks=ranks)
    with pytest.raises(UsageError, match="or the ranks to keep"):
        world.scale()
    assert world.size == 3
