"""The folders of a world's sockets: which are removed when the next world starts."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist.world.runtime import FRESH_SECONDS, make_runtime_folder


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Short enough for a unix socket's path."""
    with tempfile.TemporaryDirectory(prefix="nbt-", dir="/tmp") as folder:
        yield Path(folder)


def test_what_a_killed_agent_left_goes_and_nothing_else(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody's folder may begin with the same name."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    left, new = make_runtime_folder(), make_runtime_folder()
    data = short_path / "nbdist-data"
    data.mkdir()
    long_ago = time.time() - FRESH_SECONDS - 1
    for folder in (left, data):
        os.utime(folder, (long_ago, long_ago))
    newest = make_runtime_folder()
    assert {*short_path.iterdir()} == {new, data, newest}
