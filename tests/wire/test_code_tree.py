"""Tests of `nbdist.wire.code_tree`: what of a folder has to travel, and where it may not go."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from nbdist.wire.code_tree import PART, CodeFile, Landmark, digest_of, moved, parts, refusal_of
from nbdist.wire.spec import WorldSpec


def spec(cwd: str, *path: str) -> WorldSpec:
    """A world's, as far as folders go."""
    return WorldSpec(1, None, {}, cwd, path, 1, "python")


def test_parts_are_small_and_the_files_come_last() -> None:
    """No message is much larger than what one file needs."""
    contents = [(digest_of(bytes([n])), bytes(PART // 2)) for n in range(5)]
    files = {"a.py": CodeFile(contents[0][0])}
    found = [*parts(files, contents)]
    assert [len(part.contents) for part in found] == [2, 2, 1]
    assert [part.files for part in found] == [None, None, files]
    assert {d: c for part in found for d, c in part.contents.items()} == dict(contents)


def test_files_are_known_where_nothing_is_missing() -> None:
    """One part, which says what there is to be."""
    (part,) = parts({}, [])
    assert (part.contents, part.files) == ({}, {})


@pytest.mark.parametrize("path", ["mine.py", "a/b/c.py", "a b/ü.txt", "...", ".hidden/x"])
def test_paths_below_the_folder_are_taken(path: str) -> None:
    """Whatever their signs."""
    assert refusal_of(path) == ""


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "..", "../x", "a/../../x", "a//b", "./x", "a/", "a\0b", ".nbdist"]
)
def test_other_paths_are_refused(path: str) -> None:
    """Also those that nbdist itself needs."""
    assert refusal_of(path)


def test_a_landmark_is_the_very_same_file(tmp_path: Path) -> None:
    """Not a copy, with whatever times; nor what it is after a change."""
    file, copy = tmp_path / "a.py", tmp_path / "b.py"
    file.write_text("x = 1")
    shutil.copy2(file, copy)
    mark = Landmark.of(str(file))
    assert mark.is_here
    assert not Landmark(str(copy), mark.inode, mark.changed).is_here
    file.unlink()
    assert not mark.is_here
    os.replace(copy, file)
    assert not mark.is_here


def test_workers_are_moved_with_what_lies_below() -> None:
    """The rest of the path stays, also what only begins with the same signs."""
    before = spec("/home/me/nb", "", "/home/me/nb", "/home/me/nb/src", "/home/me/nb2", "/usr/lib")
    after = moved(before, "/home/me/nb", "/tmp/c")
    assert after.cwd == "/tmp/c"
    assert after.sys_path == ("", "/tmp/c", "/tmp/c/src", "/home/me/nb2", "/usr/lib")
