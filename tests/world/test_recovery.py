"""Tests of `nbdist.world.recovery`: more workers and fewer while a model trains."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from nbdist.config import WorldConfig
from nbdist.errors import (
    NotEnoughGpus,
    ScaleError,
    UsageError,
    WorkerError,
    WorldBusy,
    WorldNotStarted,
)
from nbdist.world.code_sync import CodeSync, missing_text
from nbdist.world.recovery import healing_text, replaced_text
from nbdist.world.spec import scaled
from nbdist.world.states import State
from nbdist.world.workers import Workers
from nbdist.world.world import World
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world

# Layers enough for several buckets of gradients, which DDP puts in another order after its
# first step.
TRAINING = """
import os

def make():
    torch.manual_seed(1)
    layers = [torch.nn.Linear(256, 256) for _ in range(8)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(256, 1))

def batch(step, rank):
    torch.manual_seed(1000 * step + rank)
    data = torch.randn(4, 256)
    return data, data.mean(1, keepdim=True)

def loss(net, step, rank):
    data, target = batch(step, rank)
    return torch.nn.functional.mse_loss(net(data), target)

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
def started(new_world: NewWorld) -> Iterator[World]:
    with new_world(2) as world:
        world.execute(TRAINING, setup=True)
        yield world


@pytest.fixture
def world(started: World) -> World:
    """A world of two."""
    started.session.receive_waiting()
    started.scale(2)
    return started


def weights_of(world: World) -> object:
    """Of the model, which are the same on all ranks, bit by bit."""
    first, *others = world.gather("weights(net)")
    assert len(others) == world.size - 1
    assert first.isfinite().all()
    assert all(first.equal(other) for other in others)
    return first


def test_a_model_trains_on_two_then_four_then_three_ranks(world: World) -> None:
    """Weights are those of one process that has the same batches, and equal on all ranks."""
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
    assert weights.allclose(alone, rtol=1e-4, atol=1e-6)  # type: ignore[attr-defined]


SAYS_SIZE = (
    "[os.environ[name] for name in ('WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'ROLE_WORLD_SIZE',"
    " 'RANK')] + [world_size, rank, dist.get_world_size(), dist.get_rank(),"
    " os.environ['OMP_NUM_THREADS'] == str(torch.get_num_threads())]"
)


def test_ranks_know_how_many_they_are(world: World) -> None:
    """The environment, the ready names and torch say so, in the old ranks as in the new."""
    world.execute("kept = rank")
    for size in (4, 1, 3):
        world.scale(size)
        text = str(size)
        assert world.gather(SAYS_SIZE) == [
            [text, text, text, str(rank), size, rank, size, rank, True] for rank in range(size)
        ]
    assert world.gather("globals().get('kept')") == [0, None, None]


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

USES = {
    "default group": "dist.all_reduce(torch.ones(1), group=before)",
    "subgroup": "dist.barrier(group=pair)",
    "group of one": "dist.all_reduce(torch.ones(1), group=alone)",
    "FSDP2": "sharded(torch.ones(2, 64))",
    "DTensor": "spread.full_tensor()",
    "DDP on a subgroup": "on_pair(torch.ones(2, 4)).sum().backward()",
}


@pytest.fixture(scope="module")
def outlived(started: World) -> World:
    """A world where all of that was made before it was scaled."""
    started.scale(2)
    started.execute(OLD)
    started.scale(3)
    return started


@pytest.mark.parametrize("use", USES)
def test_what_cannot_live_on_says_what_to_make_anew(outlived: World, use: str) -> None:
    """It raises at once, in one line, and the group of all stays whole."""
    with pytest.raises(WorkerError, match=r"2 -> 3\. Recreate what was made with it"):
        outlived.execute(USES[use], ranks=[0, 1])
    assert outlived.state is State.READY
    assert outlived.gather("(dist.barrier(), rank)[1]") == [0, 1, 2]


def test_it_can_be_made_anew(outlived: World) -> None:
    """With the same names, on all ranks."""
    outlived.execute(OLD)
    outlived.execute(
        "if rank < 2: dist.barrier(group=pair)\n"
        "sharded(torch.ones(2, 64)).sum().backward()\n"
        "assert spread.full_tensor().sum() == 8"
    )


def test_new_ranks_run_the_set_up_cells_and_lack_the_rest(world: World) -> None:
    """What they lack is known, until it is copied there."""
    world.execute("made = torch.nn.Linear(1, 1)")
    world.scale(3)
    assert "made" in world.session.names.lacking([2])
    assert "train" not in world.session.names.lacking([2])
    assert world.gather("train.__name__", ranks=[2]) == ["train"]
    world.sync(["made"])
    assert "made" not in world.session.names.lacking([2])


def test_what_is_copied_is_the_workers_own(world: World) -> None:
    """Also on the rank that it comes from, which had it from here."""
    world.execute("", names={"given": 1}, ranks=[0])
    assert world.sync(["given"]) == (1,)
    assert world.session.names.ranks_that_own("given") == {0, 1}


def test_all_ranks_of_another_number_run_the_set_up_cells(world: World) -> None:
    """Also when all are started anew."""
    world.restart(3)
    assert world.gather("train.__name__") == ["train"] * 3


def test_nccl_needs_a_gpu_for_each(world: World) -> None:
    """More ranks than GPUs are refused before anything is done."""
    spec = replace(world.session.spec, world_size=1, backend="nccl", gpus=("0",))
    with pytest.raises(NotEnoughGpus):
        scaled(spec, world.session.config, 2)


@pytest.mark.world
def test_new_ranks_have_log_files(tmp_path: Path) -> None:
    """Beside those of the others; a rank that comes again goes on in its own."""
    with World(1, log_dir=str(tmp_path)) as world:
        for text in ("first", "second"):
            world.scale(2)
            world.execute(f"print({text!r})")
            world.scale(1)
        (log,) = tmp_path.glob("*/attempt_*/1/stdout.log")
        assert log.read_text() == "first\nsecond\n"


@pytest.mark.parametrize("n", [0, "-4", "", "x", "2x4", "++1"])
def test_no_size(world: World, n: int | str) -> None:
    """One line, and nothing changes."""
    with pytest.raises(UsageError, match=r"%dist_scale .*(at least one|no|not a number)") as caught:
        world.scale(n)
    assert "\n" not in str(caught.value)
    assert world.gather("rank") == [0, 1]


def test_it_takes_workers_that_have_nothing_to_do(world: World) -> None:
    """While a cell runs it is refused; without workers it is too."""
    running = world.submit(world.task("import time; time.sleep(600)"))
    with pytest.raises(WorldBusy):
        world.scale(3)
    world.interrupt()
    world.session.wait(running)
    assert world.gather("dist.get_world_size()") == [2, 2]
    with pytest.raises(WorldNotStarted, match="dist_scale"):
        World(2).scale(3)


@contextmanager
def each_new_worker(world: World, do: Callable[[psutil.Process], None]) -> Iterator[None]:
    """Do something to every worker process that is started meanwhile."""
    fork_server = psutil.Process(world.pids[0]).parent()
    assert fork_server is not None
    # A look at all processes would take longer than a worker's start where others are at work.
    children = Path(f"/proc/{fork_server.pid}/task/{fork_server.pid}/children")
    known, over = {*children.read_text().split()}, threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            for child in {*children.read_text().split()} - known:
                known.add(child)
                do(psutil.Process(int(child)))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_new_rank_that_dies_while_it_starts_leaves_the_world_as_it_was(world: World) -> None:
    """Also with what was made from its groups; later it can be scaled."""
    world.execute(f"{MODEL}{OLD}")
    pids = dict(world.pids)
    with (
        each_new_worker(world, psutil.Process.kill),
        pytest.raises(ScaleError, match=r"rank 2 .*SIGKILL.* 2 workers are running, as before"),
    ):
        world.scale(3)
    assert world.pids == pids
    assert world.state is State.READY
    assert world.gather("(world_size, dist.get_world_size())") == [(2, 2), (2, 2)]
    world.execute(
        "dist.barrier(group=pair)\n"
        "sharded(torch.ones(2, 64)).sum().backward()\n"
        "train(net, optimizer, [1])"
    )
    world.scale(3)
    assert world.gather("dist.get_world_size()") == [3] * 3


def test_a_survivor_that_dies_meanwhile_is_replaced(world: World) -> None:
    """The world is of the new size all the same."""
    world.execute("kept = rank; layer = torch.nn.Linear(1, 1)")
    survivor = psutil.Process(world.pids[1])

    def end(_: psutil.Process) -> None:
        if survivor.is_running():
            survivor.kill()

    with each_new_worker(world, end):
        world.scale(3)
    assert world.gather("dist.get_world_size()") == [3] * 3
    assert world.gather("globals().get('kept')") == [0, None, None]
    assert "layer" in world.session.names.lacking([1])


LATE = """
import time
from nbdist.worker.group.group import Group
at_once = Group.regroup
def late(*args):
    while not Path({gate!r}).exists(): time.sleep(0.01)
    Group.regroup = at_once
    return at_once(*args)
Group.regroup = late
"""


def test_stop_while_it_is_scaled(world: World, tmp_path: Path) -> None:
    """The next cell finds the ranks that there are then, with a group."""
    main, gate = threading.main_thread().ident, tmp_path / "gate"
    assert main is not None
    world.execute(LATE.format(gate=str(gate)), ranks=[0])
    with (
        each_new_worker(world, lambda _: signal.pthread_kill(main, signal.SIGINT)),
        pytest.raises(KeyboardInterrupt),
    ):
        world.scale(3)
    assert world.state is State.BROKEN
    gate.touch()
    world.session.heal()
    assert world.gather("(rank, world_size, dist.get_world_size())") == [
        (rank, 3, 3) for rank in range(3)
    ]


COUNT = """
import gc, os
gc.collect()
left = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
"""


def test_nothing_piles_up(world: World) -> None:
    """After ten times there are as many descriptors and threads as after the first two."""
    counts = []
    world.execute(MODEL)
    for _ in range(5):
        for size in (3, 2):
            world.scale(size)
            world.execute("dist.barrier(group=dist.new_group())")
        world.execute(COUNT)
        counts.append(world.gather("left"))
    for first, last in zip(counts[0], counts[-1], strict=True):
        assert last[0] < first[0] + 5
        assert last[1] < first[1] + 5


def test_words() -> None:
    """Of one rank and of several."""
    assert replaced_text([2], "x") == "rank 2 was restarted and its variables (x) are gone"
    assert replaced_text([2, 0], "") == "ranks 0,2 were restarted and their variables are gone"
    two: Any = Workers(WorldConfig(2, log_dir=""))
    assert healing_text(two, [1]).endswith(" are gone; other ranks are unaffected.")
    assert healing_text(two, [0, 1]).endswith(" are gone.")


def test_what_nobody_wants_run_again(world: World) -> None:
    """Is not said to be."""
    with pytest.raises(WorkerError):
        world.execute("1 / 0")
    assert world.session.running is not None
    assert world.session.running.restart == ""


MISSING = "No module named 'mine'"


def test_a_module_of_the_folder(tmp_path: Path) -> None:
    """A file, or a package, or what is in one: the option that sends it."""
    (tmp_path / "mine.py").touch()
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    (tmp_path / "pkg" / "part.py").touch()
    said = missing_text(MISSING, "b", tmp_path, [], None)
    where = "is in the notebook's folder, which b does not have: `--sync-code` sends it."
    assert said == f"`mine.py` {where}"
    said = missing_text(
        "No module named 'pkg.part'; 'pkg' is not a package", "b", tmp_path, [], None
    )
    assert said == f"`pkg/part.py` {where}"
    assert missing_text("No module named 'pkg'", "b", tmp_path, [], None).startswith(
        "`pkg/__init__.py`"
    )


@pytest.mark.world
def test_a_module_that_is_left_out(tmp_path: Path) -> None:
    """Why, and how it goes along; nothing of one that does."""
    (tmp_path / "mine.py").touch()
    code = CodeSync(tmp_path)
    code.listing.look()
    assert missing_text(MISSING, "b", tmp_path, [], code) == ""
    (tmp_path / ".nbdistignore").write_text("mine.py\n")
    code.listing.look()
    assert missing_text(MISSING, "b", tmp_path, [], code) == (
        "`mine.py` is in the notebook's folder, but `--sync-code` leaves it out: git or nbdist "
        "ignores it. `!mine.py` in .nbdistignore sends it."
    )


def test_modules_that_lie_elsewhere(tmp_path: Path) -> None:
    """In another folder of the notebook's path, or installed."""
    folder, other = tmp_path / "nb", tmp_path / "src"
    installed = tmp_path / "lib" / "python3.11" / "site-packages"
    for each in (folder, other, installed / "package"):
        each.mkdir(parents=True)
    (other / "mine.py").touch()
    (installed / "package" / "__init__.py").touch()
    path = ["", str(other), str(installed)]
    assert missing_text(MISSING, "b", folder, path, None) == (
        f"`mine` is in {other}, which b does not have: install it there."
    )
    said = missing_text("No module named 'package.sub'", "b", folder, path, None)
    assert said == "`package` is installed on the notebook's machine, but not on b."


def test_other_errors(tmp_path: Path) -> None:
    """Of modules that are nowhere, and of none."""
    assert missing_text("No module named 'nowhere_at_all'", "b", tmp_path, [], None) == ""
    assert missing_text("invalid literal", "b", tmp_path, [], None) == ""
