"""Tests of `nbdist.world.agents` and `agent_link`: running worlds, attaching, calls to agents."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import zlib
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
from nbdist.errors import AgentLost, RanksReleased, StartError, UsageError, WorkerDied
from nbdist.system.folders import RUNTIME_FOLDER_PREFIX, RuntimeFolder
from nbdist.wire.messages import GetStatus, PutCode
from nbdist.wire.queries import QUERY_SOCKET, Describe, WorldInfo
from nbdist.wire.spec import versions_here
from nbdist.world import agents, dispatch
from nbdist.world.agent_link import Link
from nbdist.world.agents import AgentProcess, Asking, RunningWorld, find_attachable
from nbdist.world.code_sync import archive_of
from nbdist.world.states import WorldState
from nbdist.world.world import World, attach
from tests.waiting import SOON, wait_until
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world

# --- agents that this process has started ---------------------------------------------------------


@pytest.fixture
def runtime() -> Iterator[RuntimeFolder]:
    folder = RuntimeFolder()
    yield folder
    folder.close()


@pytest.mark.own_agent
def test_an_agent_that_hangs_is_killed(
    runtime: RuntimeFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`end` kills an agent or a guard that hangs; their processes and files do not stay."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    code = CodeFolder()
    archive = zlib.compress(archive_of(Path(__file__).parent, [Path(__file__).name]))
    assert code.answer(PutCode("digest", archive, is_last=True)).is_here
    os.close(code._claim)  # as at the end of a process: nobody owns the folder now
    agent, other_runtime = AgentProcess(runtime.path, fork_server=True), RuntimeFolder()
    other = AgentProcess(other_runtime.path, fork_server=False)
    guard, hanging_guard = psutil.Process(agent.pid), psutil.Process(other.pid)
    wait_until(lambda: len(guard.children(recursive=True)) == 2, "the agent has a fork server")
    wait_until(hanging_guard.children, "the guard has forked the agent")
    processes = [*guard.children(recursive=True), *hanging_guard.children()]
    # A suspended guard neither sees its agent end nor passes SIGTERM on.
    hanging_guard.suspend()
    for each in (*guard.children(), *hanging_guard.children()):
        each.suspend()
    agent.end(3.0)
    other.end(0.1)
    assert (agent.exit_code(), other.exit_code()) == (-signal.SIGKILL, -signal.SIGKILL)
    assert psutil.wait_procs(processes, timeout=SOON)[1] == []
    assert not runtime.path.exists()
    assert [*tmp_path.iterdir()] == []
    agent.close()
    other.close()
    other_runtime.close()


# --- worlds ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(new_world: NewWorld) -> Iterator[World]:
    with new_world(1, backend="none", name="exp", pool="trainer") as started:
        yield started


def own_worlds(name: str, timeout: float = SOON) -> list[RunningWorld]:
    """List this process's running worlds called `name`; other test processes have worlds too."""
    running = agents.worlds(timeout)
    return [each for each in running if each.info.notebook == os.getpid() and each.is_called(name)]


@contextmanager
def silent_door() -> Iterator[Path]:
    """A runtime folder whose query socket takes questions and never answers."""
    place = os.environ["XDG_RUNTIME_DIR"]
    with (
        TemporaryDirectory(prefix=RUNTIME_FOLDER_PREFIX, dir=place) as folder,
        socket(AF_UNIX) as door,
    ):
        door.bind(os.path.join(folder, QUERY_SOCKET))
        door.listen()
        yield Path(folder)


def test_a_running_world_is_found_with_its_state(world: World) -> None:
    """A running world is found by name, pool or process id, and says its state and its cell."""
    (only,) = own_worlds("exp")
    assert (only.info.pool, only.info.workers, only.info.state) == ("trainer", 1, "ready")
    assert (only.info.version, only.info.versions) == (__version__, versions_here())
    assert not only.info.detach
    assert only.name == "`exp` (pool trainer)"
    assert own_worlds("trainer") == own_worlds(str(only.agent)) == [only]
    running = world.submit(world.task("# a comment\n\nimport time\nwhile True: time.sleep(0.01)"))
    wait_until(lambda: [each.info.cell for each in own_worlds("exp")] == ["# a comment"], "it runs")
    world.interrupt()
    dispatch.wait(world.engine, running)
    assert [each.info.state for each in own_worlds("exp")] == ["ready"]


def test_silent_worlds_are_waited_for_together(world: World, tmp_path: Path) -> None:
    """Silent worlds cost one timeout in all and hide no other world; a missing socket raises."""
    timeout = 3.0
    with ExitStack() as stack:
        silent = {stack.enter_context(silent_door()) for _ in range(3)}
        assert silent < {*agents.runtime_folders()}
        begun = time.monotonic()
        assert len(own_worlds("exp", timeout)) == 1
        assert timeout <= time.monotonic() - begun < 3 * timeout
    assert tmp_path not in agents.runtime_folders()
    with pytest.raises(FileNotFoundError):
        Asking(tmp_path, Describe())


def entry(name: str = "exp", agent: int = 9, **info: Any) -> RunningWorld:
    """Return a world as `agents.worlds` lists it, without any process."""
    facts = {"version": __version__, "host": "vm", "pool": "default", "detach": True, **info}
    return RunningWorld(Path("/x"), agent, WorldInfo(name=name, workers=2, **facts))


def test_a_world_is_found_by_name_pool_or_process() -> None:
    """A world is chosen by name, pool or process id; a world without a notebook is preferred."""
    for other, name, agent in (
        (entry("other", notebook=5, agent=8), None, 9),
        (entry("other", agent=8), "other", 8),
        (entry("other", pool="trainer", agent=8), "trainer", 8),
        (entry(agent=8), "8", 8),
        (entry(notebook=5, agent=8), "exp", 9),
    ):
        assert find_attachable([entry(), other], name).agent == agent


PYTHON = platform.python_version()
NINE = "are " + "`exp` (process 9), " * 5 + "`exp` (process 9) and 3 more)"


@pytest.mark.parametrize(
    ("worlds", "name", "text"),
    [
        ([], None, "`%dist_attach`: none of your worlds on this machine is without a notebook."),
        ([entry(), entry("b", 8)], None, "are `exp` (process 9), `b` (process 8). `%dist_att"),
        ([entry()], "x", "has this name (there is `exp` (process 9)). `nbdist ps`"),
        ([entry()] * 9, "x", NINE),
        ([entry(), entry(agent=8)], "exp", "2 worlds have this name"),
        ([entry(version="0.0.1")], "exp", f"runs nbdist 0.0.1, and this is {__version__}. `nbdist"),
        (
            [entry(versions={"Python": "3.1.0", "torch": "1.0"})],
            "exp",
            f"`exp` runs Python 3.1.0, and this notebook {PYTHON}: functions",
        ),
        ([entry(notebook=5)], "exp", "process 5 still uses it. `%unload_ext nbdist` there"),
        ([entry(notebook=5, detach=False)], "exp", "It ends with that."),
        ([entry(notebook=os.getpid())], "exp", "this notebook uses it."),
    ],
)
def test_a_refused_attach_says_why(worlds: list[RunningWorld], name: str | None, text: str) -> None:
    """The error says in a single line why no world can be attached to, mostly with the remedy."""
    with pytest.raises(UsageError) as error:
        find_attachable(worlds, name)
    assert text in str(error.value)
    assert "\n" not in str(error.value)


# --- worlds that go on without the script that started them ---------------------------------------

NAME = f"exp-{os.getpid()}"
"""The name of these tests' worlds, with a process id: other processes may run the same tests."""

BEGIN = f"""
import os, sys, time
import numpy as np
import nbdist

if __name__ == "__main__":
    world = nbdist.World(2, detach=True, name="{NAME}", log_dir="", backend=%r)
    world.start()
    world.execute("big = weights.sum()", names={{"weights": np.ones(100_000)}}, setup=True)
    world.execute("import time; x = rank")
    world.submit(world.task(%r))
    print("ready", flush=True)
    time.sleep(600)
"""


def named() -> list[RunningWorld]:
    """List the running worlds called `NAME`, with or without their script."""
    return [each for each in agents.worlds() if each.info.name == NAME]


def is_detached() -> bool:
    return [each.is_detached for each in named()] == [True]


@contextmanager
def script(source: str, backend: str) -> Iterator[subprocess.Popen[str]]:
    """Run a script whose world runs the task `source`; end script and world with the block."""
    command = [sys.executable, "-c", BEGIN % (backend, source)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            wait_until(lambda: named()[0].info.state != "ready", "the task has been sent")
            yield process
        finally:
            process.kill()
            for each in named():
                os.kill(each.agent, signal.SIGTERM)


LOOP = """
i = 0; print("begun")
while not __import__("os").path.exists({gate!r}): time.sleep(0.1)
print("ended", x)
y = 2 * x
"""


@pytest.mark.own_agent
def test_a_detached_world_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A world keeps its task and variables when its script is killed, and can be attached twice."""
    gate = tmp_path / "gate"
    with script(LOOP.format(gate=str(gate)), "none") as process:
        with pytest.raises(UsageError, match=f"notebook of process {process.pid} still uses it"):
            attach(NAME)
        process.kill()
        wait_until(is_detached, "it is detached")
        with attach(NAME) as world:
            assert world.state is WorldState.RUNNING
            with pytest.raises(UsageError, match="this notebook uses it"):
                attach(NAME)
            gate.touch()
            assert world.catch_up() is not None
            lines = sorted(capsys.readouterr().out.splitlines())
            assert lines == ["[0-1] begun", "[0] ended 0", "[1] ended 1"]
            assert world.catch_up() is None
            assert world.gather("y") == [0, 2]
            assert world.engine.names.bound(0) == ["big", "i", "x", "y"]
            # The set-up cell's values came in shared memory of the script, which was killed.
            world.replace([1])
            assert world.gather("big") == [100_000, 100_000]
            world.scale(3)
            assert world.gather("big", rank=2) == 100_000
            assert world.engine.config.detach
            world.engine.connection.detach().detach()
            wait_until(is_detached, "it is detached again")
        world = attach(NAME)
        assert (world.state, world.size, world.catch_up()) == (WorldState.READY, 3, None)
        with world:
            assert world.gather("x", ranks=[0]) == [0]
            world.restart(1)
            assert world.gather("big") == [100_000]
        assert named() == []


@pytest.mark.own_agent
def test_ranks_are_released_without_a_notebook() -> None:
    """Ranks that wait for a dead rank are released while detached; `catch_up` raises the error."""
    source = "import os\nif rank: time.sleep(0.5); os._exit(3)\ndist.barrier()"
    with script(source, "gloo") as process:
        process.kill()
        wait_until(lambda: named()[0].info.state == "broken", "all ranks have ended the task")
        with attach(NAME) as world:
            with pytest.raises(WorkerDied, match=r"rank 1 .* exited with code 3"):
                world.catch_up()
            assert 0.5 <= world.engine.task_table.last.transcript.elapsed() < 10
            world.execute("dist.barrier()")
            assert world.gather("x", ranks=[0]) == [0]


@pytest.mark.own_agent
@pytest.mark.parametrize("is_idle", [False, True], ids=["busy", "idle"])
def test_a_dead_rank_is_replaced_without_a_notebook(*, is_idle: bool) -> None:
    """A new worker replaces a dead rank before the next attach, with the names of set-up cells."""
    dies = "import os\nif rank: time.sleep(0.5); os._exit(3)\ndist.barrier()"
    with script("time.sleep(0.5)" if is_idle else dies, "gloo") as process:
        process.kill()
        wait_until(is_detached, "it is detached")
        if is_idle:
            wait_until(lambda: named()[0].info.state == "ready", "all ranks have ended the task")
            os.kill(psutil.Process(named()[0].agent).children()[-1].pid, signal.SIGKILL)
        wait_until(lambda: named()[0].info.state == "broken", "a rank is dead")
        wait_until(lambda: named()[0].info.state == "ready", "the rank is replaced")
        with attach(NAME) as world:
            before = dict(world.pids)
            if is_idle:
                world.catch_up()
            else:
                with pytest.raises(WorkerDied, match=r"rank 1 .* exited with code 3"):
                    world.catch_up()
            assert world.gather("float(big)") == [100_000.0, 100_000.0]
            assert world.gather("globals().get('x')").count(None) == 1
            world.execute("dist.barrier()")
            assert world.pids == before


@pytest.mark.own_agent
def test_a_cell_runs_at_once_if_the_task_has_ended_without_a_notebook() -> None:
    """A task that ended while detached does not keep its ranks busy for the next notebook."""
    with script("time.sleep(0.5)", "none") as process:
        process.kill()
        wait_until(lambda: named()[0].info.state == "ready", "all ranks have ended the task")
        with attach(NAME) as world:
            world.execute("x += 1")
            assert world.gather("x") == [1, 2]


@pytest.mark.own_agent
@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        ("if rank: raise ValueError('mine')\ndist.barrier()", ValueError, "Rank 0 was waiting"),
        ("if rank == 0: dist.barrier()", RanksReleased, "rank 1 finished the cell without it"),
    ],
)
def test_what_was_decided_without_a_notebook_is_told_to_the_next(
    source: str, error: type[Exception], words: str
) -> None:
    """Ranks that can never go on are released while detached; the next notebook reads why."""
    with script(source, "gloo") as process:
        process.kill()
        wait_until(lambda: named()[0].info.state == "broken", "all ranks have ended the task")
        with attach(NAME) as world:
            with pytest.raises(error, match=words):
                world.catch_up()
            world.execute("dist.barrier()")
            assert world.gather("x") == [0, 1]


WHILE_STARTING = f"""
import os, nbdist
from nbdist.world import lifecycle
world = nbdist.World(1, detach=True, name="{NAME}", log_dir="", backend="none")
for far in lifecycle.starting(world.engine):
    if far.up:
        os._exit(9)
"""


@pytest.mark.own_agent
def test_a_start_goes_on_without_its_notebook() -> None:
    """A start goes on after the notebook has exited; another process can attach to the world."""
    try:
        assert subprocess.run([sys.executable, "-c", WHILE_STARTING]).returncode in (0, 9)
        wait_until(is_detached, "it has started")
        with attach(NAME) as world:
            assert world.gather("rank") == [0]
    finally:
        for each in named():
            os.kill(each.agent, signal.SIGTERM)


# --- calls over a link --------------------------------------------------------------------------


@contextmanager
def opened() -> Iterator[Link]:
    """Open a link to a new agent, which has no fork server; close the link after the block."""
    link = Link(fork_server=False)
    try:
        link.open()
        yield link
    finally:
        link.close()
    link.close()  # a second call does nothing


@pytest.mark.own_agent
def test_calls_end_when_the_agent_hangs_or_dies(caplog: pytest.LogCaptureFixture) -> None:
    """A call ends at its timeout if the agent hangs, and at once if the agent has ended."""
    with opened() as link:
        assert link.call(GetStatus()) == ()
        assert repr(link) == f"<Link up {link.agent} 0 calls open>"
        agent = psutil.Process(link.agent.pid).children()[0]
        agent.suspend()
        with pytest.raises(AgentLost):
            link.call(GetStatus(), timeout=0.2)
        calling = link.calling(GetStatus(), tick=0.05)
        assert next(calling).up == 0  # after a tick: no worker is up
        reply = link.ask(GetStatus())
        agent.kill()
        with pytest.raises(AgentLost, match="was killed by SIGKILL") as caught:
            list(calling)
        link.events.wait(SOON)
        assert [*link.events.waiting] == [caught.value]
        assert repr(link).startswith("<Link lost <AgentProcess")
        assert not link.is_up
        with pytest.raises(AgentLost):
            link.call(GetStatus())
        for each in (reply, link.ask(GetStatus())):
            assert isinstance(each.exception(timeout=SOON), AgentLost)


def test_closing_an_unopened_link_removes_its_folder() -> None:
    """A link that was never opened leaves no runtime folder behind."""
    link = Link()
    folder = Path(link.socket.address.removeprefix("ipc://")).parent
    assert folder.is_dir()
    link.close()
    assert not folder.exists()


@pytest.mark.own_agent
@pytest.mark.parametrize(
    ("source", "error_text", "lines"),
    [
        ("#!/bin/sh\necho why; exit 3", "start: ended at once", ["why"]),
        ("#!/bin/sh\necho so far; read more", "start: did not answer within 1 s", ["so far"]),
        ("#!/nowhere/sh", "start: .*No such file", []),
        (f'#!/bin/sh\nexec {sys.executable} "$@"', f"is nbdist {__version__}, the notebook 0", []),
    ],
)
def test_a_failed_agent_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, error_text: str, lines: list[str]
) -> None:
    """The error says why the agent did not start, and has the lines that the agent wrote last."""
    if "not answer" in error_text:
        monkeypatch.setattr("nbdist.world.agent_start.HELLO_TIMEOUT", 1.0)
    monkeypatch.setattr("nbdist.world.agent_start.__version__", "0.0")
    program = tmp_path / "agent.sh"
    program.write_text(f"{source}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with opened() as link, pytest.raises(StartError, match=error_text) as caught:
        link.call(GetStatus())
    assert caught.value.rank is None
    assert [*caught.value.log_lines] == lines
