"""Tests of `nbdist.world.exchange`: ranks bind a value together, whatever comes between."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nbdist.errors import Interrupted, WorkerDied, WorkerError
from nbdist.world.exchange import Scatter, commit
from nbdist.world.world import World
from tests.waiting import wait_until

pytestmark = pytest.mark.shared_world(2)

OLD = """
class Old:
    def __del__(self):
        from pathlib import Path; import time
        if self.gate:
            Path(self.gate, "binds").touch()
            while not Path(self.gate, "open").exists(): time.sleep(0.01)
    def __repr__(self): return "old"
Old.gate = ""
x = Old()
"""


class New:
    def __repr__(self) -> str:
        return "new"


class Waits(New):
    """Is rebuilt once there is a file, which it is told in another one that it waits for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __setstate__(self, state: dict[str, Path]) -> None:
        Path(state["folder"], "takes").touch()
        while not Path(state["folder"], "open").exists():
            time.sleep(0.01)


class Bad:
    """Cannot be rebuilt."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return int, ("x",)


@pytest.fixture
def world(world: World) -> World:
    """Two ranks with an old `x`."""
    world.execute(OLD)
    return world


def values(world: World) -> list[str]:
    return world.gather("repr(globals().get('x'))")


@contextmanager
def meanwhile(*steps: Callable[[], object]) -> Iterator[None]:
    """Have another thread take these steps, each until it is true."""
    thread = threading.Thread(target=lambda: [wait_until(step) for step in steps])
    thread.start()
    yield
    thread.join()


def stop() -> bool:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    return True


def test_stop_when_some_have_taken_it(world: World, tmp_path: Path) -> None:
    """None has bound it, and nothing of it is left; then it works."""
    session, parts = world.session, [New(), Waits(tmp_path)]
    takes = lambda: session.unfinished == (1,) and (tmp_path / "takes").exists()  # noqa: E731
    with meanwhile(takes, stop), pytest.raises(KeyboardInterrupt) as stopped:
        world.scatter("x", parts)
    assert not isinstance(stopped.value, Interrupted)
    assert values(world) == ["old", "old"]
    left = "[type(o).__name__ for o in __import__('gc').get_objects()].count('New')"
    wait_until(lambda: world.gather(left) == [0, 0], "they have let go of it")
    (tmp_path / "open").touch()
    world.scatter("x", parts)
    assert values(world) == ["[new]", "[new]"]


def test_stop_when_they_bind_it(world: World, tmp_path: Path) -> None:
    """It comes too late, which is said when all have."""
    session = world.session
    world.execute(f"if rank: Old.gate = {str(tmp_path)!r}")
    binds = lambda: session.unfinished == (1,) and (tmp_path / "binds").exists()  # noqa: E731
    is_met = lambda: session.running and session.running.is_stopping  # noqa: E731
    open_gate = lambda: (tmp_path / "open").touch() or True  # noqa: E731
    with (
        meanwhile(binds, stop, is_met, open_gate),
        pytest.raises(Interrupted, match="Stop came too late: ranks 0-1 have bound x"),
    ):
        world.scatter("x", ["new", "new"])
    assert values(world) == ["['new']"] * 2
    assert session.names.owners()["x"] == ("workers", {0, 1})


def test_a_rank_that_cannot_rebuild_it(world: World) -> None:
    """The others have not bound theirs."""
    with pytest.raises(WorkerError, match="1 of 2 ranks failed"):
        world.scatter("x", ["new", Bad()])
    assert values(world) == ["old", "old"]


def test_a_rank_that_dies_when_it_has_taken_it(world: World, tmp_path: Path) -> None:
    """Nobody binds it, also not who comes in its place."""
    session = world.session
    takes = lambda: session.unfinished == (1,) and (tmp_path / "takes").exists()  # noqa: E731
    kill = lambda: os.kill(world.pids[0], signal.SIGKILL) or True  # noqa: E731
    is_known = lambda: 0 in session.dead  # noqa: E731
    open_gate = lambda: (tmp_path / "open").touch() or True  # noqa: E731
    with (
        meanwhile(takes, kill, is_known, open_gate),
        pytest.raises(WorkerDied, match=r"rank 0 .* killed by SIGKILL .*Rank 0 was restarted"),
    ):
        world.scatter("x", ["new", Waits(tmp_path)])
    assert values(world) == ["None", "old"]


def test_a_rank_that_dies_when_all_have(world: World) -> None:
    """The same, though the task with which they took it had ended well."""
    scatter = Scatter(world.session, "x", ["new", "new"])
    assert [*scatter.packing()] == []
    take, bind = scatter.tasks()
    world.session.run(take)
    os.kill(world.pids[0], signal.SIGKILL)
    wait_until(lambda: world.session.receive(0.01) or 0 in world.session.dead)
    with pytest.raises(WorkerDied, match=r"rank 0 .* killed by SIGKILL .*Rank 0 was restarted"):
        commit(world.session, bind)
    assert values(world) == ["None", "old"]
