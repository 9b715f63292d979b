"""Tests of `nbdist.folders`: proof before anything is removed, trust before anything is read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nbdist import folders
from nbdist.folders import MARKER, Untrusted

ALL = re.compile(".*")


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A folder of ours that nobody holds, with a file and a folder in it."""
    folder = tmp_path / "ours"
    folder.mkdir(mode=0o700)
    os.close(folders.claim(folder, "a test"))
    (folder / "file").write_text("x")
    (folder / "sub").mkdir()
    return folder


def test_it_goes_when_nobody_holds_it(ours: Path):
    """Whoever holds it keeps it, of several the last one; then it goes."""
    holders = [folders.join(ours, "a test") for _ in range(2)]
    for holder in holders:
        assert holder is not None
        assert not folders.remove(ours, "a test", ALL)
        os.close(holder)
    assert folders.remove(ours, "a test", ALL)
    assert not ours.exists()
    assert folders.join(ours, "a test") is None
    assert not folders.remove(ours, "a test", ALL)


@pytest.mark.world
def test_another_process_holds_it_until_it_ends(ours: Path):
    """A holder that is killed holds nothing any more."""
    code = (
        "import sys, time; from pathlib import Path; from nbdist import folders\n"
        "print(folders.join(Path(sys.argv[1]), 'a test'), flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, ours], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip().isdigit()
        assert not folders.remove(ours, "a test", ALL)
        holder.kill()
    assert folders.remove(ours, "a test", ALL)


def test_without_proof_it_stays(ours: Path, tmp_path: Path):
    """Other words, a copied, a linked or no marker, a marker of another user: it stays."""
    marker, text = ours / MARKER, (ours / MARKER).read_bytes()
    assert not folders.remove(ours, "another test", ALL)
    other = tmp_path / "other"
    other.mkdir()
    (other / MARKER).write_bytes(text)
    assert not folders.remove(other, "a test", ALL)
    for break_it in (
        lambda: marker.write_bytes(text + b"x"),
        lambda: marker.write_bytes(b""),
        marker.unlink,
        lambda: marker.symlink_to(other / MARKER),
    ):
        break_it()
        assert not folders.is_ours(ours, "a test")
        assert not folders.remove(ours, "a test", ALL)
    marker.unlink()
    marker.write_bytes(text)
    assert folders.is_ours(ours, "a test")
    if os.geteuid() == 0:
        os.chown(marker, 54321, -1)
        assert not folders.is_ours(ours, "a test")
        os.chown(marker, 0, -1)
    (tmp_path / "link").symlink_to(ours)
    assert not folders.remove(tmp_path / "link", "a test", ALL)
    assert (ours / "file").exists()


@pytest.mark.parametrize("pattern", ["file", "file|sub", "sub/"])
def test_what_is_not_known_keeps_it_whole(ours: Path, pattern: str):
    """Nothing of it is removed, nor is it moved."""
    aside = ours.with_name("aside")
    assert not folders.remove(ours, "a test", re.compile(pattern), aside)
    assert {each.name for each in ours.iterdir()} == {MARKER, "file", "sub"}
    assert folders.remove(ours, "a test", re.compile("file|sub/"), aside)
    assert not aside.exists()


def test_links_are_removed_not_followed(ours: Path, tmp_path: Path):
    """What a link leads to stays."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    (ours / "sub" / "link").symlink_to(tmp_path / "mine")
    assert not folders.remove(ours, "a test", ALL)
    assert folders.remove(ours, "a test", None)
    assert (tmp_path / "mine" / "file").read_text() == "mine"


def test_folders_are_private_on_the_way(tmp_path: Path):
    """Those that are made, and not those that are there."""
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


def test_what_is_trusted_can_be_read(ours: Path):
    """A plain file in private folders, and an error where there is none."""
    ours.parent.chmod(0o700)
    with folders.trusted_folder(ours) as at:
        os.close(folders.open_trusted(ours / "file", at))
        with pytest.raises(FileNotFoundError):
            folders.open_trusted(ours / "nowhere", at)
        with pytest.raises(Untrusted, match="sub is no plain file"):
            folders.open_trusted(ours / "sub", at)
        for mode in (0o620, 0o602):
            (ours / "file").chmod(mode)
            with pytest.raises(Untrusted, match=f"others can write to .*mode {mode:04o}"):
                folders.open_trusted(ours / "file", at)
