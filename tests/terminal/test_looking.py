"""Tests of `nbdist.terminal.looking`: worlds are found, looked at, and gone when they end."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist.terminal.looking import Look, Worlds
from nbdist.wire.frames import framed
from nbdist.wire.seen import WINDOW, WorldSeen
from nbdist.world.agents import runtime_folders
from nbdist.world.world import World
from tests.waiting import wait_until
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world


@pytest.fixture(scope="module")
def world(new_world: NewWorld) -> Iterator[World]:
    with new_world(2, name="exp") as started:
        yield started


@pytest.fixture
def worlds() -> Iterator[Worlds]:
    found = Worlds()
    yield found
    found.close()


def ours(worlds: Worlds) -> list[WorldSeen]:
    """Those of this process: other tests, and whoever else works here, have worlds too."""
    return [each for each in worlds.seen() if each.notebook_pid == os.getpid()]


def test_while_a_cell_runs(world: World, worlds: Worlds, tmp_path: Path) -> None:
    """What each rank does is seen, by another connection than the notebook's."""
    gate = tmp_path / "gate"
    source = (
        "import os, time\nprint('loss', rank)\n"
        f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)"
    )
    running = world.submit(world.task(source, execution_count=5))
    try:
        while True:
            (seen,) = ours(worlds)
            # Somebody else's look, whose answer is given again, may have been before it started.
            # A line comes in several pieces, at any time.
            lines = [each.last_line for each in seen.workers]
            if lines == ["loss 0", "loss 1"] and all(
                w.place and w.place.line for w in seen.workers
            ):
                break
    finally:
        gate.touch()
        world.session.wait(running)
    assert (seen.backend, seen.name, seen.pool) == ("gloo", "exp", "default")
    assert [each.pid for each in seen.workers] == [*world.pids.values()]
    assert [each.cell for each in seen.workers] == [5, 5]
    assert all(each.memory > 2**20 and each.cpu_seconds > 0 for each in seen.workers)
    (later,) = ours(worlds)
    assert later.at >= seen.at


def test_found_without_the_notebooks_environment(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the agent's process, where folders lie elsewhere."""
    assert world.pids
    here = Path(os.environ["XDG_RUNTIME_DIR"])
    known = [folder for folder in runtime_folders(WINDOW) if folder.parent == here]
    for name in ("XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.setenv(name, "/nonexistent")
    assert known
    assert [folder for folder in runtime_folders(WINDOW) if folder.parent == here] == known


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a folder of a world's could be."""
    folder = Path(os.environ["XDG_RUNTIME_DIR"]) / "nbdist-other"
    folder.mkdir(mode=0o700)
    yield folder
    (folder / WINDOW).unlink(missing_ok=True)
    folder.rmdir()


def test_folders_that_others_can_open(place: Path) -> None:
    """Are not looked at: anybody could have put a socket there."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place / WINDOW))
        assert place in runtime_folders(WINDOW)
        place.chmod(0o755)
        assert place not in runtime_folders(WINDOW)
    place.chmod(0o700)


@pytest.mark.parametrize("said", [b"", b"garbage", framed(b"x"), (1 << 60).to_bytes(8, "big")])
def test_what_is_no_world(place: Path, worlds: Worlds, said: bytes) -> None:
    """Whatever a socket says there, it is none, and others are seen."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place / WINDOW))
        server.listen()
        server.settimeout(20)

        def answer() -> None:
            end, _ = server.accept()
            with end:
                end.recv(10)
                end.sendall(said)

        answering = threading.Thread(target=answer)
        answering.start()
        assert str(place) not in repr([each.host for each in worlds.seen()])
        answering.join()
    assert str(place) not in repr(worlds)


def test_a_world_that_is_silent(place: Path, world: World, worlds: Worlds) -> None:
    """Is waited for once; no later look at the others waits for it, and it may still answer."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place / WINDOW))
        server.listen()
        assert ours(worlds)
        assert f"'{place}'" in repr(worlds).partition("silent")[2]
        assert ours(worlds)
        end, _ = server.accept()
        end.close()
        wait_until(lambda: ours(worlds) and str(place) not in repr(worlds))


@pytest.mark.world
def test_a_world_that_has_ended(worlds: Worlds) -> None:
    """Is not there any more, and its connection is closed."""
    with World(1, log_dir="", backend="none"):
        assert "none" in [each.backend for each in ours(worlds)]
    assert "none" not in [each.backend for each in ours(worlds)]


def test_no_window(tmp_path: Path) -> None:
    """What cannot be connected to raises, with nothing left open."""
    with pytest.raises(FileNotFoundError):
        Look(tmp_path)
