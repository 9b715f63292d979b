"""Tests of `nbdist.world.agents`: worlds that run, which of them is meant, and agents' ends."""

from __future__ import annotations

import os
import platform
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socket import AF_UNIX, socket
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

from nbdist import __version__
from nbdist.agent.code_folder import CodeFolder
from nbdist.errors import UsageError
from nbdist.system.folders import PREFIX, RuntimeFolder
from nbdist.wire.messages import CodeFile, GetCode, PutCode
from nbdist.wire.spec import versions_here
from nbdist.wire.views import DOOR, Accepted, Describe, WorldInfo
from nbdist.world import agents
from nbdist.world.agents import (
    AgentProcess,
    Asking,
    AttachedAgent,
    Found,
    runtime_folders,
    to_attach,
    worlds,
)
from nbdist.world.world import World
from tests.waiting import SOON, wait_until
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world

# --- an agent of this process, and one of another ----------------------------------------------


@pytest.fixture
def runtime() -> Iterator[RuntimeFolder]:
    folder = RuntimeFolder()
    yield folder
    folder.close()


@pytest.mark.own_agent
def test_an_agent_ends_with_its_stdin(runtime: RuntimeFolder) -> None:
    """It has a session of its own, which Stop does not reach, and says when it has ended."""
    agent = AgentProcess(runtime.path, fork_server=False)
    assert os.getsid(agent.pid) == agent.pid
    assert agent.exit_code() is None
    assert agent.command.endswith(f"-m nbdist.agent {runtime.path} {os.getpid()} --no-fork")
    agent.end(SOON)
    assert select.select([agent], [], [], 0)[0] == [agent]
    assert (agent.exit_code(), agent.last_lines()) == (0, [])
    agent.close()


@pytest.mark.own_agent
def test_an_agent_that_hangs_is_killed(
    runtime: RuntimeFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the seconds it has for it; its guard then ends what it has left, and itself."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    code, file = CodeFolder(), CodeFile(b"digest")
    code.take(GetCode({}, {"a.py": file}))
    code.take(PutCode({file: b"x = 1"}))
    os.close(code._claim)  # as the kernel does at a process's end
    agent = AgentProcess(runtime.path, fork_server=True)
    guard = psutil.Process(agent.pid)
    wait_until(lambda: len(guard.children(recursive=True)) == 2, "the agent has a fork server")
    (hanging,) = guard.children()
    left = guard.children(recursive=True)
    hanging.suspend()
    agent.end(3.0)
    assert agent.exit_code() == -signal.SIGKILL
    assert not any(process.is_running() for process in left)
    assert not runtime.path.exists()
    assert [*tmp_path.iterdir()] == []
    agent.close()


@pytest.mark.own_agent
def test_a_guard_that_hangs_is_killed_after_its_agent(runtime: RuntimeFolder) -> None:
    """It is stopped here, and can neither see the agent end nor pass SIGTERM on to it."""
    agent = AgentProcess(runtime.path, fork_server=False)
    guard = psutil.Process(agent.pid)
    wait_until(guard.children, "the guard has forked the agent")
    (hanging,) = guard.children()
    guard.suspend()
    hanging.suspend()
    agent.end(0.1)
    assert agent.exit_code() == -signal.SIGKILL
    hanging.wait(SOON)
    agent.close()


class Line:
    """Stands for the connection to the agent, which ends with the agent's hold."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.own_agent
def test_an_agent_that_was_attached_to(tmp_path: Path) -> None:
    """It is there while its guard is; a signal ends it; its last words outlive its folder."""
    script, line = "sleep 1000 & echo $!; wait $!", Line()
    (tmp_path / "agent.log").write_text("one\ntwo\n")
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True) as guard:
        assert guard.stdout is not None
        pid = int(guard.stdout.readline())
        there = Found(tmp_path, pid, WorldInfo(__version__, "vm", "default", "exp"))
        agent = AttachedAgent(there, line, Accepted(pid, guard.pid))  # type: ignore[arg-type]
        assert (agent.host, agent.pid, agent.exit_code()) == ("vm", pid, None)
        assert agent.last_lines() == ["one", "two"]
        assert select.select([agent.fileno()], [], [], 0)[0] == []
        agent.end(0.1)
        assert select.select([agent.fileno()], [], [], 0)[0] == [agent.fileno()]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    (tmp_path / "agent.log").unlink()
    assert agent.last_lines() == ["one", "two"]
    agent.close()
    assert line.is_closed
    agent = AttachedAgent(there, line, Accepted(os.getpid(), os.getpid()))  # type: ignore[arg-type]
    assert agent.last_lines() == []
    agent.close()


# --- worlds ---------------------------------------------------------------------------------


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


def found(name: str = "exp", agent: int = 9, **info: Any) -> Found:
    facts = {"version": __version__, "host": "vm", "pool": "default", "detach": True, **info}
    return Found(Path("/x"), agent, WorldInfo(name=name, workers=2, **facts))


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
            [found(), found("b", 8)],
            None,
            "there are `exp` (process 9), `b` (process 8). `%dist_att",
        ),
        ([found()], "x", "has this name (there is `exp` (process 9)). `nbdist ps`"),
        ([found()] * 9, "x", "are " + "`exp` (process 9), " * 5 + "`exp` (process 9) and 3 more)"),
        ([found(), found(agent=8)], "exp", "2 worlds have this name"),
        ([found(version="0.0.1")], "exp", f"runs nbdist 0.0.1, and this is {__version__}. `nbdist"),
        (
            [found(versions={"Python": "3.1.0", "torch": "1.0"})],
            "exp",
            f"`exp` runs Python 3.1.0, and this notebook {platform.python_version()}: functions",
        ),
        ([found(notebook=5)], "exp", "process 5 still uses it. `%unload_ext nbdist` there"),
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
