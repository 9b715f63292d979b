"""Tests of `nbdist.wire.messages`: what of a folder has to travel, and where it may not go."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from nbdist.wire.messages import PART, CodeFile, landmark, part_of, refusal_of


def test_a_message_has_only_so_much() -> None:
    """No message is much larger than what one file needs; what cannot be read is left out."""
    files = [CodeFile(bytes([n])) for n in range(5)]
    contents = dict.fromkeys(files[1:], bytes(PART // 2))
    part = part_of(files, contents.get)
    assert [*part] == files[1:3]
    assert [*part_of(files[3:], contents.get)] == files[3:]
    assert part_of(files[:1], contents.get) == {}


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
    mark = landmark(str(file))
    assert mark == landmark(str(file)) != landmark(str(copy))
    file.unlink()
    assert landmark(str(file)) is None
    os.replace(copy, file)
    assert landmark(str(file)) not in (mark, None)
