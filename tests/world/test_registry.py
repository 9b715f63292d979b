"""Tests of `nbdist.world.agents`: worlds that run, and which of them is meant."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socket import AF_UNIX, socket
from tempfile import TemporaryDirectory

import pytest

from nbdist import __version__
from nbdist.errors import UsageError
from nbdist.system.folders import PREFIX
from nbdist.wire.spec import Versions, versions_here
from nbdist.wire.views import DOOR, Describe, WorldInfo
from nbdist.world import agents
from nbdist.world.agents import Asking, Found, runtime_folders, to_attach, worlds
from nbdist.world.world import World
from tests.waiting import wait_until
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world


@pytest.fixture(scope="module")
def world(new_world: NewWorld) -> Iterator[World]:
    with new_world(1, backend="none", name="exp", pool="trainer") as started:
        yield started


def ours(name: str) -> list[Found]:
    """Those of this process: other tests have worlds too."""
    return [each for each in worlds() if each.info.notebook == os.getpid() and each.is_called(name)]


@contextmanager
def silent_door() -> Iterator[Path]:
    """The folder of one that takes questions and never answers."""
    place = os.environ["XDG_RUNTIME_DIR"]
    with TemporaryDirectory(prefix=PREFIX, dir=place) as folder, socket(AF_UNIX) as door:
        door.bind(os.path.join(folder, DOOR))
        door.listen()
        yield Path(folder)


def test_a_world_that_runs(world: World) -> None:
    """Is found with its name, its pool, what it does, and who has it."""
    (found,) = ours("exp")
    assert (found.info.pool, found.info.workers, found.info.state) == ("trainer", 1, "ready")
    assert (found.info.version, found.info.versions) == (__version__, versions_here())
    assert not found.info.detach
    assert found.name == "`exp` (pool trainer)"
    assert ours("trainer") == ours(str(found.agent)) == [found]
    running = world.submit(world.task("# a comment\n\nimport time\nwhile True: time.sleep(0.01)"))
    wait_until(lambda: [each.info.cell for each in ours("exp")] == ["# a comment"], "it runs")
    world.interrupt()
    world.session.wait(running)
    assert [each.info.state for each in ours("exp")] == ["ready"]


def test_doors_that_do_not_answer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Are waited for together, and hide no world: their agents may be stopped, or ending."""
    timeout = 3.0
    monkeypatch.setattr(agents, "ANSWER_TIMEOUT", timeout)
    with ExitStack() as stack:
        silent = {stack.enter_context(silent_door()) for _ in range(3)}
        assert silent < {*runtime_folders()}
        begun = time.monotonic()
        assert len(ours("exp")) == 1
        assert timeout <= time.monotonic() - begun < 2 * timeout


def test_no_door(tmp_path: Path) -> None:
    """What cannot be connected to raises, with nothing left open."""
    assert tmp_path not in runtime_folders()
    with pytest.raises(FileNotFoundError):
        Asking(tmp_path, Describe())


def found(
    name: str = "exp",
    *,
    pool: str = "default",
    agent: int = 9,
    notebook: int = 0,
    detach: bool = True,
    version: str = __version__,
    versions: Versions | None = None,
) -> Found:
    info = WorldInfo(
        version,
        "vm",
        pool,
        name,
        workers=2,
        notebook=notebook,
        detach=detach,
        versions=versions or {},
    )
    return Found(Path("/x"), agent, info)


@pytest.mark.parametrize(
    ("there", "name", "agent"),
    [
        ([found()], None, 9),
        ([found(), found("other", notebook=5, agent=8)], None, 9),
        ([found(), found("other", agent=8)], "other", 8),
        ([found(), found("other", pool="trainer", agent=8)], "trainer", 8),
        ([found(), found(agent=8)], "8", 8),
        ([found(notebook=5), found(agent=8)], "exp", 8),
    ],
)
def test_which_is_meant(there: list[Found], name: str | None, agent: int) -> None:
    """By name, pool, or process; the only one that nobody has where none is named."""
    assert to_attach(there, name).agent == agent


@pytest.mark.parametrize(
    ("there", "name", "said"),
    [
        ([], None, "`%dist_attach`: none of your worlds on this machine is without a notebook."),
        (
            [found(), found("b", agent=8)],
            None,
            "there are `exp` (process 9), `b` (process 8). `%dist_attach NAME` takes one.",
        ),
        ([found()], "x", "has this name (there is `exp` (process 9)). `nbdist ps`"),
        (
            [found()] * 9,
            "x",
            "(there are " + "`exp` (process 9), " * 5 + "`exp` (process 9) and 3 more)",
        ),
        ([found(), found(agent=8)], "exp", "2 worlds have this name"),
        (
            [found(version="0.0.1")],
            "exp",
            f"`exp` runs nbdist 0.0.1, and this is {__version__}. `nbdist kill exp`",
        ),
        (
            [found(versions={"Python": "3.1.0", "torch": "1.0"})],
            "exp",
            f"`exp` runs Python 3.1.0, and this notebook {platform.python_version()}: functions",
        ),
        (
            [found(notebook=5)],
            "exp",
            "the notebook of process 5 still uses it. `%unload_ext nbdist` there",
        ),
        ([found(notebook=5, detach=False)], "exp", "It ends with that."),
        ([found(notebook=os.getpid())], "exp", "this notebook uses it."),
    ],
)
def test_what_cannot_be_had(there: list[Found], name: str | None, said: str) -> None:
    """Is said in one line, with what to do."""
    with pytest.raises(UsageError) as error:
        to_attach(there, name)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
