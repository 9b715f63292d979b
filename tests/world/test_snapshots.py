"""Tests of `nbdist.world.snapshot_store`, and of snapshots of real ranks and their restores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.config import DEFAULT_POOL
from nbdist.errors import UsageError, WorkerDied, WorkerError, WorldNotStarted
from nbdist.system import folders
from nbdist.wire.ops import Written
from nbdist.wire.spec import versions_here
from nbdist.worker.ops.snapshot import write_frames
from nbdist.world.snapshot_store import (
    ELSEWHERE_SECONDS,
    MANIFEST,
    NO_FILE,
    SNAPSHOTS_PER_NAME,
    Snapshot,
    SnapshotStore,
    owner_of,
    root_folder,
)
from nbdist.world.world import World
from tests.waiting import once, press_stop, wait_until

pytestmark = [pytest.mark.shared_world(2), pytest.mark.usefixtures("empty_snapshot_folder")]


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path)


def take(store: SnapshotStore, name: str) -> Snapshot:
    """Publish a snapshot of two ranks with the same `x`, from which rank 1 has left out `lock`."""
    with store.writing(name) as folder:
        parts = {}
        for rank in range(2):
            size, digest = write_frames(folder / f"rank{rank}.frames", [b"contents"])
            left_out = {"lock": "TypeError"} if rank else {}
            parts[rank] = Written("", ("x",), ("f",), left_out, size, digest, {"torch": "2.0"})
        return store.publish(folder, name, parts)


def entries(folder: Path) -> list[str]:
    """List the names in a folder; names of complete snapshots begin without a dot."""
    return sorted(each.name for each in folder.iterdir())


def test_a_complete_snapshot_is_found(store: SnapshotStore) -> None:
    """A snapshot is found by name, by stamp, or as the newest; this notebook's own is preferred."""
    with store.writing("a"):
        assert store.all() == []
    snapshot = take(store, "a")
    assert store.find("a") == store.find(f"a@{snapshot.stamp}") == store.find(None) == snapshot
    key, size = f"a@{snapshot.stamp}", 2 * snapshot.parts[0].size
    assert (snapshot.key, snapshot.names, snapshot.size) == (key, ["x"], size)
    assert (snapshot.left_out, snapshot.versions) == ({"lock": "TypeError"}, {"torch": "2.0"})
    assert (snapshot.parts[1].also, snapshot.problem, snapshot.distrust) == (("f",), "", "")
    own_store = SnapshotStore(store.root, "/mine.ipynb")
    own_snapshot, other_snapshot = (
        take(own_store, "b"),
        take(SnapshotStore(store.root, "/other.ipynb"), "b"),
    )
    assert (own_store.find("b"), own_store.of("b")) == (
        own_snapshot,
        [other_snapshot, own_snapshot],
    )


def test_incomplete_snapshots_are_removed(store: SnapshotStore) -> None:
    """The next snapshot of any name removes a killed writer's folder, but no folder of others."""
    with suppress(LookupError), store.writing("a") as folder:
        write_frames(folder / "rank0.frames", [b"contents"])
        raise LookupError
    assert entries(store.root / "a") == [".lock"]
    for name in (".part-killed", ".part-mine"):
        (store.root / "a" / name).mkdir()
    os.close(folders.claim(store.root / "a" / ".part-killed"))
    take(store, "b")
    assert entries(store.root / "a") == [".lock", ".part-mine"]


def test_only_the_newest_snapshots_are_kept(store: SnapshotStore) -> None:
    """The newest snapshots of each name are kept, in their order, whatever the clock says."""
    other = take(store, "b")
    keys = [take(store, "a").key for _ in range(SNAPSHOTS_PER_NAME + 2)]
    assert [each.key for each in store.of("a")] == keys[: -SNAPSHOTS_PER_NAME - 1 : -1]
    assert store.of("b") == [other]
    assert len(entries(store.root / "a")) == SNAPSHOTS_PER_NAME + 1  # one more for the lock file
    other.folder.rename(other.folder.with_name("29991231-235959"))
    stamps = [f"29991231-235959.00{number}" for number in (1, 2)]
    assert [take(store, "b").stamp for _ in stamps] == stamps
    assert store.find("b").stamp == stamps[-1]


def test_notebooks_of_one_name_keep_their_own(store: SnapshotStore) -> None:
    """Notebooks of one name neither remove nor restore each other's snapshots by that name."""
    a, b = (SnapshotStore(store.root, f"/proj{each}/Untitled.ipynb") for each in "AB")
    assert a.default_name == b.default_name == "Untitled"
    first = take(a, "Untitled")
    others = [take(b, "Untitled") for _ in range(SNAPSHOTS_PER_NAME + 2)]
    assert a.of("Untitled") == [*reversed(others[-SNAPSHOTS_PER_NAME:]), first]
    assert a.find("Untitled") == a.find(None) == first
    damaged = take(a, "Untitled")
    (damaged.folder / MANIFEST).write_text("")
    assert f"--name {first.key}`" in str(a.damage_error(a.find("Untitled"), "it is cut"))
    assert [each.key for each in a.remove("Untitled")] == [damaged.key, first.key]
    assert a.of("Untitled") == [*reversed(others[-SNAPSHOTS_PER_NAME:])]


def test_a_name_of_another_notebook_is_not_removed(store: SnapshotStore) -> None:
    """A notebook removes another's snapshot only by its stamp; then no file of the name is left."""
    a, b = (SnapshotStore(store.root, f"/proj{each}/Untitled.ipynb") for each in "AB")
    snapshot = take(b, "x")
    message = f"another notebook has saved it. `%dist_snapshot --remove {snapshot.key}` removes"
    with pytest.raises(UsageError, match=message):
        a.remove("x")
    assert a.remove(snapshot.key) == [snapshot]
    assert entries(store.root) == []


RUN = (
    "import sys, pathlib\nfrom tests.world.test_snapshots import SnapshotStore, take\n"
    "store = SnapshotStore(pathlib.Path(sys.argv[1]), '/train.py')\n"
    "print(take(store, 'a').key, flush=True)\ninput()"
)


def alter(snapshot: Snapshot, **fields: Any) -> None:
    """Change fields in the manifest of a snapshot."""
    manifest = snapshot.folder / MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **fields}))


def test_another_machines_snapshot_stays_for_days(store: SnapshotStore) -> None:
    """A snapshot of a run on another machine stays for days, because the run may still go on."""
    recent, old = take(store, "a"), take(store, "a")
    alter(recent, process="elsewhere 1 1")
    alter(old, process="elsewhere 1 1", time=old.time - ELSEWHERE_SECONDS)
    own_keys = [take(store, "a").key for _ in range(SNAPSHOTS_PER_NAME)]
    assert [each.key for each in store.of("a")] == [*reversed(own_keys), recent.key]


@pytest.mark.world
def test_a_runs_snapshot_stays_until_the_run_ends(store: SnapshotStore) -> None:
    """A later run of a script finds an earlier run's snapshot, but keeps it until that run ends."""
    own_store = SnapshotStore(store.root, "/train.py")
    command = [sys.executable, "-c", RUN, str(store.root)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        key = process.stdout.readline().strip()  # type: ignore[union-attr]
        assert own_store.find(None).key == key
        alter(own_store.find(None), time=time.time() - 2 * ELSEWHERE_SECONDS)
        own_keys = [take(own_store, "a").key for _ in range(SNAPSHOTS_PER_NAME + 1)]
        assert [each.key for each in own_store.of("a")] == [*reversed(own_keys[1:]), key]
        process.communicate("\n")
    last = take(own_store, "a").key
    assert [each.key for each in own_store.of("a")] == [last, *reversed(own_keys[2:])]


def test_an_invalid_name_is_refused(store: SnapshotStore) -> None:
    """An invalid name is refused before anything is written."""
    for name in ("", ".", "..", ".a", "a/b", "a@b", "-a", "é", "a b", "a\n"):
        with pytest.raises(UsageError, match="is not a name for a snapshot"), store.writing(name):
            pytest.fail("it is written")
    assert entries(store.root) == []


def test_a_write_that_cannot_be_is_refused(store: SnapshotStore, tmp_path: Path) -> None:
    """A second writer of a name is refused, and so is a folder in which nothing can be written."""
    with (
        store.writing("a") as folder,
        store.writing("b"),
        pytest.raises(UsageError, match="Another notebook is writing a snapshot `a`"),
        store.writing("a"),
    ):
        pytest.fail("two write at once")
    assert not folder.exists()
    (tmp_path / "file").write_text("")
    message = r"written: Not a directory \(.*NBDIST_SNAPSHOT_DIR"
    with pytest.raises(UsageError, match=message), SnapshotStore(tmp_path / "file").writing("a"):
        pytest.fail("it is written")


def test_a_missing_snapshot_is_refused_in_one_line(store: SnapshotStore) -> None:
    """The error is a line that names the searched folder and the available snapshots."""
    for key in (None, "a"):
        with pytest.raises(UsageError, match=f"There are no snapshots in {store.root}"):
            store.find(key)
    for name in "gfedcba":
        take(store, name)
    for key in ("x", "a@20200101-000000", "../a", ".part-a"):
        with pytest.raises(UsageError) as caught:
            store.find(key)
        available = ", ".join(f"`{name}`" for name in "abcdef")
        message = f"There is no snapshot `{key}` in {store.root}. Available: {available} …."
        assert str(caught.value) == message


DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    (MANIFEST, lambda file: os.truncate(file, 100), "manifest.json cannot be read"),
    (MANIFEST, lambda file: file.write_text('{"ranks": {"x": {}}}'), "manifest.json cannot be"),
    ("rank1.frames", lambda file: file.unlink(), "rank1.frames is missing"),
    ("rank1.frames", lambda file: os.truncate(file, 9), "rank1.frames has 9 of 35 bytes"),
]


def test_damage_is_seen(store: SnapshotStore) -> None:
    """A damaged snapshot is found, with a text about the damage; the older snapshot is intact."""
    for name, (file, damage, problem) in zip("abcd", DAMAGES, strict=True):
        older, damaged = take(store, name), take(store, name)
        damage(damaged.folder / file)
        newest, second = store.of(name)
        assert (newest.problem[: len(problem)], second.problem) == (problem, "")
        assert (store.find(name).key, store.find(older.key)) == (damaged.key, older)


def test_the_next_older_intact_snapshot_is_named(store: SnapshotStore) -> None:
    """The error has the command that restores an older snapshot, if an older snapshot is intact."""
    oldest, older, newest = (take(store, "a") for _ in range(3))
    (older.folder / "rank1.frames").unlink()
    message = str(store.damage_error(newest, "it is cut"))
    assert message.startswith(f"The snapshot `{newest.key}` is damaged: it is cut. ")
    assert message.endswith(f"`%dist_restore --name {oldest.key}` takes the one of {oldest.clock}.")
    manifest = json.loads((oldest.folder / MANIFEST).read_text())
    (oldest.folder / MANIFEST).write_text(json.dumps(manifest | {"format": 1, "nbdist": "0.0"}))
    assert store.find(oldest.key).problem == "nbdist 0.0 wrote it in another format"
    assert str(store.damage_error(newest, "it is cut")).endswith("There is no older one.")


def test_snapshots_lie_beside_log_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots lie in the folder of log files, or without log files in the state folder."""
    monkeypatch.delenv("NBDIST_SNAPSHOT_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert root_folder("") == Path("/state/nbdist/snapshots")
    assert root_folder(str(tmp_path)) == tmp_path / "snapshots"


# --- snapshots of real ranks --------------------------------------------------------------


@pytest.mark.parametrize("text", ["", '{"key": "a', "{}"])
def test_a_damaged_connection_file_gives_no_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """A damaged connection file is no error: the notebook counts as a program without a file."""
    (tmp_path / "kernel.json").write_text(text)
    app = SimpleNamespace(connection_file=str(tmp_path / "kernel.json"), connection_dir="")
    kernel = SimpleNamespace(initialized=lambda: True, instance=lambda: app)
    monkeypatch.setattr("ipykernel.kernelapp.IPKernelApp", kernel)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", None, raising=False)
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    assert owner_of(DEFAULT_POOL) == NO_FILE


def test_each_rank_saves_its_own_names(world: World, tmp_path: Path) -> None:
    """A rank saves its own names; an unpicklable variable is left out, or refused if requested."""
    world.restart()
    with pytest.raises(UsageError, match=r"written: no cell has bound a name on the workers\.$"):
        world.snapshot(name="a")
    world.execute("import _thread\nx = rank\nlock = _thread.allocate_lock()")
    world.execute("history = [1]", ranks=[0])
    with pytest.raises(UsageError, match=r"written: no rank has `y`, `z`\.$"):
        world.snapshot(["y", "x", "z"], name="a")
    assert entries(tmp_path / "a") == [".lock"]
    snapshot = world.snapshot(name="a")
    assert [snapshot.parts[rank].names for rank in (0, 1)] == [("history", "x"), ("x",)]
    assert snapshot.left_out == {"lock": "TypeError: cannot pickle '_thread.lock' object"}
    with pytest.raises(UsageError, match=r"ranks 0-1: `lock` cannot be pickled: TypeError"):
        world.snapshot(["x", "lock"], name="a")
    with pytest.raises(UsageError, match=r"`a@\S+` has no y; it has history, x"):
        world.restore(["y"], name="a")
    with pytest.raises(UsageError, match=r"There is no snapshot `b` in .*\. Available: `a`"):
        world.restore(name="b")


def test_positional_arguments_are_variables(world: World) -> None:
    """Positional arguments name variables, `name=` the snapshot; errors show the right command."""
    world.execute("x, y = 1, 2")
    assert world.snapshot("x", "y", name="a").names == ["x", "y"]
    assert world.snapshot(["y"], name="c").names == ["y"]
    with pytest.raises(UsageError, match=r"no rank has `z`\. .*: `%dist_snapshot x --name z`"):
        world.snapshot("z", "x")
    for part in ("x.real", "x[0]"):
        with pytest.raises(UsageError, match=r"no rank has `x.*: `%dist_snapshot x` saves"):
            world.snapshot("y", part)
    assert world.restore("y", name="a").names == ("y",)
    message = r"has no a; it has y\. `%dist_restore --name a` restores the snapshot of this name"
    with pytest.raises(UsageError, match=message):
        world.restore("a", name="c")
    with pytest.raises(WorldNotStarted):
        World(2).snapshot(["x"], name="a")


def test_a_world_of_another_size_restores_some_ranks(world: World) -> None:
    """A full restore is refused with the remedy; single ranks of the snapshot can be restored."""
    world.execute("deep = 1", setup=True)
    world.execute("x = 10 + rank")
    world.snapshot(["x"], name="a")
    world.restart(3)
    assert world.gather("deep") == [1, 1, 1]
    with pytest.raises(UsageError, match=r"of 2 ranks \(0-1\), and this world has 3\. `-r 0-1`"):
        world.restore(name="a")
    world.restore(name="a", from_rank=1)
    assert world.gather("x") == [11, 11, 11]
    assert world.engine.names.bound(2) == ["deep", "x"]
    world.restore(name="a", ranks=[0])
    assert world.gather("x") == [10, 11, 11]
    with pytest.raises(UsageError, match=r"`--from 2`: .* is of 2 ranks"):
        world.restore(name="a", from_rank=2)


def test_functions_of_another_python_are_refused(world: World) -> None:
    """The error is a line with both versions of Python; other variables are not bound either."""
    world.execute("from nbdist.values import definitions\ndef f(): pass\nx = 'old'")
    world.execute("here, definitions.PYTHON = definitions.PYTHON, (3, 1)")
    manifest = world.snapshot("f", "x", name="a").folder / MANIFEST
    fields = json.loads(manifest.read_text())
    assert fields["versions"] == {**versions_here()}
    fields["versions"]["cloudpickle"] = "1.5.0"
    manifest.write_text(json.dumps(fields))
    world.execute("definitions.PYTHON, x = here, 'now'")
    version = ".".join(map(str, sys.version_info[:2]))
    message = rf"ranks 0-1: .* a function of Python 3.1 cannot be used in {version} "
    with pytest.raises(
        UsageError, match=rf"{message}\(written with cloudpickle 1.5.0, here is .*\)\."
    ) as caught:
        world.restore(name="a")
    assert "\n" not in str(caught.value)
    assert world.gather("x") == ["now", "now"]


def test_a_damaged_snapshot_is_not_restored(world: World) -> None:
    """If a file was cut or changed, nothing is bound, and the error names an older snapshot."""
    world.execute("x = 'old'")
    older = world.snapshot(name="a")
    world.execute("x = 'new'")
    newest = world.snapshot(name="a")
    world.execute("x = 'now'")
    files = [newest.folder / f"rank{rank}.frames" for rank in (0, 1)]
    files[1].write_bytes(files[1].read_bytes()[:-9] + bytes(9))
    remedy = f"`%dist_restore --name {older.key}` takes the one of"
    with pytest.raises(UsageError, match=f"other contents than were written.* {remedy}"):
        world.restore(name="a")
    assert world.gather("x") == ["now", "now"]
    os.truncate(files[0], 100)
    with pytest.raises(UsageError, match=rf"rank0.frames has 100 of [\d,]+ bytes.* {remedy}"):
        world.restore(name="a")
    os.truncate(older.folder / "rank1.frames", 100)
    with pytest.raises(UsageError, match=r"There is no older one"):
        world.restore()


def test_a_value_that_cannot_be_rebuilt_binds_nothing(world: World) -> None:
    """The error says why the value cannot be restored, and nothing is bound on any rank."""
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


WAITS = """
import os, time, weakref
made = []
class Odd:
    def __reduce__(self): return rebuilt, (other,)
class Big: pass
def rebuilt(other):
    while rank and not os.path.exists({dies!r}):
        open({waits!r}, "w").close()
        time.sleep(0.05)
    if rank: os.kill(os.getpid(), 9)
    big = Big()
    made.append(weakref.ref(big))
    return big
other, x = 1, Odd()
"""


@pytest.mark.parametrize("dies", [True, False])
def test_ranks_drop_an_interrupted_restore(world: World, tmp_path: Path, dies: bool) -> None:  # noqa: FBT001
    """After Stop, or the death of a rank, other ranks drop the values that they have read."""
    dies_at, waits_at = tmp_path / "dies", tmp_path / "waits"
    world.execute(WAITS.format(dies=str(dies_at), waits=str(waits_at)))
    world.snapshot(["x"], name="a")

    def is_due() -> bool:
        running = world.engine.task_table.last
        is_read = running is not None and running.transcript[0].done is not None
        return waits_at.exists() and is_read

    end = dies_at.touch if dies else press_stop
    with pytest.raises(WorkerDied if dies else KeyboardInterrupt), once(is_due, end, "rank 0 read"):
        world.restore(name="a")
    assert world.gather("len(made)", ranks=[0]) == [1]
    wait_until(lambda: world.gather("made[0]() is None", ranks=[0]) == [True])


BOMB = (
    "import os\nclass Bomb:\n    tries = 0\n    def __reduce__(self):\n        Bomb.tries += 1\n"
    "        if Bomb.tries > 2: {}\n        return Bomb, ()\nx = Bomb() if rank else 2"
)


def test_a_failed_write_keeps_earlier_snapshots(world: World, tmp_path: Path) -> None:
    """The error of a rank that fails during a write is raised; earlier snapshots stay."""
    world.execute("x = 1")
    world.snapshot(["x"], name="a")
    for source, kind, message in (
        ("raise FileNotFoundError('lost')", FileNotFoundError, "FileNotFoundError: lost"),
        ("os.kill(os.getpid(), 9)", WorkerDied, "SIGKILL"),
    ):
        world.execute(BOMB.format(source))
        with pytest.raises(kind, match=message) as caught:
            world.snapshot(["x"], name="a")
        assert isinstance(caught.value, WorkerError)
        assert len(entries(tmp_path / "a")) == 2
    world.restore(name="a")
    assert world.gather("x") == [1, 1]
