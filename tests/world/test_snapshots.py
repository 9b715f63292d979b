"""Tests of snapshots of a world: what comes back, and what a kill or a full disk leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist.errors import UsageError, WorkerDied, WorldNotStarted
from nbdist.node.worker_logs import RUNS_KEPT, drop_old_runs
from nbdist.world.snapshot_store import KEPT, Snapshot, root_folder
from nbdist.world.states import State
from nbdist.world.world import World
from tests.faults.test_training import TRAINING
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world

# Its import takes a second in every new worker.
WITHOUT_FSDP = TRAINING.replace("from torch.distributed.fsdp import fully_shard", "")


@pytest.fixture(scope="module")
def started(new_world: NewWorld) -> Iterator[World]:
    with new_world(2) as world:
        yield world


@pytest.fixture
def world(started: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """The world with an empty folder for its snapshots."""
    monkeypatch.setenv("NBDIST_SNAPSHOT_DIR", str(tmp_path))
    if started.state is not State.READY or started.size != 2:
        started.restart(2)
    return started


def entries(folder: Path) -> list[str]:
    """What lies in a folder; complete snapshots have no dot in front."""
    return sorted(each.name for each in folder.iterdir())


def break_off(snapshot: Snapshot, rank: int) -> None:
    """Half of a rank's file is lost."""
    file = snapshot.folder / f"rank{rank}.frames"
    os.truncate(file, file.stat().st_size // 2)


# --- what comes back ----------------------------------------------------------------------


def test_training_goes_on_bit_by_bit(world: World) -> None:
    """Five steps, a snapshot, five more; new workers do these from the snapshot alike.

    On three ranks, where the last bits of a sum depend on DDP's buckets.
    """
    world.restart(3)
    world.execute(f"{WITHOUT_FSDP}\nnet, optimizer = make('DDP')\ntrain(net, optimizer, range(5))")
    world.snapshot("five")
    world.execute("train(net, optimizer, range(5, 10))")
    went_on = world.gather("weights(net)")
    world.restart()
    world.restore("five")
    world.execute("train(net, optimizer, range(5, 7))")
    world.snapshot("seven")
    world.restore("seven")
    world.execute("train(net, optimizer, range(7, 10))")
    for restored, expected in zip(world.gather("weights(net)"), went_on, strict=True):
        assert restored.equal(expected)


def test_objects_stay_shared(world: World) -> None:
    """A rank's variables are one graph: what shared an object does so again, views too."""
    world.execute(
        "net = torch.nn.Linear(2, 2); optimizer = torch.optim.SGD(net.parameters(), lr=1.0)\n"
        "net(torch.ones(2)).sum().backward()\n"
        "whole = torch.arange(6.0); part = whole[2:4]; both = [whole, part]"
    )
    world.snapshot("a", ["net", "optimizer", "whole", "part", "both"])
    world.execute("del net, optimizer, whole, part, both")
    assert world.restore("a").names == ("both", "net", "optimizer", "part", "whole")
    world.execute(
        "assert optimizer.param_groups[0]['params'][0] is net.weight\n"
        "assert net.weight.grad.tolist() == [[1, 1], [1, 1]]\n"
        "part.fill_(9)\n"
        "assert whole[3] == 9 and both[0] is whole and both[1] is part"
    )


def test_random_numbers_go_on(world: World) -> None:
    """Python, numpy and torch go on with the numbers that would have come."""
    draw = (
        "import random, numpy\nx = 1\n"
        "drawn = random.random(), numpy.random.rand(), torch.rand(1).item()"
    )
    world.execute(f"{draw}\ntorch.manual_seed(rank)")
    world.snapshot("a", ["x"])
    world.execute(draw)
    first = world.gather("drawn")
    world.restart()
    world.restore()
    world.execute(draw)
    assert world.gather("drawn") == first
    world.restore("a", from_rank=0)
    world.execute(draw)
    assert world.gather("drawn") != first


def test_cell_functions_come_with_what_they_use(world: World) -> None:
    """Functions and classes of cells are rebuilt in the workers' namespace, with their names."""
    world.execute(
        "import math as m\nscale = 3\n"
        "def times(x): return m.floor(x) * scale\n"
        "class Net:\n    def run(self): return times(rank + 0.5)\nnet = Net()"
    )
    world.snapshot("a", ["net"])
    world.restart()
    assert world.restore().names == ("net",)
    assert world.gather("net.run()") == [0, 3]
    world.execute("scale = 5")
    assert world.gather("net.run()") == [0, 5]


def test_names_that_some_ranks_have(world: World) -> None:
    """Each rank has its own names; what cannot be pickled is left out only if it was not asked."""
    world.restart()
    world.execute("import _thread\nx = rank\nlock = _thread.allocate_lock()")
    world.execute("history = [1]", ranks=[0])
    taken = world.snapshot("a")
    assert [taken.parts[rank].names for rank in (0, 1)] == [("history", "x"), ("x",)]
    assert taken.left_out == {"lock": "TypeError: cannot pickle '_thread.lock' object"}
    with pytest.raises(UsageError, match=r"ranks 0-1: `lock` cannot be pickled: TypeError"):
        world.snapshot("a", ["x", "lock"])
    with pytest.raises(UsageError, match=r"`a@\S+` has no y; it has history, x"):
        world.restore("a", ["y"])
    with pytest.raises(UsageError, match=r"There is no snapshot `b` in .*; there are a"):
        world.restore("b")


def test_sharded_modules_are_refused(world: World) -> None:
    """What FSDP2 has made is named, with what writes it."""
    world.execute(f"{TRAINING}\nnet, optimizer = make('FSDP2')")
    for name in ("net", "optimizer"):
        with pytest.raises(UsageError, match=rf"`{name}` .*torch.distributed.checkpoint writes"):
            world.snapshot("a", [name])


def test_another_size(world: World) -> None:
    """A world of another size says what it can take, and takes it."""
    world.execute("x = 10 + rank")
    world.snapshot("a", ["x"])
    world.restart(3)
    with pytest.raises(UsageError, match=r"of 2 ranks \(0-1\), and this world has 3\. `-r 0-1`"):
        world.restore("a")
    world.restore("a", from_rank=1)
    assert world.gather("x") == [11, 11, 11]
    world.restore("a", ranks=[0])
    assert world.gather("x") == [10, 11, 11]
    with pytest.raises(UsageError, match=r"`--from-rank 2`: .* is of 2 ranks"):
        world.restore("a", from_rank=2)


# --- what is kept, and what is left -------------------------------------------------------


def test_the_newest_are_kept(world: World, tmp_path: Path) -> None:
    """Of each name three, also within one second; older ones are found by their stamps."""
    for x in range(KEPT + 2):
        world.execute(f"x = {x}")
        world.snapshot("a", ["x"])
    taken = world.snapshot_store.of("a")
    assert len(taken) == KEPT
    assert len(entries(tmp_path / "a")) == KEPT + 1  # and the lock
    world.restore(taken[-1].key)
    assert world.gather("x") == [2, 2]
    world.restore("a")
    assert world.gather("x") == [4, 4]


def test_a_damaged_one_is_not_taken(world: World) -> None:
    """A file that was cut or changed: nothing is bound on any rank, and the next is named."""
    world.execute("x = 'old'")
    world.snapshot("a")
    world.execute("x = 'new'")
    newest = world.snapshot("a")
    older = world.snapshot_store.of("a")[1]
    world.execute("x = 'now'")
    file = newest.folder / "rank1.frames"
    contents = file.read_bytes()
    file.write_bytes(contents[:-9] + bytes(9))
    remedy = f"`%dist_restore {older.key}` takes the one of"
    with pytest.raises(UsageError, match=f"other contents than were written.* {remedy}"):
        world.restore("a")
    assert world.gather("x") == ["now", "now"]
    break_off(newest, 0)
    with pytest.raises(UsageError, match=rf"rank0.frames has [\d,]+ of [\d,]+ bytes.* {remedy}"):
        world.restore("a")
    (newest.folder / "manifest.json").unlink()
    with pytest.raises(UsageError, match=r"manifest\.json cannot be read"):
        world.restore()
    break_off(older, 1)
    with pytest.raises(UsageError, match=r"There is no older one"):
        world.restore()


def test_a_rank_killed_while_it_writes(world: World, tmp_path: Path) -> None:
    """The snapshots before are as they were, and nothing of this one is left."""
    world.execute("x = 1")
    world.snapshot("a", ["x"])
    world.execute(
        "import os\nclass Bomb:\n    def __reduce__(self): os.kill(os.getpid(), 9)\n"
        "x = Bomb() if rank else 2"
    )
    with pytest.raises(WorkerDied):
        world.snapshot("a", ["x"])
    assert len(entries(tmp_path / "a")) == 2
    world.restore("a")
    assert world.gather("x") == [1, 1]


KILLED = """
import os, sys
from nbdist import World

with World(2, log_dir="") as world:
    world.execute("x = 1")
    world.snapshot("a", ["x"])
    world.execute(
        "import os, time\\nclass Bomb:\\n    def __reduce__(self):\\n"
        f"        os.kill({os.getpid()}, 9); time.sleep(60)\\n"
        "x = Bomb() if rank else 2"
    )
    world.snapshot("a", ["x"])
"""


def test_the_notebook_killed_while_ranks_write(world: World, tmp_path: Path) -> None:
    """What it left is no snapshot, and goes with the next one."""
    command = [sys.executable, "-c", KILLED]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=40)
    assert done.returncode == -9, done.stderr
    left = entries(tmp_path / "a")
    assert len(left) == 3
    assert left[1].startswith(".part-")
    assert len(world.snapshot_store.all()) == 1
    world.restore()
    assert world.gather("x") == [1, 1]
    world.snapshot("b", ["x"])
    assert not [name for name in entries(tmp_path / "a") if name.startswith(".part-")]


def test_no_room(world: World, tmp_path: Path) -> None:
    """Where a rank cannot write, one line says so, and earlier snapshots are as they were."""
    world.execute("x = 1")
    world.snapshot("a", ["x"])
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, ({}, resource.RLIM_INFINITY))"
    world.execute(f"import resource\nx = torch.zeros(1 << 20)\n{limit.format(1 << 20)}", ranks=[1])
    with pytest.raises(UsageError, match=r"No snapshot was written: rank 1: File too large\.$"):
        world.snapshot("a", ["x"])
    world.execute(limit.format("resource.RLIM_INFINITY"), ranks=[1])
    assert len(entries(tmp_path / "a")) == 2
    world.restore("a")
    assert world.gather("x") == [1, 1]


def test_a_folder_that_cannot_be_made(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line with the folder, and how to name another."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NBDIST_SNAPSHOT_DIR", str(tmp_path / "file"))
    with pytest.raises(UsageError, match=r"written: Not a directory \(.*NBDIST_SNAPSHOT_DIR"):
        world.snapshot("a")


def test_two_writers_of_one_name(world: World) -> None:
    """The second is refused; the first one's folder is not taken for a leftover."""
    with (
        world.snapshot_store.writing("a") as folder,
        world.snapshot_store.writing("b"),
        pytest.raises(UsageError, match="Another notebook is writing a snapshot `a`"),
        world.snapshot_store.writing("a"),
    ):
        pytest.fail("two write at once")
    assert not folder.exists()


def test_without_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, and nothing is left behind."""
    monkeypatch.setenv("NBDIST_SNAPSHOT_DIR", str(tmp_path))
    with pytest.raises(WorldNotStarted):
        World(2).snapshot("a", ["x"])
    with pytest.raises(UsageError, match="There are no snapshots in"):
        World(2).restore()


def test_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the log files, which are dropped without them; else in the state folder."""
    monkeypatch.delenv("NBDIST_SNAPSHOT_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert root_folder("") == Path("/state/nbdist/snapshots")
    root = root_folder(str(tmp_path))
    assert root == tmp_path / "snapshots"
    root.mkdir()
    os.utime(root, (1, 1))
    for number in range(RUNS_KEPT + 1):
        (tmp_path / f"run{number}").mkdir()
    drop_old_runs(tmp_path)
    assert root.is_dir()
