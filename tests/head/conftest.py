"""Worlds on several machines, all of which are this one: real head, links, keys and agents."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist.world.world import World
from tests.head.launchers import install


@pytest.fixture(scope="session")
def launcher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the launcher `here` is installed."""
    folder = tmp_path_factory.mktemp("launcher")
    install(folder)
    return folder


@pytest.fixture
def launchers(launcher_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `--launcher here`, in this process and in those that it starts."""
    monkeypatch.syspath_prepend(launcher_folder)
    before = os.environ.get("PYTHONPATH")
    path = f"{launcher_folder}{os.pathsep}{before}" if before else str(launcher_folder)
    monkeypatch.setenv("PYTHONPATH", path)


@pytest.fixture
def world(launchers: None) -> Iterator[World]:
    """Two nodes with two workers each."""
    with World(layout="2x2", launcher="here", log_dir="", show=False) as world:
        yield world
