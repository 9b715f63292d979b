"""Tests of `nbdist.world.task_history`: which tasks made the variables, and set-up cells."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from nbdist.config import Patience
from nbdist.errors import WorkerDied, WorkerError
from nbdist.output.events import Display, Done, Failure
from nbdist.values.payload import Identity, Segment, SegmentGone, run_to_end
from nbdist.wire.work import Attempt, CellCode, OpCall, Script, Task, Work
from nbdist.wire.world_facts import Renumbering
from nbdist.world import dispatch
from nbdist.world import task_history as module
from nbdist.world.name_table import Sent
from nbdist.world.sent_objects import Parcel
from nbdist.world.states import Machines, WorldState
from nbdist.world.task_history import Setup, TaskHistory
from nbdist.world.task_run import Members, TaskRun
from nbdist.world.world import World
from tests.cells import run
from tests.waiting import once, press_stop

pytestmark = pytest.mark.shared_world(3)

MEMBERS = Members(2, "gloo", Machines.one("here", 2), {0: 100, 1: 101}, {}, heals=True)
LR = Sent(("float", "0.1"), Identity(0.1))


def ended(
    work: Work,
    *,
    key: str = "",
    status: str = "ok",
    bound: str = "",
    ranks: tuple[int, ...] = (0, 1),
    shipped: dict[str, Sent] | None = None,
) -> TaskRun:
    """Return a task that all its ranks have finished with this status and these names."""
    task = Task("id", ranks, work, key=key, execution_count=5)
    parcels = dict.fromkeys(ranks, Parcel(shipped or {}))
    running = TaskRun(task, Patience(), MEMBERS, parcels)
    for rank in ranks:
        if status == "error":
            running.receive(rank, Failure("ValueError", "bad", (), 1))
        running.receive(rank, Done(status, 0.1, frozenset(bound)))  # type: ignore[arg-type]
    return running


def test_a_cell_is_kept_once() -> None:
    """A cell is kept once, as it last succeeded, and once more as it last failed since then."""
    past = TaskHistory()
    past.add(ended(CellCode("x = 1"), key="a", bound="x"))
    past.add(ended(CellCode("y = x"), key="b"))
    past.add(ended(CellCode("x = 2"), key="a"))
    past.add(ended(CellCode("x ="), key="a", status="error"))
    past.add(ended(CellCode("x = 0 / 0"), key="a", status="error"))
    rows = [(each.text, each.status, each.first, each.last, each.runs) for each in past.tasks]
    assert rows == [
        ("x = 2", "ok", 1, 3, 2),
        ("y = x", "ok", 2, 2, 1),
        ("x = 0 / 0", "failed", 4, 5, 2),
    ]
    past.add(ended(CellCode("x = 3"), key="a"))
    assert [(each.text, each.status) for each in past.tasks] == [("x = 3", "ok"), ("y = x", "ok")]


def test_tasks_that_leave_nothing_are_not_kept() -> None:
    """Empty cells, and calls that bind nothing, are not kept; scripts and calls that bind are."""
    past = TaskHistory()
    train = Script("file", "train.py", ("--lr", "1"))
    for work in (CellCode("pass"), CellCode(""), OpCall("memory.clean"), train):
        past.add(ended(work))
    past.add(ended(OpCall("snapshot.read"), bound="x"))
    assert [each.kind for each in past.tasks] == ["cell", "script", "call"]


def test_a_task_is_kept_with_its_facts() -> None:
    """A task is kept with its ranks, names and kinds of output; a stopped cell is not failed."""
    past = TaskHistory()
    running = ended(CellCode("x"), ranks=(1,), bound="x")
    running.receive(1, Display({"text/plain": "1"}, {}, is_result=True))
    drawing = ended(CellCode("plot()"))
    drawing.receive(1, Display({"image/png": ""}, {}))
    stopped = ended(CellCode("x"), status="error")
    stopped.stop.presses = 1
    for each in (running, drawing, stopped, ended(CellCode("y"), status="error")):
        past.add(each)
    first, second, *others = past.tasks
    assert (first.ranks, first.on_all, first.number, first.made) == ((1,), False, 5, {"x"})
    assert (first.shows_value, first.draws) == (True, False)
    assert (second.on_all, second.shows_value, second.draws) == (True, False, True)
    rows = [(each.text, each.status, each.error) for each in others]
    assert rows == [("x", "interrupted", "ValueError"), ("y", "failed", "ValueError")]


def test_sent_names_are_kept_with_their_task() -> None:
    """The history has names as they were last sent up to a task, and gathered expressions."""
    past = TaskHistory()
    new = Sent(("float", "0.01"), Identity(0.01))
    past.add(ended(CellCode("pass"), shipped={"lr": LR}))
    past.add(ended(OpCall("values.bind_pushed"), shipped={"lr": new}))
    past.add(ended(OpCall("values.gather", {"expressions": ("loss",)})))
    assert {name: each.shipped for name, each in past.sent_before(1).items()} == {"lr": LR}
    assert {name: each.shipped for name, each in past.sent_before(2).items()} == {"lr": new}
    assert [each.kind for each in past.tasks] == ["cell", "push"]
    assert [*past.gathered] == ["loss"]


def test_the_history_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run of a cell without a key is kept; the oldest tasks are dropped, and counted."""
    monkeypatch.setattr(module, "MAX_TASKS", 3)
    past = TaskHistory()
    for _ in range(5):
        past.add(ended(CellCode("step()")))
    assert [each.text for each in past.tasks] == ["step()"] * 3
    assert past.forgotten == 2
    monkeypatch.setattr(module, "MAX_HISTORY_LENGTH", 12)
    past.add(ended(CellCode("x = 1234567")))
    assert [each.text for each in past.tasks] == ["x = 1234567"]


# --- set-up cells -----------------------------------------------------------------------------


def test_set_up_cells_are_kept_in_order() -> None:
    """A cell that runs again keeps its place; a cell of all ranks runs on all of a new size."""
    setup, past = Setup(), TaskHistory()
    for number, key in enumerate("abca"):
        setup.keep(key, Task(key, (0,), CellCode(f"{key}{number}"), attempt=Attempt(1, 3)), None)
    assert [task.source for task in setup.tasks.values()] == ["a3", "b1", "c2"]
    assert {task.attempt for task in setup.tasks.values()} == {Attempt()}
    setup.forget()
    assert setup.tasks == {}
    for after in (2, 6):
        for key, ranks in (("all", (0, 1, 2, 3)), ("some", (0, 1))):
            setup.keep(key, Task(key, ranks), None)
        setup.renumber(Renumbering(4, after, {}))
        assert [task.ranks for task in setup.tasks.values()] == [tuple(range(after)), (0, 1)]
    task = ended(CellCode("import os"), key="a").task
    assert not past.has_cell(task)
    past.add(ended(CellCode("import os"), key="a"))
    assert past.has_cell(task)
    assert past.has_cell(ended(CellCode("import os")).task)
    assert not past.has_cell(ended(CellCode("import sys")).task)


def test_tasks_of_removed_ranks_are_dropped() -> None:
    """Tasks whose ranks are all gone are dropped; other tasks keep their remaining ranks."""
    past = TaskHistory()
    for ranks in ((0, 1), (1,), (0,)):
        past.add(ended(CellCode(f"x = {ranks}"), ranks=ranks))
    past.renumber(Renumbering(2, 3, {0: 0, 1: 1}))
    assert [task.ranks for task in past.tasks] == [(0, 1), (1,), (0,)]
    past.renumber(Renumbering(3, 1, {0: 0}))
    assert [(task.text, task.ranks) for task in past.tasks] == [
        ("x = (0, 1)", (0,)),
        ("x = (0,)", (0,)),
    ]


def is_gone(segment: Segment) -> bool:
    with suppress(SegmentGone):
        Segment.of_another(segment.ref).close()
        return False
    return True


def test_names_stay_as_long_as_their_set_up_cell() -> None:
    """Memory and records of sent names are released when their cell is replaced or forgotten."""
    setup, lr = Setup(), Sent(1.5, None)
    users = sys.getrefcount(lr)
    first, other, second = segments = [run_to_end(Segment.filling([b"x"])) for _ in range(3)]
    for key, segment in (("a", first), ("b", other), ("b", None), ("a", second)):
        setup.keep(key, Task(key, (0,)), segment, Parcel({"lr": lr}))
    assert [*map(is_gone, segments)] == [True, True, False]
    setup.forget()
    assert is_gone(second)
    assert sys.getrefcount(lr) == users


SUM = "t = torch.ones(1); dist.all_reduce(t); assert t.item() == world_size"
DIES = "import os, time\nif rank == 1: time.sleep(0.2); os.kill(os.getpid(), 9)\ndist.barrier()"


@pytest.fixture
def world(started: World) -> World:
    """Three ready ranks with `kept`, and no set-up cells."""
    started.engine.setup.forget()
    if started.state is not WorldState.READY:
        started.restart()
    started.execute("kept = rank")
    return started


def test_setup_runs_in_every_new_worker(world: World) -> None:
    """Set-up cells run after a death, replacement or restart, in order and with sent names."""
    numbers = list(range(100_000))  # too many for a message: they stay in shared memory
    world.execute("base = sum(numbers) + rank", names={"numbers": numbers}, setup=True)
    world.execute("order = ['a']", setup=True)
    world.execute("order.append('b')", ranks=[0, 2], setup=True)
    world.execute("order = ['a']", setup=True)
    expected = [sum(numbers) + rank for rank in range(3)]
    error = run(world, f"base = 0\n{DIES}").error
    assert isinstance(error, WorkerDied)
    assert world.gather("base") == [0, expected[1], 0]
    assert "base" not in world.engine.names.lacking_text([1])
    world.replace([2])
    assert world.gather("base") == [0, *expected[1:]]
    world.restart()
    assert world.gather("base") == expected
    assert world.gather("order") == [["a", "b"], ["a"], ["a", "b"]]


def test_setup_runs_on_all_ranks_of_a_new_size(world: World) -> None:
    """With more workers, a cell of all ranks runs on the new ranks, too, and other cells do not."""
    world.execute("everywhere = rank", setup=True)
    world.execute("somewhere = rank", ranks=[1], setup=True)
    world.restart(4)
    values = world.gather("[globals().get(name) for name in ('everywhere', 'somewhere')]")
    world.restart(3)
    assert values == [[0, None], [1, 1], [2, None], [3, None]]


def test_a_failed_set_up_cell_is_reported(world: World) -> None:
    """A restart raises a set-up cell's error; healing reports a set-up cell that ended a worker."""
    world.execute("dict(); assert kept >= 0", setup=True)
    with pytest.raises(WorkerError, match="NameError: name 'kept' is not defined"):
        world.restart()
    world.engine.setup.forget()
    world.execute(f"{SUM}\nkept = rank")
    world.execute("import os\nif 'kept' not in globals(): os._exit(7)", setup=True)
    error = run(world, DIES).error
    assert isinstance(error, WorkerDied)
    pattern = r"A `--setup` cell failed there: rank 1 on .*exited with code 7"
    assert re.search(pattern, str(error))
    world.engine.setup.forget()
    world.execute(SUM)


def test_stop_ends_a_set_up_cell(world: World, tmp_path: Path) -> None:
    """Stop ends the set-up cell of a new worker, and the world takes cells afterwards."""
    begun = tmp_path / "begun"
    waits = f"open({str(begun)!r}, 'w'); __import__('time').sleep(600)"
    world.execute(f"if 'kept' not in globals(): {waits}", setup=True)
    running = world.submit(world.task(DIES))
    with once(begun.exists, press_stop):
        dispatch.wait(world.engine, running)
        with pytest.raises(KeyboardInterrupt):
            dispatch.check(world.engine, running)
    world.engine.setup.forget()
    world.execute(SUM)
