"""Tests of `nbdist.world.recovery`: Stop while a task runs, scaling and healing."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest
import torch

from nbdist.config import Patience, WorldConfig
from nbdist.errors import ScaleError, UsageError, WorkerError, WorldBusy, WorldNotStarted
from nbdist.output.events import Done
from nbdist.wire.messages import Kill, Located, RequestLocations
from nbdist.world import dispatch, inbox, recovery
from nbdist.world.engine import Engine
from nbdist.world.outcome_texts import healing_text
from nbdist.world.sent_objects import NOTHING_SENT
from nbdist.world.states import WorldState
from nbdist.world.stop import SPARE_TIMEOUT, StopPhase
from nbdist.world.task_error import error_of
from nbdist.world.task_run import TaskRun
from nbdist.world.world import World
from tests.cells import give_up_on_c_code
from tests.waiting import SOON, once, press_stop, wait_until
from tests.worlds import NewWorld, each_new_worker

pytestmark = pytest.mark.shared_world


# The net has so many layers that DDP makes several buckets of gradients, and changes the order of
# the buckets after its first step.
TRAINING = """
def make():
    torch.manual_seed(1)
    layers = [torch.nn.Linear(256, 256) for _ in range(8)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(256, 1))

def loss(net, step, rank):
    torch.manual_seed(1000 * step + rank)
    data = torch.randn(4, 256)
    return torch.nn.functional.mse_loss(net(data), data.mean(1, keepdim=True))

def train(net, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        loss(net, step, rank).backward()
        optimizer.step()

def weights(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])

def train_alone(sizes):
    # The same batches in one process: the mean of the ranks' gradients.
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step, size in enumerate(sizes):
        optimizer.zero_grad()
        sum(loss(net, step, rank) / size for rank in range(size)).backward()
        optimizer.step()
    return weights(net)
"""


MODEL = """
net = torch.nn.parallel.DistributedDataParallel(make(), bucket_cap_mb=0.5)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
"""


@pytest.fixture(scope="module")
def started(new_world: NewWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with new_world(2, log_dir=str(tmp_path_factory.mktemp("logs"))) as world:
        world.execute(TRAINING, setup=True)
        yield world


@pytest.fixture
def world(started: World) -> World:
    """The world, scaled to two ranks if the previous test has left another size."""
    inbox.receive_waiting(started.engine)
    started.scale(2)
    return started


def weights_of(world: World) -> torch.Tensor:
    """Return the model's weights, which must be the same on all ranks, bit by bit."""
    first, *others = world.gather("weights(net)")
    assert len(others) == world.size - 1
    assert first.isfinite().all()
    assert all(first.equal(other) for other in others)
    return first


def test_a_model_trains_on_two_then_four_then_three_ranks(world: World) -> None:
    """Training on 2, then 4, then 3 ranks gives the weights of training in a single process."""
    pids = dict(world.pids)
    world.execute(f"{MODEL}train(net, optimizer, range(5))")
    weights_of(world)
    world.scale(4)
    assert world.sync(["net", "optimizer"]) == (2, 3)
    assert all(world.gather("optimizer.param_groups[0]['params'][0] is next(net.parameters())"))
    world.execute("train(net, optimizer, range(5, 10))")
    weights_of(world)
    world.scale("-1")
    world.execute("train(net, optimizer, range(10, 15))")
    weights = weights_of(world)
    assert {rank: world.pids[rank] for rank in (0, 1)} == pids
    (alone,) = world.gather("train_alone([2] * 5 + [4] * 5 + [3] * 5)", ranks=[0])
    assert weights.allclose(alone, rtol=1e-4, atol=1e-6)


OLD = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
before = dist.group.WORLD
pair, alone = dist.new_group([0, 1]), [dist.new_group([r]) for r in range(world_size)][rank]
mesh = init_device_mesh("cpu", (world_size,))
sharded = fully_shard(torch.nn.Linear(64, 64), mesh=mesh)
spread = distribute_tensor(torch.ones(8), mesh, [Shard(0)])
on_pair = rank < 2 and torch.nn.parallel.DistributedDataParallel(
    torch.nn.Linear(4, 4), process_group=pair
)
"""


USES = (
    "dist.all_reduce(torch.ones(1), group=before)",
    "dist.barrier(group=pair)",
    "dist.all_reduce(torch.ones(1), group=alone)",
    "sharded(torch.ones(2, 64))",
    "spread.full_tensor()",
    "on_pair(torch.ones(2, 4)).sum().backward()",
)

OLD_WORKS = "sharded(torch.ones(2, 64)).sum().backward()\nassert spread.full_tensor().sum() == 8"


def test_objects_of_an_ended_group_raise_at_once(world: World) -> None:
    """Objects of a group that scaling has ended raise an error with the remedy; new groups work."""
    world.execute(OLD)
    world.scale(3)
    for use in USES:
        with pytest.raises(WorkerError, match=r"2 -> 3\. Recreate what was made with it"):
            world.execute(use, ranks=[0])
        assert world.state is WorldState.READY
        world.execute("dist.barrier()")
    world.execute(f"{OLD}\nif rank < 2: dist.barrier(group=pair)\n{OLD_WORKS}")


def test_new_ranks_run_the_set_up_cells_and_lack_the_rest(world: World) -> None:
    """New ranks lack other cells' variables until a sync; a rank added again continues its log."""
    world.execute("made = torch.nn.Linear(1, 1)\nbefore = train")
    world.execute("", names={"given": 1}, ranks=[0])
    log = Path(world.logs[1]).parent / "2" / "stdout.log"
    for text in ("first", "second"):
        world.scale(2)
        world.scale(3)
        world.execute(f"print({text!r})", ranks=[2])
    assert log.read_text().endswith("first\nsecond\n")
    names = world.engine.names
    assert "made" in names.lacking_text([2])
    assert "train" not in names.lacking_text([2])
    assert world.gather("train.__name__", ranks=[2]) == ["train"]
    # The set-up cell has not run again on the old ranks.
    assert world.gather("train is before", ranks=[0, 1]) == [True, True]
    assert world.sync(["made", "given"]) == (1, 2)
    assert "made" not in names.lacking_text([2])
    assert names.ranks_that_own("given") == {0, 1, 2}


def test_only_idle_workers_are_scaled(world: World) -> None:
    """Scaling is refused during a cell, before a start, and to no ranks; healing names losses."""
    running = world.submit(world.task("import time; time.sleep(600)"))
    with pytest.raises(WorldBusy):
        world.scale(3)
    world.interrupt()
    dispatch.wait(world.engine, running)
    assert world.gather("dist.get_world_size()") == [2, 2]
    with pytest.raises(UsageError, match=r"%dist_scale .*at least one"):
        world.scale(0)
    with pytest.raises(WorldNotStarted, match="dist_scale"):
        World(2).scale(3)
    two = Engine(WorldConfig(2, log_dir=""))
    assert healing_text(two, [1, 0]) == "ranks 0-1 were restarted and their variables are gone."
    two.names.record_finished(1, Done("ok", 0.0, frozenset("x")), NOTHING_SENT)
    two.names.record_replaced([1])
    expected = "rank 1 was restarted and its variables (x) are gone; other ranks are unaffected."
    assert healing_text(two, [1]) == expected


def test_a_new_rank_that_dies_while_it_starts_leaves_the_world_as_it_was(world: World) -> None:
    """Groups, and objects made from groups, work as before, and a later scaling succeeds."""
    world.execute(f"{MODEL}{OLD}")
    pids = dict(world.pids)
    message = r"rank 2 .*SIGKILL.* 2 workers are running, as before"
    with each_new_worker(world, psutil.Process.kill), pytest.raises(ScaleError, match=message):
        world.scale(3)
    assert (world.pids, world.state) == (pids, WorldState.READY)
    assert world.gather("(world_size, dist.get_world_size())") == [(2, 2), (2, 2)]
    world.execute(f"dist.barrier(group=pair)\n{OLD_WORKS}\ntrain(net, optimizer, [1])")
    world.scale(3)
    assert world.gather("dist.get_world_size()") == [3] * 3


def test_a_survivor_that_dies_during_scaling_is_replaced(world: World) -> None:
    """A survivor that dies during scaling is replaced, and the world has the new size."""
    world.execute("kept = rank; layer = torch.nn.Linear(1, 1)")
    survivor = psutil.Process(world.pids[1])
    with each_new_worker(world, lambda _: survivor.is_running() and survivor.kill()):
        world.scale(3)
    assert world.gather("dist.get_world_size()") == [3] * 3
    assert world.gather("globals().get('kept')") == [0, None, None]
    assert "layer" in world.engine.names.lacking_text([1])


LATE = """
import time
from pathlib import Path
from nbdist.worker.group.group import Group
at_once = Group.regroup
def late(*args):
    while not Path({gate!r}).exists(): time.sleep(0.01)
    Group.regroup = at_once
    return at_once(*args)
Group.regroup = late
"""


def test_healing_completes_a_stopped_scaling(world: World, tmp_path: Path) -> None:
    """After Stop during scaling, healing forms a group of all ranks of the new size.

    The new rank has run the set-up cell, although Stop ended the wait for the scaling.
    """
    gate, before = tmp_path / "gate", dict(world.pids)
    world.execute(LATE.format(gate=str(gate)), ranks=[0])
    with each_new_worker(world, lambda _: press_stop()), pytest.raises(KeyboardInterrupt):
        world.scale(3)
    assert world.state is WorldState.BROKEN
    gate.touch()
    dispatch.make_whole(world.engine)
    positions = world.gather("(rank, world_size, dist.get_world_size())")
    assert positions == [(rank, 3, 3) for rank in range(3)]
    assert world.gather("callable(globals().get('make'))") == [True] * 3
    assert world.pids[0] == before[0]  # the rank that was late to regroup keeps its process


# --- Ctrl-C -----------------------------------------------------------------------------------


BEGUN = "from pathlib import Path; import os, time\nPath(os.environ['RANK']).touch()\n"
SLEEP = "time.sleep(600)"
SLEEPS = f"{BEGUN}{SLEEP}\n"
WAITS = "while not Path('open').exists(): time.sleep(0.01)"


@pytest.fixture
def ready(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """The world with `kept`; the notebook and the ranks are in the same new folder."""
    monkeypatch.chdir(tmp_path)
    world.execute(f"import os; os.chdir({str(tmp_path)!r}); kept = rank")
    return world


def have_begun() -> bool:
    return Path("0").exists() and Path("1").exists()


def stop_once_begun(world: World, running: TaskRun, stops: int = 1) -> None:
    """Follow a task, and press Stop `stops` times as soon as its ranks have begun."""
    for _ in world.follow(running):
        with running.stop.counting_presses():
            if have_begun() and running.stop.presses < stops:
                raise KeyboardInterrupt


def test_stop_ends_a_script_despite_restarts(ready: World, tmp_path: Path) -> None:
    """Stop ends a script on all ranks although restarts remain; the next cell runs."""
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    with once(have_begun, press_stop), pytest.raises(KeyboardInterrupt):
        ready.run_script("sleeps.py", max_restarts=3)
    assert ready.gather("kept") == [0, 1]


def test_stop_during_keep_leaves_all_workers(ready: World) -> None:
    """Stop while values are fetched for `keep` leaves all workers as they were."""
    ready.execute(f"class Slow:\n    def __reduce__(self): exec({SLEEPS!r})\nslow = Slow()")
    before = dict(ready.pids)
    with once(have_begun, press_stop), pytest.raises(KeyboardInterrupt):
        ready.restart(keep=["slow"])
    assert ready.pids == before
    assert ready.gather("kept") == [0, 1]


def test_a_second_stop_gives_control_back(ready: World, tmp_path: Path) -> None:
    """The second Stop returns control although ranks run on; the next cell waits for the ranks."""
    caught = f"    Path(os.environ['RANK'] + 'caught').touch()\n    {WAITS}"
    source = f"{BEGUN}try: time.sleep(600)\nexcept KeyboardInterrupt:\n{caught}"
    # The timeout is so long that only the second Stop can give control back in time.
    running = ready.submit(ready.task(source), Patience(control_timeout=2 * SOON))
    leave = threading.Timer(SOON, (tmp_path / "open").touch)  # so that the test ends if Stop fails
    leave.start()
    for _ in ready.follow(running):
        with running.stop.counting_presses():
            due = have_begun() if not running.stop.presses else Path("1caught").exists()
            if due and running.stop.presses < 2:
                raise KeyboardInterrupt
    leave.cancel()
    leave.join()
    assert running.stop.presses == 2
    assert (running.unfinished, ready.state) == ((0, 1), WorldState.STUCK)
    (tmp_path / "open").touch()
    assert ready.gather("kept") == [0, 1]
    assert not running.unfinished


def test_a_stop_in_the_next_cell_interrupts_ranks_once(ready: World, tmp_path: Path) -> None:
    """Stop in the next cell, which waits for ranks, interrupts them; the cell after does not."""
    source = f"{BEGUN}try: {SLEEP}\nexcept KeyboardInterrupt:\n    {WAITS}"
    running = ready.submit(ready.task(source))
    stop_once_begun(ready, running, stops=2)
    assert running.stop.interrupts == 1
    waits_late = lambda: running.stop.phase is StopPhase.LATE  # noqa: E731
    with once(waits_late, press_stop), pytest.raises(KeyboardInterrupt):
        dispatch.wait_for_stop(ready.engine)
    (tmp_path / "open").touch()
    assert ready.gather("kept") == [0, 1]
    assert (running.stop.interrupts, running.unfinished) == (2, ())


CATCHES = f"""
import os, time
from pathlib import Path
def catch():
    if not os.path.exists("slow"): return
    Path(os.environ["RANK"] + "begun").touch()
    try: time.sleep(600)
    except KeyboardInterrupt: Path("caught").touch()
    {WAITS}
"""


class CallsCatch:
    """An object that calls the `catch` of `CATCHES` whenever a rank compares the object."""

    def __reduce__(self) -> tuple[object, ...]:
        import builtins

        getattr(builtins, "catch", int)()
        return CallsCatch, ()


def press_twice() -> None:
    """Press Stop, and press it again as soon as a rank has caught the first Stop."""
    press_stop()
    wait_until(Path("caught").exists)
    press_stop()


def test_a_rank_that_ignores_stop_in_a_set_up_cell_is_waited_for(ready: World) -> None:
    """If control is back while a new rank runs a set-up cell, the next cell waits for the rank."""
    ready.execute(f"{CATCHES}\ncatch()", setup=True)
    Path("slow").touch()
    stops = once(Path("2begun").exists, press_twice)
    try:
        with stops, pytest.raises(KeyboardInterrupt):
            ready.scale(3)
        assert ready.state is WorldState.STUCK
        Path("open").touch()
        assert ready.gather("globals().get('kept')") == [0, 1, None]
    finally:
        ready.engine.setup.forget()
        ready.execute(TRAINING, setup=True)


@pytest.mark.parametrize("press", [press_stop, press_twice])
def test_stop_while_ranks_are_asked_for_changes_restarts_none(
    ready: World, press: Callable[[], None]
) -> None:
    """Stop ends the restart of a rank before the rank is killed, even if a rank ignores Stop."""
    ready.execute(f"{CATCHES}\nimport builtins; builtins.catch = catch")
    ready.execute("asked", names={"asked": CallsCatch()})
    before = dict(ready.pids)
    Path("slow").touch()
    with once(Path("1begun").exists, press), pytest.raises(KeyboardInterrupt):
        ready.replace([0])
    Path("open").touch()
    assert ready.gather("kept") == [0, 1]
    assert ready.pids == before


def test_an_old_answer_spares_no_killed_rank(ready: World) -> None:
    """An answer to an earlier question spares no rank: the rank may have been killed since."""
    running = ready.submit(ready.task(f"{BEGUN}try: {SLEEP}\nexcept KeyboardInterrupt: {SLEEP}"))
    wait_until(have_begun)
    following = ready.follow(running)
    running.stop.presses = 1
    next(following)
    link = ready.engine.connection.link
    link.send(RequestLocations((0, 1), time.monotonic()))
    wait_until(lambda: any(isinstance(each, Located) for each in link.events.waiting))
    link.call(Kill((1,)))
    running.stop.presses = 2
    for _ in following:
        pass
    assert running.stop.spared == {0}
    ready.interrupt()
    assert ready.gather("globals().get('kept')") == [0, None]


@pytest.mark.parametrize("seconds", [0.1, 2.0])
def test_no_rank_in_c_code_is_killed_later(ready: World, seconds: float) -> None:
    """No rank in C code is killed after control is back, even if the agent found the rank late."""
    give_up_on_c_code(ready, 1, control_timeout=SPARE_TIMEOUT + seconds)


def seconds_without_agent(world: World, timeout: float) -> float:
    """Stop a cell whose agent hangs; return the seconds until control is back."""
    agent = psutil.Process(world.pids[0]).ppid()
    for rank in world.pids:
        Path(str(rank)).unlink(missing_ok=True)
    running, stopped_at = world.submit(world.task(SLEEPS), Patience(control_timeout=timeout)), 0.0
    for _ in world.follow(running):
        with running.stop.counting_presses():
            if have_begun() and not running.stop.presses:
                os.kill(agent, signal.SIGSTOP)
                stopped_at = time.monotonic()
                raise KeyboardInterrupt
    seconds = time.monotonic() - stopped_at
    os.kill(agent, signal.SIGCONT)
    dispatch.wait_for_stop(world.engine)
    assert running.stop.spared == frozenset()
    return seconds


def test_stop_returns_without_the_agent(ready: World) -> None:
    """Stop gives control back in time, and does not wait until the agent says who is spared."""
    tries = (seconds_without_agent(ready, SPARE_TIMEOUT) for _ in range(9))
    # A busy machine may delay some of the tries.
    assert any(seconds < recovery.LOCATED_TIMEOUT - 0.05 for seconds in tries)
    assert ready.gather("kept") == [0, 1]


def test_stop_returns_before_a_group_forms(ready: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop gives control back before the group can be formed; the next cell forms the group."""
    monkeypatch.setattr(recovery, "HEAL_AFTER_STOP", 0.2)
    ready.execute(
        "import nbdist.worker.group.group as group_module, time\n"
        "if rank == 0: group_module.Group.regroup = lambda *_: time.sleep(600)"
    )
    heals = once(lambda: ready.state is WorldState.HEALING, press_stop)
    with heals, pytest.raises(KeyboardInterrupt):
        ready.execute("if rank == 1: raise ValueError\ndist.barrier()")
    assert ready.state is WorldState.BROKEN
    os.kill(ready.pids[0], signal.SIGKILL)  # else the agent does so after half a minute
    ready.execute("dist.barrier()")
    assert ready.gather("globals().get('kept')") == [None, 1]


FAILS = "if rank == 0: optimizer.step()\nelse: raise ValueError\ndist.barrier()"
IS_STOPPED = "if rank == 0: optimizer.step()\nelse: time.sleep(600)\ndist.barrier()"


@pytest.mark.parametrize("source", [FAILS, IS_STOPPED])
def test_stop_during_healing_keeps_the_replica_line(ready: World, source: str) -> None:
    """The error says that replicas may differ even if Stop has interrupted healing."""
    ready.execute(
        "import nbdist.worker.group.group as group_module, time\n"
        "optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])\n"
        "if rank == 0: group_module.Group.regroup = lambda *_: time.sleep(600)"
    )
    presses = 0

    def is_due() -> bool:
        running = ready.engine.task_table.last
        if source == IS_STOPPED and presses == 0:
            return running is not None and running.task.source == source and running.age > 0.5
        return (
            ready.state is WorldState.HEALING
            and running is not None
            and running.stop.presses == presses
        )

    def press() -> None:
        nonlocal presses
        presses += 1
        press_stop()
        if presses < 2:
            wait_until(is_due, "the group is formed again")
            press()

    with once(is_due, press), pytest.raises(KeyboardInterrupt) as stopped:
        ready.execute(source)
    assert "Replicas may differ: rank 0 ended after optimizer step 1" in str(stopped.value)
    os.kill(ready.pids[0], signal.SIGKILL)
    ready.execute("dist.barrier()")


def test_stop_at_any_line_of_healing_loses_no_group(ready: World) -> None:
    """After Stop at any line of the code that forms the group, the next task has a group."""
    passed, stop_at = 0, 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal passed
        if frame.f_code.co_name in ("regroup", "advance"):
            passed += event == "line"
            if event == "line" and passed == stop_at:
                signal.raise_signal(signal.SIGINT)
            return trace
        return None

    while stop_at <= passed:
        passed, stop_at = 0, stop_at + 1
        sys.settrace(trace)
        try:
            with suppress(WorkerError, KeyboardInterrupt):
                ready.execute("if rank == 1: raise ValueError\ndist.barrier()")
        finally:
            sys.settrace(None)
        ready.execute("dist.barrier()")
    assert stop_at > 20
    assert ready.gather("kept") == [0, 1]


def test_following_yields_at_once_if_asked(ready: World) -> None:
    """`follow` yields at once after `send(0.0)`, even without new output, for an event loop."""
    running = ready.submit(ready.task("import time; time.sleep(1)"))
    following = ready.follow(running)
    next(following)
    rounds = 0
    with suppress(StopIteration):
        while True:
            following.send(0.0)
            rounds += 1
    assert rounds > 100  # without `send` there would be fewer than ten
    assert (running.unfinished, error_of(running)) == ((), None)


def test_stop_does_not_interrupt_a_task_that_holds_it(ready: World, tmp_path: Path) -> None:
    """The first Stop does not interrupt a task with `holds_stop`; the second gives control back."""
    running = ready.submit(ready.task(f"{BEGUN}{WAITS}\nheld = 1"), Patience(holds_stop=True))
    stop_once_begun(ready, running, stops=2)
    assert running.unfinished == (0, 1)
    (tmp_path / "open").touch()
    assert ready.gather("held") == [1, 1]


def test_a_later_stop_interrupts_a_task_that_held_it(ready: World) -> None:
    """A task with `holds_stop` that runs on after Stop is interrupted by a later `interrupt`."""
    running = ready.submit(ready.task(SLEEPS), Patience(holds_stop=True, control_timeout=0.1))
    stop_once_begun(ready, running)
    assert (running.unfinished, ready.state) == ((0, 1), WorldState.STUCK)
    ready.interrupt()
    assert ready.gather("kept") == [0, 1]
