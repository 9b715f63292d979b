"""What cleaners of /tmp and folders of a like name do to worlds, and worlds to these."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist.errors import WorkerDied
from nbdist.wire.runtime_folder import RuntimeFolder
from nbdist.world.world import World
from tests.waiting import SOON

pytestmark = [pytest.mark.shared_world, pytest.mark.own_agent]

LONG_AGO = time.time() - 40 * 24 * 3600


@pytest.fixture(scope="module")
def parent() -> Iterator[Path]:
    """Where the module's worlds have their folders: short enough for a unix socket's path."""
    before = os.environ["XDG_RUNTIME_DIR"]
    with tempfile.TemporaryDirectory(prefix="nbt-", dir="/tmp") as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        yield Path(folder)
    os.environ["XDG_RUNTIME_DIR"] = before


@pytest.fixture(scope="module")
def world(parent: Path) -> Iterator[World]:
    """Of two ranks."""
    with World(2, log_dir="") as world:
        yield world


def runtime_of(world: World) -> Path:
    """The folder of its sockets, as its agent's command line has it."""
    assert world.session._link is not None
    return Path(world.session._link.agents[0].command.split()[-2])


def age(folder: Path) -> None:
    """As if nobody had touched it for long."""
    for each in (*folder.rglob("*"), folder):
        os.utime(each, (LONG_AGO, LONG_AGO), follow_symlinks=False)


def test_a_living_worlds_folder_stays(world: World) -> None:
    """Another world starts and leaves it alone, also where a cleaner took all plain files."""
    world.execute("x = 10 + rank")
    folder = runtime_of(world)
    for take in (False, True):
        for file in folder.iterdir():
            if take and file.is_file():
                file.unlink()
        age(folder)
        RuntimeFolder().close()
        assert folder.is_dir()
    world.execute("dist.barrier(); x += 1")
    assert world.gather("x") == [11, 12]


def test_an_empty_or_a_missing_folder_costs_nothing(world: World) -> None:
    """With everything in it taken, then itself: cells run, ranks are replaced, all starts anew."""
    world.execute("x = 10 + rank")
    folder = runtime_of(world)
    for take in ("contents", "folder"):
        for each in folder.iterdir():
            each.unlink()
        if take == "folder":
            folder.rmdir()
        world.execute("dist.barrier()")
        with pytest.raises(WorkerDied):
            world.execute("import os\nif rank: os.kill(os.getpid(), 9)")
        world.execute("dist.barrier()\nx = globals().get('x', 10) + 1")
        with pytest.raises(Exception, match="early"):
            world.execute("if rank: raise ValueError('early')\ndist.barrier()")
        world.execute("dist.barrier()")
    assert world.gather("x") == [12, 11]
    shutil.rmtree(folder)
    world.restart()
    world.execute("dist.barrier()")
    assert folder.stat().st_mode & 0o777 == 0o700


KILLED = """
import os, signal
from nbdist.wire.runtime_folder import RuntimeFolder

folder = RuntimeFolder()
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_only_what_dead_worlds_left_is_removed(parent: Path) -> None:
    """A killed notebook's folder goes; data of that name, copies and renamed folders stay."""
    before = {*parent.iterdir()}
    data = parent / "nbdist-mydata"
    data.mkdir()
    for name in ("lock", "results.csv"):
        (data / name).write_text("mine")
    command = [sys.executable, "-c", KILLED]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SOON)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = Path(done.stdout.decode().strip())
    assert left.is_dir()
    copy, linked = parent / "nbdist-copy", parent / "nbdist-linked"
    copy.mkdir()
    for file in left.iterdir():
        if file.is_file():
            shutil.copy(file, copy)
    linked.symlink_to(data)
    for folder in (data, copy, left):
        age(folder)
    RuntimeFolder().close()
    assert {*parent.iterdir()} - before == {data, copy, linked}
    assert (data / "results.csv").read_text() == "mine"
