"""Tests of `nbdist.world.snapshot_store`: which snapshots there are, and which go."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from nbdist.errors import UsageError
from nbdist.system import folders
from nbdist.wire.ops import Written
from nbdist.worker.ops.snapshot import write_frames
from nbdist.world.snapshot_store import KEPT, MANIFEST, Snapshot, SnapshotStore, root_folder


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path)


def take(store: SnapshotStore, name: str) -> Snapshot:
    """One of two ranks that have `x` alike, and of which one has `lock` too."""
    with store.writing(name) as folder:
        parts = {}
        for rank in range(2):
            size, digest = write_frames(folder / f"rank{rank}.frames", [b"contents"])
            left_out = {"lock": "TypeError"} if rank else {}
            parts[rank] = Written("", ("x",), ("f",), left_out, size, digest, {"torch": "2.0"})
        return store.publish(folder, name, parts)


def entries(folder: Path) -> list[str]:
    """What lies in a folder; complete snapshots have no dot in front."""
    return sorted(each.name for each in folder.iterdir())


# --- writing ------------------------------------------------------------------------------


def test_a_complete_one_is_found(store: SnapshotStore) -> None:
    """By its name, by its stamp, or as the newest of all; it says what it holds."""
    with store.writing("a"):
        assert store.all() == []
    taken = take(store, "a")
    assert store.find("a") == store.find(f"a@{taken.stamp}") == store.find(None) == taken
    assert (taken.key, taken.names, taken.size) == (
        f"a@{taken.stamp}",
        ["x"],
        2 * taken.parts[0].size,
    )
    assert (taken.left_out, taken.parts[1].also, taken.versions) == (
        {"lock": "TypeError"},
        ("f",),
        {"torch": "2.0"},
    )
    assert (taken.problem, taken.distrust) == ("", "")


def test_one_of_this_notebook_goes_before_anothers(tmp_path: Path) -> None:
    """Of a name that both have used, also where the other's is newer."""
    mine = SnapshotStore(tmp_path, "/mine.ipynb")
    taken, other = take(mine, "a"), take(SnapshotStore(tmp_path, "/other.ipynb"), "a")
    assert (mine.find("a"), mine.of("a")) == (taken, [other, taken])


def test_what_was_not_completed_is_gone(store: SnapshotStore) -> None:
    """Also where writing it fails."""
    for there in (True, False):
        with suppress(LookupError), store.writing("a") as folder:
            if there:
                write_frames(folder / "rank0.frames", [b"contents"])
            raise LookupError
    assert entries(store.root / "a") == [".lock"]


def test_what_a_killed_writer_left_goes(store: SnapshotStore) -> None:
    """With the next one, of whatever name; what has not been made here stays."""
    take(store, "a")
    for name in (".part-killed", ".part-mine"):
        (store.root / "a" / name).mkdir()
    os.close(folders.claim(store.root / "a" / ".part-killed", "snapshot a"))
    take(store, "b")
    assert [name for name in entries(store.root / "a") if "part" in name] == [".part-mine"]


def test_the_newest_are_kept(store: SnapshotStore) -> None:
    """Of each name so many, in the order in which they were taken, also within a second."""
    other = take(store, "b")
    keys = [take(store, "a").key for _ in range(KEPT + 2)]
    assert [each.key for each in store.of("a")] == keys[: -KEPT - 1 : -1]
    assert store.of("b") == [other]
    assert len(entries(store.root / "a")) == KEPT + 1  # and the lock


def test_a_clock_that_went_back(store: SnapshotStore) -> None:
    """The one that was taken last is the newest all the same."""
    first = take(store, "a")
    first.folder.rename(first.folder.with_name("29991231-235959"))
    assert [take(store, "a").stamp for _ in range(2)] == [
        "29991231-235959.001",
        "29991231-235959.002",
    ]
    assert store.find("a").stamp == "29991231-235959.002"


@pytest.mark.parametrize("name", ["", ".", "..", ".a", "a/b", "a@b", "-a", "é", "a b", "a\n"])
def test_what_is_no_name(store: SnapshotStore, name: str) -> None:
    """It is refused before anything is written."""
    with pytest.raises(UsageError, match="is not a name for a snapshot"), store.writing(name):
        pytest.fail("it is written")
    assert entries(store.root) == []


def test_two_writers_of_one_name(store: SnapshotStore) -> None:
    """The second is refused; the first one's folder is not taken for a leftover."""
    with (
        store.writing("a") as folder,
        store.writing("b"),
        pytest.raises(UsageError, match="Another notebook is writing a snapshot `a`"),
        store.writing("a"),
    ):
        pytest.fail("two write at once")
    assert not folder.exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """One line with the folder, and how to name another."""
    (tmp_path / "file").write_text("")
    said = r"written: Not a directory \(.*NBDIST_SNAPSHOT_DIR"
    with pytest.raises(UsageError, match=said), SnapshotStore(tmp_path / "file").writing("a"):
        pytest.fail("it is written")


# --- reading ------------------------------------------------------------------------------


def test_what_is_not_there(store: SnapshotStore) -> None:
    """One line says where was looked, and what there is."""
    for key in (None, "a"):
        with pytest.raises(UsageError, match=f"There are no snapshots in {store.root}"):
            store.find(key)
    for name in "gfedcba":
        take(store, name)
    for key in ("x", "a@20200101-000000", "../a", ".part-a"):
        with pytest.raises(UsageError) as caught:
            store.find(key)
        there = ", ".join(f"`{name}`" for name in "abcdef")
        said = f"There is no snapshot `{key}` in {store.root}. Available: {there} …."
        assert str(caught.value) == said


def drop_manifest(taken: Snapshot) -> None:
    (taken.folder / MANIFEST).unlink()


def cut_manifest(taken: Snapshot) -> None:
    os.truncate(taken.folder / MANIFEST, 100)


def empty_manifest(taken: Snapshot) -> None:
    (taken.folder / MANIFEST).write_text("[]")


def strange_manifest(taken: Snapshot) -> None:
    (taken.folder / MANIFEST).write_text(json.dumps({"ranks": {"x": {}}}))


def drop_file(taken: Snapshot) -> None:
    (taken.folder / "rank1.frames").unlink()


def cut_file(taken: Snapshot) -> None:
    os.truncate(taken.folder / "rank1.frames", 9)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        *(
            (each, "manifest.json cannot be read")
            for each in (drop_manifest, cut_manifest, empty_manifest, strange_manifest)
        ),
        (drop_file, "rank1.frames is missing"),
        (cut_file, "rank1.frames has 9 of 35 bytes"),
    ],
)
def test_damage_is_seen(
    store: SnapshotStore, damage: Callable[[Snapshot], None], problem: str
) -> None:
    """One that is damaged is there, and says what is wrong with it; others are as they were."""
    older, taken = take(store, "a"), take(store, "a")
    damage(taken)
    assert [each.problem for each in store.of("a")] == [problem, ""]
    assert store.find("a").key == taken.key
    assert store.find(older.key) == older


def test_another_format(store: SnapshotStore) -> None:
    """One of another version of nbdist is not read, and says of which."""
    taken = take(store, "a")
    manifest = json.loads((taken.folder / MANIFEST).read_text())
    (taken.folder / MANIFEST).write_text(json.dumps(manifest | {"format": 1, "nbdist": "0.0"}))
    assert store.find("a").problem == "nbdist 0.0 wrote it in another format"


def test_the_next_older_intact_one_is_named(store: SnapshotStore) -> None:
    """By what brings it back; none where all older ones are damaged."""
    oldest, older, newest = (take(store, "a") for _ in range(3))
    drop_file(older)
    said = str(store.damaged(newest, "it is cut"))
    assert said.startswith(f"The snapshot `{newest.key}` is damaged: it is cut. ")
    assert said.endswith(f"`%dist_restore --name {oldest.key}` takes the one of {oldest.clock}.")
    drop_file(oldest)
    assert str(store.damaged(newest, "it is cut")).endswith("There is no older one.")


# --- where they lie -----------------------------------------------------------------------


def test_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the log files; else in the state folder."""
    monkeypatch.delenv("NBDIST_SNAPSHOT_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert root_folder("") == Path("/state/nbdist/snapshots")
    assert root_folder(str(tmp_path)) == tmp_path / "snapshots"
