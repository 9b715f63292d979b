"""A world over ssh on hosts that share no folder: files, modules, names, ports and clocks."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist.errors import WorkerError
from nbdist.world.states import WorldState
from nbdist.world.world import World
from tests.hosts.network import Host, Network
from tests.hosts.worlds import LINK_TIMEOUT, SUM, lose, wrapped
from tests.waiting import SOON

pytestmark = pytest.mark.shared_world(2)

LOGS = "/tmp/logs"
"""A folder that each host has for itself."""

MINE = "def answer():\n    return {}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The notebook's folder, with a module and a file that git ignores."""
    folder = tmp_path_factory.mktemp("nb")
    subprocess.run(["git", "init", "-q", folder], check=True)
    (folder / ".gitignore").write_text("local.py\n")
    (folder / "local.py").touch()
    (folder / "mine.py").write_text(MINE.format(1))
    return folder


AHEAD = "import time\nof_kernel = time.time_ns\ntime.time_ns = lambda: of_kernel() + 3600 * 10**9\n"


@pytest.fixture(scope="module")
def started(path: None, hosts_of_module: list[Host], folder: Path) -> Iterator[World]:
    """A world of two ranks, each on its own host, one over IPv6, with the notebook's code.

    The first host has a wrong clock, and hardly any disk for logs.
    """
    first, second, _ = hosts_of_module
    python = wrapped(first, "sitecustomize.py", AHEAD)
    wrapped(second)
    first.run(f"mkdir {LOGS} && mount -t tmpfs -o size=16k tmpfs {LOGS}")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setattr(sys, "path", ["", *sys.path])
        patched.setenv("NBDIST_LOG_DIR", LOGS)
        options = {"python": python, "on_failure": "stop", "link_timeout": LINK_TIMEOUT}
        hosts = "node1-v6:1,node2:1"
        with World(2, hosts=hosts, sync_code=True, name="logs", **options) as world:
            yield world
    first.run(f"umount -l {LOGS} && rm -r {LOGS}")
    second.run(f"rm -r {LOGS}")


def test_code_follows_the_notebook(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks import the notebook's modules, again once edited, and scripts do so as well.

    Ranks follow the notebook into a folder below and back, each host in its own copy.  Later cells
    find the files that cells have written.
    """
    world.execute("import os, mine; where = os.getcwd(); open('out.txt', 'w').write('9')")
    assert world.gather("mine.answer()") == [1, 1]
    assert all("/nbdist-code-" in where for where in world.gather("where"))
    (folder / "mine.py").write_text(MINE.format(2))
    (folder / "new.py").write_text("import mine\nbig = 10 * mine.answer()\n")
    world.execute("from new import big")
    found = world.gather("big, mine.answer(), open('out.txt').read(), os.getcwd() == where")
    assert found == [(20, 2, "9", True)] * 2
    world.execute("os.remove('out.txt')")  # else the file would stay
    with pytest.raises(WorkerError, match=r"`local\.py` is in the notebook's folder, but"):
        world.execute("import local")
    script = "import sys\nimport mine\nfound = sys.argv[1], mine.answer()\n"
    (folder / "train.py").write_text(script)
    world.run_script("train.py", "a")
    assert world.gather("found") == [("a", 2)] * 2

    (folder / "below").mkdir()
    (folder / "below" / "data.txt").write_text("7")
    first = world.gather("os.getcwd()")
    monkeypatch.chdir(folder / "below")
    world.execute("found = open('data.txt').read(), os.getcwd()")
    assert world.gather("found") == [("7", f"{where}/below") for where in first]
    monkeypatch.chdir(folder)
    assert world.gather("os.getcwd()") == first


def test_hosts_are_named(world: World) -> None:
    """Results, errors, status (also in a terminal) and loggers name the hosts."""
    result = world.run(socket.gethostname)
    assert result.index(hostname="node2", local_rank=0) == result.rank(1) == "node2"
    with pytest.raises(WorkerError, match="rank 1 on node2 failed after"):
        world.execute("assert rank == 0", ranks=[1])
    assert [row.host for row in world.status()] == ["node1-v6", "node2"]
    command = [sys.executable, "-m", "nbdist.terminal", "status"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=SOON).stdout
    # Other tests have worlds of their own, some with the same name.
    _, _, ours = shown.partition(
        f"{world.engine.rank_table.spec.name} · notebook pid {os.getpid()}"
    )
    rows = [line.split()[:2] for line in ours.splitlines() if "idle" in line]
    assert rows[:2] == [["0", "node1"], ["1", "node2"]], shown
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("nbdist.node2.0")
    logger.addHandler(handler)
    try:
        world.execute("import logging; logging.warning('from %d', rank)")
        assert [record.getMessage() for record in records] == ["from 1"]
    finally:
        logger.removeHandler(handler)


def test_a_rank_listens_on_one_address_only(world: World, hosts: list[Host]) -> None:
    """Each rank has a single listening port, on the address by which its agent reached the head."""
    world.execute(
        "import psutil\n"
        "found = [each.laddr.ip for each in psutil.Process().net_connections('tcp')\n"
        "         if each.status == psutil.CONN_LISTEN]"
    )
    assert world.gather("found") == [[hosts[0].address], [hosts[1].address]]


def test_a_wrong_clock_does_not_hide_the_first_failure(world: World) -> None:
    """With a clock an hour ahead the error has the right rank; a full disk of logs does no harm."""
    world.execute("print('x' * 100_000)")
    source = f"{SUM}\nimport time\nif rank == 0: time.sleep(1)\nassert False, rank"
    with pytest.raises(WorkerError) as found:
        world.execute(source)
    assert found.value.rank == 1
    assert "first: rank 1 on node2 after " in str(found.value)
    seconds = float(str(found.value).split(" after ")[1].split(" s:")[0])
    assert seconds < 1800


def test_a_lost_host_ends_all_workers(world: World, hosts: list[Host], network: Network) -> None:
    """The loss of a host ends all workers with `on_failure="stop"`."""
    assert "All workers were ended" in lose(world, network, hosts[1].link_down)
    assert world.state is WorldState.STOPPED
