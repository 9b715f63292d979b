"""Tests of `nbdist.system.folders`: only unlocked folders are removed, and only safe files read.

Tests of runtime folders too: their places, and when they are removed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbdist.system import folders
from nbdist.system.folders import LOCK_FILE, RuntimeFolder, Untrusted, places


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A folder of nbdist that no process has locked, with a file and a folder in it."""
    folder = tmp_path / "ours"
    folder.mkdir(mode=0o700)
    os.close(folders.claim(folder))
    (folder / "file").write_text("x")
    (folder / "sub").mkdir()
    return folder


def test_a_removed_working_directory_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nearest existing folder stands in for a removed one, until that exists again."""
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert (folders.current_folder(), folders.removed_folder()) == (str(folder), "")
    shutil.rmtree(tmp_path / "a")
    assert (folders.current_folder(), folders.removed_folder()) == (str(tmp_path), str(folder))
    folder.mkdir(parents=True)
    assert folders.current_folder() == str(folder)
    assert folders.nearest_folder("/nothing/there") == "/"


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """A failed write leaves the old file and nothing else; a link in the way is not followed."""
    path, part = tmp_path / "file", tmp_path / "part"
    part.symlink_to(path)
    for text in (b"old", b"new"):
        with folders.whole_file(path, folders.PRIVATE_FILE, part) as file:
            file.write(text)
            assert not path.exists() or path.read_bytes() == b"old"
    with pytest.raises(ZeroDivisionError), folders.whole_file(path) as file:
        file.write(bytes(1 // 0))
    assert (path.read_bytes(), [*tmp_path.iterdir()]) == (b"new", [path])
    assert path.stat().st_mode & 0o777 == folders.PRIVATE_FILE


def test_two_writers_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Two writers do not disturb each other, even with the same pid in two containers."""
    path = tmp_path / "file"
    with folders.whole_file(path) as first:
        with folders.whole_file(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
        first.write(b"first")
    assert (path.read_bytes(), [*tmp_path.iterdir()]) == (b"first", [path])


@pytest.mark.world
def test_a_folder_goes_when_no_process_locks_it(ours: Path) -> None:
    """A folder is removed once no process locks it; a process that is killed locks nothing."""
    first, last = (folders.join(ours) for _ in range(2))
    os.close(first)
    assert not folders.remove(ours)
    code = (
        "import sys, time; from pathlib import Path; from nbdist.system import folders\n"
        "print(folders.join(Path(sys.argv[1])), flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, ours], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline().strip().isdigit()
        os.close(last)
        assert not folders.remove(ours)
        holder.kill()
    assert folders.remove(ours)
    assert not ours.exists()
    assert folders.join(ours) is None
    assert not folders.remove(ours)


def test_a_folder_without_its_lock_file_stays(ours: Path, tmp_path: Path) -> None:
    """A folder without a good lock file stays, and so does a link or a folder of another user."""
    lock_file, other = ours / LOCK_FILE, tmp_path / "other"
    other.touch()
    for break_it in (lock_file.unlink, lambda: lock_file.symlink_to(other)):
        break_it()
        assert folders.join(ours) is None
        assert not folders.remove(ours)
    lock_file.unlink()
    lock_file.touch()  # new, and not locked yet
    assert folders.join(ours, fcntl.LOCK_EX) is None
    assert not folders.remove(ours)
    lock_file.write_text("ours")
    if os.geteuid() == 0:
        os.chown(ours, 54321, -1)
        assert not folders.remove(ours)
        os.chown(ours, 0, -1)
    (tmp_path / "link").symlink_to(ours)
    assert not folders.remove(tmp_path / "link")
    assert (ours / "file").exists()
    assert folders.remove(ours)


def test_a_folder_that_others_can_write_stays(ours: Path) -> None:
    """A folder that others can write to stays; a folder that they can only read is removed."""
    for mode in (0o720, 0o702):
        ours.chmod(mode)
        assert not folders.remove(ours)
        assert (ours / "file").exists()
    ours.chmod(0o755)
    assert folders.remove(ours)


def test_a_folder_that_replaces_another_stays(
    ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the checked folder is emptied, even if another one has got its name meanwhile."""
    listdir = os.listdir

    def after_a_move(at: int) -> list[str]:
        shutil.copytree(ours, tmp_path / "mine")
        ours.rename(tmp_path / "away")
        (tmp_path / "mine").rename(ours)
        return listdir(at)

    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", after_a_move)
        assert not folders.remove(ours)
    assert {each.name for each in ours.iterdir()} == {LOCK_FILE, "file", "sub"}
    assert not [*(tmp_path / "away").iterdir()]


def test_a_removal_that_was_interrupted_is_completed(
    ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock file is removed last, so that a later call can remove the rest."""

    def interrupt(*_: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", interrupt)
        with pytest.raises(KeyboardInterrupt):
            folders.remove(ours)
    assert {each.name for each in ours.iterdir()} >= {LOCK_FILE, "sub"}
    assert folders.remove(ours)
    assert not ours.exists()


def test_links_are_removed_not_followed(ours: Path, tmp_path: Path) -> None:
    """Links are removed, and the folders that they lead to stay."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    for link in (ours / "link", ours / "sub" / "link"):
        link.symlink_to(tmp_path / "mine")
    assert folders.remove(ours)
    assert (tmp_path / "mine" / "file").read_text() == "mine"


def test_new_folders_on_a_path_are_private(tmp_path: Path) -> None:
    """New folders on a path are private, and existing ones keep their mode."""
    tmp_path.chmod(0o755)
    before = os.umask(0)
    try:
        folders.make_private(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    modes = [(tmp_path / each).stat().st_mode & 0o777 for each in (".", "a", "a/b")]
    assert modes == [0o755, 0o700, 0o700]
    folders.check_private(tmp_path / "a")
    for folder in (tmp_path, tmp_path / "link"):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(tmp_path / "a")
        with pytest.raises(PermissionError, match="not a folder that only this user can open"):
            folders.check_private(folder)


def test_only_files_of_this_user_are_read(ours: Path) -> None:
    """A plain file that only this user can write is opened; other files raise an error."""
    ours.parent.chmod(0o700)
    os.close(folders.open_trusted(ours / "file"))
    with pytest.raises(FileNotFoundError):
        folders.open_trusted(ours / "nowhere")
    with pytest.raises(Untrusted, match="sub is no plain file"):
        folders.open_trusted(ours / "sub")
    for mode in (0o620, 0o602):
        (ours / "file").chmod(mode)
        with pytest.raises(Untrusted, match=f"others can write to .*mode {mode:04o}"):
            folders.open_trusted(ours / "file")


# --- folders of worlds' sockets ---------------------------------------------------------------


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for runtime folders, with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="nbt-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def test_only_folders_of_killed_agents_are_removed(parent: Path) -> None:
    """Folders of killed agents go; locked, copied and renamed folders and data stay."""
    held, cleaned, killed, moved = (RuntimeFolder() for _ in range(4))
    left = killed.path
    (cleaned.path / LOCK_FILE).unlink()
    copy, data, link = (parent / f"nbdist-{name}" for name in ("copy", "data", "link"))
    shutil.copytree(left, copy)
    link.symlink_to(data)
    renamed = moved.path.rename(parent / "nbdist-mine")
    for each in (killed, moved):  # as the kernel does at a process's end
        os.close(each._claim)
    data.mkdir()
    (data / "lock").write_text("")
    for folder in (held.path, cleaned.path, left, renamed, copy, data):
        os.utime(folder, (1, 1))
    new = RuntimeFolder()
    assert {*parent.iterdir()} == {held.path, cleaned.path, renamed, copy, data, link, new.path}
    for each in (held, cleaned, new):
        each.close()
    assert {*parent.iterdir()} == {renamed, copy, data, link}
    assert (data / "lock").exists()


def test_folders_are_removed_from_all_places(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of killed agents go from all places: the next agent's environment may differ."""
    killed = RuntimeFolder()
    os.close(killed._claim)
    other = parent / "other"
    other.mkdir()
    for name, folder in (("TMPDIR", parent), ("XDG_RUNTIME_DIR", other)):
        monkeypatch.setenv(name, str(folder))
    assert places()[:2] == [other, parent]  # XDG_RUNTIME_DIR before TMPDIR
    RuntimeFolder().close()
    assert [*parent.iterdir()] == [other]


@pytest.mark.parametrize(
    ("variable", "name"),
    [
        *(("XDG_RUNTIME_DIR", name) for name in ("x" * 150, "長" * 25, "run", "line\nbreak")),
        ("TMPDIR", "\udcff"),
    ],
)
def test_places_that_cannot_hold_sockets_are_skipped(
    parent: Path, monkeypatch: pytest.MonkeyPatch, variable: str, name: str
) -> None:
    """A place whose path is relative, too long in bytes, or has wrong characters is not used."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.delenv("TMPDIR", raising=False)
    folder = parent / name
    folder.mkdir()
    monkeypatch.setenv(variable, name if name == "run" else str(folder))
    monkeypatch.chdir(parent)
    made = RuntimeFolder()
    made.close()
    assert made.path.parent == Path("/tmp")
    assert not [*folder.iterdir()]
