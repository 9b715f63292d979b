"""Tests of `nbdist.world.exchange`: what comes back on which ranks, and what a death leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nbdist.errors import UsageError, WorkerDied, WorkerError, WorldNotStarted
from nbdist.wire.spec import versions_here
from nbdist.world.snapshot_store import Snapshot
from nbdist.world.world import World
from tests.waiting import SOON

pytestmark = [pytest.mark.shared_world(2), pytest.mark.usefixtures("empty_snapshot_folder")]


def entries(folder: Path) -> list[str]:
    """What lies in a folder; complete snapshots have no dot in front."""
    return sorted(each.name for each in folder.iterdir())


def break_off(snapshot: Snapshot, rank: int) -> None:
    """Half of a rank's file is lost."""
    file = snapshot.folder / f"rank{rank}.frames"
    os.truncate(file, file.stat().st_size // 2)


def test_names_that_some_ranks_have(world: World) -> None:
    """Each rank has its own names; what cannot be pickled is left out only if it was not asked."""
    world.restart()
    world.execute("import _thread\nx = rank\nlock = _thread.allocate_lock()")
    world.execute("history = [1]", ranks=[0])
    taken = world.snapshot(name="a")
    assert [taken.parts[rank].names for rank in (0, 1)] == [("history", "x"), ("x",)]
    assert taken.left_out == {"lock": "TypeError: cannot pickle '_thread.lock' object"}
    with pytest.raises(UsageError, match=r"ranks 0-1: `lock` cannot be pickled: TypeError"):
        world.snapshot(["x", "lock"], name="a")
    with pytest.raises(UsageError, match=r"`a@\S+` has no y; it has history, x"):
        world.restore(["y"], name="a")
    with pytest.raises(UsageError, match=r"There is no snapshot `b` in .*\. Available: `a`"):
        world.restore(name="b")


def test_variables_come_first(world: World) -> None:
    """By position they are variables; the name by keyword, or first as it once was."""
    world.execute("x, y = 1, 2")
    assert world.snapshot("x", "y", name="a").names == ["x", "y"]
    assert world.snapshot("b", ["x"]).key.startswith("b@")
    assert world.snapshot(name="c", names=["y"]).names == ["y"]
    assert world.snapshot("d-1").name == "d-1"
    with pytest.raises(UsageError, match=r"no rank has `z`\. .*: `%dist_snapshot x --name z`"):
        world.snapshot("z", "x")
    assert world.restore("y", name="a").names == ("y",)
    assert world.restore("b").snapshot.name == "b"
    assert world.restore("a", ["x"]).names == ("x",)


def test_another_size(world: World) -> None:
    """A world of another size says what it can take, and takes it."""
    world.execute("x = 10 + rank")
    world.snapshot(["x"], name="a")
    world.restart(3)
    with pytest.raises(UsageError, match=r"of 2 ranks \(0-1\), and this world has 3\. `-r 0-1`"):
        world.restore(name="a")
    world.restore(name="a", from_rank=1)
    assert world.gather("x") == [11, 11, 11]
    assert world.session.names.bound(2) == ["x"]
    world.restore(name="a", ranks=[0])
    assert world.gather("x") == [10, 11, 11]
    with pytest.raises(UsageError, match=r"`--from 2`: .* is of 2 ranks"):
        world.restore(name="a", from_rank=2)


def test_functions_of_another_python(world: World) -> None:
    """They are refused in one line with both versions, and nothing is bound beside them."""
    world.execute("from nbdist.values import definitions\ndef f(): pass\nx = 'old'")
    world.execute("here, definitions.PYTHON = definitions.PYTHON, (3, 1)")
    taken = world.snapshot("f", "x", name="a")
    manifest = taken.folder / "manifest.json"
    told = json.loads(manifest.read_text())
    assert told["versions"] == {**versions_here()}
    told["versions"]["cloudpickle"] = "1.5.0"
    manifest.write_text(json.dumps(told))
    world.execute("definitions.PYTHON, x = here, 'now'")
    here = ".".join(map(str, sys.version_info[:2]))
    said = f"ranks 0-1: .* a function of Python 3.1 cannot be used in {here} "
    said += r"\(written with cloudpickle 1.5.0, here is .*\)\."
    with pytest.raises(UsageError, match=said) as it:
        world.restore(name="a")
    assert "\n" not in str(it.value)
    assert world.gather("x") == ["now", "now"]


def test_a_damaged_one_is_not_taken(world: World) -> None:
    """A file that was cut or changed: nothing is bound on any rank, and the next is named."""
    world.execute("x = 'old'")
    world.snapshot(name="a")
    world.execute("x = 'new'")
    newest = world.snapshot(name="a")
    older = world.snapshot_store.of("a")[1]
    world.execute("x = 'now'")
    file = newest.folder / "rank1.frames"
    contents = file.read_bytes()
    file.write_bytes(contents[:-9] + bytes(9))
    remedy = f"`%dist_restore --name {older.key}` takes the one of"
    with pytest.raises(UsageError, match=f"other contents than were written.* {remedy}"):
        world.restore(name="a")
    assert world.gather("x") == ["now", "now"]
    break_off(newest, 0)
    with pytest.raises(UsageError, match=rf"rank0.frames has [\d,]+ of [\d,]+ bytes.* {remedy}"):
        world.restore(name="a")
    (newest.folder / "manifest.json").unlink()
    with pytest.raises(UsageError, match=r"manifest\.json cannot be read"):
        world.restore()
    break_off(older, 1)
    with pytest.raises(UsageError, match=r"There is no older one"):
        world.restore()


def test_a_rank_killed_while_it_writes(world: World, tmp_path: Path) -> None:
    """The snapshots before are as they were, and nothing of this one is left."""
    world.execute("x = 1")
    world.snapshot(["x"], name="a")
    world.execute(
        "import os\nclass Bomb:\n    def __reduce__(self): os.kill(os.getpid(), 9)\n"
        "x = Bomb() if rank else 2"
    )
    with pytest.raises(WorkerDied):
        world.snapshot(["x"], name="a")
    assert len(entries(tmp_path / "a")) == 2
    world.restore(name="a")
    assert world.gather("x") == [1, 1]


def test_nothing_to_write(world: World, tmp_path: Path) -> None:
    """It is told in a line, and no folder is left."""
    world.restart()
    with pytest.raises(UsageError, match=r"written: no cell has bound a name on the workers\.$"):
        world.snapshot(name="a")
    world.execute("x = 1", ranks=[1])
    with pytest.raises(UsageError, match=r"written: no rank has `y`, `z`\.$"):
        world.snapshot(["y", "x", "z"], name="a")
    assert entries(tmp_path / "a") == [".lock"]


def test_what_cannot_be_rebuilt(world: World) -> None:
    """It is told in a line, and nothing is bound on any rank."""
    world.execute(
        "def made():\n    if rank: raise ValueError('not now')\n"
        "class Odd:\n    def __reduce__(self): return made, ()\n"
        "x, y = Odd(), 'then'"
    )
    world.snapshot(["x", "y"], name="a")
    world.execute("y = 'now'")
    with pytest.raises(UsageError, match="cannot be restored: rank 1: ValueError: not now"):
        world.restore(name="a")
    assert world.gather("y") == ["now", "now"]


def test_a_rank_that_raises_while_it_writes(world: World, tmp_path: Path) -> None:
    """What it raised is told as it is, also where that is an OSError, and no snapshot is left."""
    world.execute(
        "class Odd:\n    tries = 0\n    def __reduce__(self):\n        Odd.tries += 1\n"
        "        if Odd.tries > 2: raise FileNotFoundError('lost')\n        return Odd, ()\n"
        "x = Odd()"
    )
    with pytest.raises(FileNotFoundError, match="FileNotFoundError: lost") as caught:
        world.snapshot(["x"], name="a")
    assert isinstance(caught.value, WorkerError)
    assert entries(tmp_path / "a") == [".lock"]


KILLED = """
import os, sys
from nbdist import World

with World(2, log_dir="") as world:
    world.execute("x = 1")
    world.snapshot(["x"], name="a")
    world.execute(
        "import os, time\\nclass Bomb:\\n    def __reduce__(self):\\n"
        f"        os.kill({os.getpid()}, 9); time.sleep(60)\\n"
        "x = Bomb() if rank else 2"
    )
    world.snapshot(["x"], name="a")
"""


def test_the_notebook_killed_while_ranks_write(world: World, tmp_path: Path) -> None:
    """What it left is no snapshot, and goes with the next one."""
    command = [sys.executable, "-c", KILLED]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SOON)
    assert done.returncode == -9, done.stderr
    left = entries(tmp_path / "a")
    assert len(left) == 3
    assert left[1].startswith(".part-")
    assert len(world.snapshot_store.all()) == 1
    world.restore(name="a")
    assert world.gather("x") == [1, 1]
    world.snapshot(["x"], name="b")
    assert not [name for name in entries(tmp_path / "a") if name.startswith(".part-")]


def test_without_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, and nothing is left behind."""
    monkeypatch.setenv("NBDIST_SNAPSHOT_DIR", str(tmp_path))
    with pytest.raises(WorldNotStarted):
        World(2).snapshot(["x"], name="a")
    with pytest.raises(UsageError, match="There are no snapshots in"):
        World(2).restore()
