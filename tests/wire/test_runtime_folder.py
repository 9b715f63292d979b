"""Tests of `nbdist.wire.runtime_folder`: folders of worlds' sockets, and when they are removed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from nbdist.errors import NoRuntimeFolder, ScaleError
from nbdist.folders import MARKER
from nbdist.wire.runtime_folder import RuntimeFolder, places
from nbdist.world.world import World


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Short enough for a unix socket's path."""
    with tempfile.TemporaryDirectory(prefix="nbt-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def test_what_a_killed_agent_left_goes_and_nothing_else(parent: Path) -> None:
    """What is held stays, whatever a cleaner took; so do copies, renamed ones and data."""
    held, cleaned, killed, moved = (RuntimeFolder() for _ in range(4))
    left = killed.path
    (cleaned.path / MARKER).unlink()
    copy, data = parent / "nbdist-copy", parent / "nbdist-data"
    shutil.copytree(left, copy)
    renamed = moved.path.rename(parent / "nbdist-mine")
    for each in (killed, moved):  # as the kernel does at a process's end
        os.close(each._claim)
    data.mkdir()
    (data / "lock").write_text("")
    for folder in (held.path, cleaned.path, left, renamed, copy, data):
        os.utime(folder, (1, 1))
    new = RuntimeFolder()
    assert {*parent.iterdir()} == {held.path, cleaned.path, renamed, copy, data, new.path}
    for each in (held, cleaned, new):
        each.close()
    assert {*parent.iterdir()} == {renamed, copy, data}


def test_what_was_left_elsewhere_goes_too(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next agent may come by ssh, or in a batch job, and have another environment."""
    killed = RuntimeFolder()
    os.close(killed._claim)
    other = parent / "other"
    other.mkdir()
    monkeypatch.setenv("TMPDIR", str(parent))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(other))
    RuntimeFolder().close()
    assert [*parent.iterdir()] == [other]


@pytest.mark.parametrize("umask", [0, 0o077])
def test_only_this_user_can_open_it(parent: Path, umask: int) -> None:
    """Whatever the umask."""
    before = os.umask(umask)
    try:
        folder = RuntimeFolder()
    finally:
        os.umask(before)
    assert folder.path.stat().st_mode & 0o077 == 0
    folder.close()
    assert not [*parent.iterdir()]


@pytest.mark.parametrize("variable", ["XDG_RUNTIME_DIR", "TMPDIR"])
@pytest.mark.parametrize("name", ["x" * 150, "長" * 40, "長" * 25, "run", "line\nbreak", "\udcff"])
def test_places_that_cannot_hold_sockets(
    parent: Path, monkeypatch: pytest.MonkeyPatch, variable: str, name: str
) -> None:
    """A path that is too long, in bytes, or relative, or of other signs: there is another place."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    folder = parent / name
    folder.mkdir()
    monkeypatch.setenv(variable, name if name == "run" else str(folder))
    monkeypatch.chdir(parent)
    made = RuntimeFolder()
    made.close()
    assert made.path.parent == Path("/tmp")
    assert not [*folder.iterdir()]


def test_which_place_is_first(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the session goes before that of temporary files."""
    monkeypatch.setenv("TMPDIR", "/tmp/other")
    assert places()[:2] == [parent, Path("/tmp/other")]


@pytest.fixture
def small(parent: Path) -> Iterator[Path]:
    """A file system with room for little; needs root."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(parent)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield parent
    subprocess.run(["umount", str(parent)], check=True)


def fill(folder: Path) -> Path:
    """A file in it that leaves no room for another."""
    found = folder / "big"
    with suppress(OSError), found.open("wb", buffering=0) as file:
        while file.write(b"x" * 512):
            pass
    return found


@pytest.mark.own_agent
def test_a_full_place(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is passed over; and where nothing else is left, named."""
    fill(small)
    for variable in ("XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.setenv(variable, str(small))
    made = RuntimeFolder()
    made.close()
    assert made.path.parent == Path("/tmp")
    monkeypatch.setattr("nbdist.wire.runtime_folder.LAST_PLACES", ())
    with pytest.raises(NoRuntimeFolder) as found:
        RuntimeFolder()
    assert f"({small}: No space left on device)" in str(found.value)
    assert "\n" not in str(found.value)
    assert [each.name for each in small.iterdir()] == ["big"]


@pytest.mark.own_agent
def test_a_place_that_gets_full(small: Path) -> None:
    """Who cannot start says where there is no room; with room again it can."""
    with World(1, log_dir="") as world:
        world.start()
        file = fill(small)
        with pytest.raises(ScaleError, match=f"No space left on device in {small}/nbdist-"):
            world.scale(2)
        assert world.gather("rank") == [0]
        file.unlink()
        world.scale(2)
        assert world.gather("rank") == [0, 1]
