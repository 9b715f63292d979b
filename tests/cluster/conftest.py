"""Fixtures of worlds on several nodes, all on this machine, with a real head, links and agents."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist.world.world import World

MANUAL = Path(__file__).parents[2] / "docs" / "machines.md"


def example(kind: str = "python", begin: str = "# my_launcher.py") -> str:
    """Return the launcher that the manual shows, or its entry point."""
    begin = re.escape(f"```{kind}\n{begin}")
    found = re.search(rf"(?<=\n){begin}.*?(?=```)", MANUAL.read_text(), re.DOTALL)
    assert found, "the manual shows no launcher"
    return found[0].partition("\n")[2]


def install(folder: Path) -> None:
    """Install the manual's launcher in a folder, with the entry point that the manual shows."""
    (folder / "my_launcher.py").write_text(example())
    metadata = folder / "my_launcher-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my_launcher\nVersion: 1\n")
    points = example("toml", "[project.entry-points.").replace("project.entry-points.", "")
    (metadata / "entry_points.txt").write_text(points.replace('"', ""))


@pytest.fixture(scope="module")
def launchers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Makes `--launcher here` available in this process and in its child processes."""
    folder = tmp_path_factory.mktemp("launcher")
    install(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        before = os.environ.get("PYTHONPATH")
        patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{before}" if before else str(folder))
        yield


@pytest.fixture(scope="module")
def started(launchers: None) -> Iterator[World]:
    """A world of two nodes with two workers each."""
    with World(layout="2x2", launcher="here", log_dir="", show=False) as world:
        yield world


@pytest.fixture
def world(started: World) -> World:
    """A world of two nodes with two workers each, restarted if a test has changed its size."""
    if started.size != 4:
        started.restart(layout="2x2")
    return started
