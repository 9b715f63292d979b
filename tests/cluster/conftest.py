"""Worlds on several machines, all of which are this one: real head, links, keys and agents."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from nbdist.world.world import World
from tests.cluster.launchers import install


@pytest.fixture(scope="module")
def launchers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have `--launcher here`, in this process and in those that it starts."""
    folder = tmp_path_factory.mktemp("launcher")
    install(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        before = os.environ.get("PYTHONPATH")
        patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{before}" if before else str(folder))
        yield


@pytest.fixture(scope="module")
def started(launchers: None) -> Iterator[World]:
    """Two nodes with two workers each."""
    with World(layout="2x2", launcher="here", log_dir="", show=False) as world:
        yield world


@pytest.fixture
def world(started: World) -> World:
    """The same, with all workers new where one test has left fewer, or another layout."""
    if started.size != 4:
        started.restart(layout="2x2")
    return started
