"""What is told of a rank that has died: crashes leave their stack, the kernel its count."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist.errors import AgentLost
from nbdist.output.events import Died
from nbdist.wire.prctl import children_of
from nbdist.wire.runtime_folder import RuntimeFolder
from nbdist.world.agents import AgentProcess
from nbdist.world.world import World
from tests.waiting import SOON, wait_until

pytestmark = pytest.mark.shared_world

LIMIT = 600 << 20


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(2, log_dir=str(tmp_path_factory.mktemp("logs"))) as started:
        yield started


def death(world: World, source: str) -> tuple[Died, list[str]]:
    """How the last rank died in a cell, as cell 5, and what its block in the cell's output says."""
    last = world.size - 1
    pid = world.pids[last]
    running = world.submit(world.task(source, execution_count=5))
    world.session.wait(running)
    died = running.transcript.errors[last]
    assert isinstance(died, Died)
    assert died.pid == pid
    return died, [line.text for line in running.transcript[last].tail(99)]


@pytest.mark.parametrize(
    ("end", "number", "name"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", signal.SIGSEGV, "Segmentation fault"),
        ("os.abort()", signal.SIGABRT, "Aborted"),
        ("os.kill(os.getpid(), signal.SIGBUS)", signal.SIGBUS, "Bus error"),
        ("os.kill(os.getpid(), signal.SIGFPE)", signal.SIGFPE, "Floating point exception"),
    ],
)
def test_crash(world: World, end: str, number: int, name: str) -> None:
    """The calls from the cell in are in the rank's output, in its log, and in its last lines."""
    source = f"import os, signal\ndef end():\n    {end}\nprint('hello')\nif rank: end()"
    died, lines = death(world, source)
    assert died.exit_code == -number
    # Python 3.13 writes it with a hyphen.
    assert [line.replace("Floating-point", "Floating point") for line in lines] == [
        "hello",
        f"Fatal Python error: {name}, in",
        "  Cell In[5], line 5",
        "    if rank: end()",
        "  Cell In[5], line 3, in end",
        f"    {end}",
    ]
    assert died.last_lines == tuple(lines)
    assert lines[1] in Path(world.logs[1], "stderr.log").read_text().splitlines()


def test_crash_in_a_library(world: World) -> None:
    """A library's calls are there too, nothing of IPython's, and no thread but the one that did."""
    died, lines = death(world, "import ctypes\nif rank: ctypes.string_at(0)")
    assert died.exit_code == -signal.SIGSEGV
    assert lines[1:3] == ["  Cell In[5], line 2", "    if rank: ctypes.string_at(0)"]
    assert lines[3].startswith("  ctypes/__init__.py, line ")
    assert len(lines) == 5


def test_no_crash(world: World) -> None:
    """A process that exits, or is killed, has no stack to tell."""
    assert death(world, "import os\nprint('bye')\nif rank: os._exit(3)")[1] == ["bye"]
    end = "import os, signal\nif rank: os.kill(os.getpid(), signal.SIGKILL)"
    assert death(world, end)[1] == []


def test_crash_of_a_spawned_worker(tmp_path: Path) -> None:
    """It leaves the same, in its output and in its log."""
    with World(1, fork=False, on_failure="stop", log_dir=str(tmp_path)) as world:
        died, lines = death(world, "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    assert died.exit_code == -signal.SIGSEGV
    assert lines[:2] == ["Fatal Python error: Segmentation fault, in", "  Cell In[5], line 2"]
    assert lines[0] in Path(world.logs[0], "stderr.log").read_text().splitlines()


def test_crash_of_a_child(world: World) -> None:
    """The stack of a child that crashed is not taken for the worker's own."""
    child = "import os, signal\npid = os.fork()\nif not pid: os.abort()\nos.waitpid(pid, 0)\n"
    died, lines = death(world, f"{child}if rank: os.kill(os.getpid(), signal.SIGSEGV)")
    assert died.exit_code == -signal.SIGSEGV
    assert lines[:2] == ["Fatal Python error: Segmentation fault, in", "  Cell In[5], line 5"]


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of the test's own with little memory; needs root."""
    own = [
        line.split(":", 2)
        for line in Path("/proc/self/cgroup").read_text().splitlines()
        if line.split(":")[1] in ("", "memory")
    ]
    roots = {"": Path("/sys/fs/cgroup"), "memory": Path("/sys/fs/cgroup/memory")}
    limits = {"": "memory.max", "memory": "memory.limit_in_bytes"}
    for _, kind, path in sorted(own, key=lambda line: line[1], reverse=True):
        group = roots[kind] / path.lstrip("/") / f"nbt-{uuid.uuid4().hex[:8]}"
        try:
            group.mkdir()
            (group / limits[kind]).write_text(str(LIMIT))
        except OSError:
            continue
        yield group
        group.rmdir()
        return
    pytest.skip("no control group can be made here")


def test_an_agent_out_of_memory(small_group: Path) -> None:
    """Where the kernel has killed it for that, the last line says so."""
    procs, runtime = small_group / "cgroup.procs", RuntimeFolder()
    procs.write_text(str(os.getpid()))
    try:
        agent = AgentProcess(runtime.path, fork_server=False)
    finally:
        (small_group.parent / "cgroup.procs").write_text(str(os.getpid()))
    wait_until(lambda: children_of(agent.pid), "it is below its guard")
    for pid in (agent.pid, *children_of(agent.pid)):
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
    fill = f"open({str(procs)!r}, 'w').write('0'); x = [bytearray(10_000_000) for _ in range(99)]"
    subprocess.run([sys.executable, "-c", fill], check=False, timeout=SOON)
    assert select.select([agent], [], [], SOON)[0] == [agent]
    lost = AgentLost(agent.host, agent.exit_code(), agent.last_lines()[-1])
    assert "was killed by SIGKILL (most likely killed by the kernel for lack of" in str(lost)
    agent.end(SOON)
    agent.close()
    runtime.close()


def test_out_of_memory(world: World, small_group: Path) -> None:
    """Where the kernel has killed a rank for lack of memory, a line says so."""
    world.execute("pass")
    (small_group / "cgroup.procs").write_text(str(world.pids[1]))
    # From then on the group's count is known.
    fill = "if rank:\n    x = [bytearray(10_000_000) for _ in range(99)]"
    died, lines = death(world, f"import time\ntime.sleep(0.3)\n{fill}")
    assert died.exit_code == -signal.SIGKILL
    (line,) = lines
    assert line.startswith("most likely killed by the kernel for lack of memory: oom_kill in ")
    assert str(small_group) in line
    assert line.endswith(" went from 0 to 1")
