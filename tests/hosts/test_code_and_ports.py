"""Files, modules, names and ports of hosts, of a world over ssh on hosts that share no folder."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist.errors import WorkerError
from nbdist.world.world import World
from tests.hosts.network import Host
from tests.waiting import SOON

pytestmark = pytest.mark.shared_world(2)

MINE = "def answer():\n    return {}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The notebook's, with a module."""
    folder = tmp_path_factory.mktemp("nb")
    (folder / "mine.py").write_text(MINE.format(1))
    return folder


@pytest.fixture(scope="module")
def started(path: None, hosts_of_module: list[Host], folder: Path) -> Iterator[World]:
    """Two ranks, each on a host of its own, with code that follows the notebook's."""
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setattr(sys, "path", ["", *sys.path])
        with World(2, hosts="node1:1,node2:1", sync_code=True, name="logs") as world:
            yield world


def test_code_follows_the_notebook(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules are there, in the working folder; edited ones are imported again; scripts have them.

    Into a folder below it ranks follow too, where each host has its own; and back.
    """
    world.execute("import os, mine; where = os.getcwd()")
    assert world.gather("mine.answer()") == [1, 1]
    assert all("/nbdist-code-" in where for where in world.gather("where"))
    (folder / "mine.py").write_text(MINE.format(2))
    (folder / "new.py").write_text("import mine\nbig = 10 * mine.answer()\n")
    world.execute("from new import big")
    assert world.gather("big, mine.answer()") == [(20, 2)] * 2
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
    """In results, errors and status, also in a terminal, and by the loggers."""
    result = world.run(socket.gethostname)
    assert result.index(hostname="node2", local_rank=0) == result.rank(1) == "node2"
    with pytest.raises(WorkerError, match="first: rank 1 on node2 after"):
        world.execute("assert rank == 0", ranks=[1])
    assert [row.host for row in world.status()] == ["node1", "node2"]
    command = [sys.executable, "-m", "nbdist.terminal", "status"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=SOON).stdout
    _, _, ours = shown.partition(world.session.spec.name)
    # Other tests may have worlds of their own.
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


def test_where_gloo_listens(world: World, hosts: list[Host]) -> None:
    """On the one address by which the agent has reached the head, and nothing else does."""
    world.execute(
        "import psutil\n"
        "found = [each.laddr.ip for each in psutil.Process().net_connections('tcp')\n"
        "         if each.status == psutil.CONN_LISTEN]"
    )
    assert world.gather("found") == [[hosts[0].address], [hosts[1].address]]


LOCAL = """
import sys
from nbdist import World
with World(2, log_dir="") as world:
    world.execute("import torch.distributed as dist; dist.barrier()")
    print("ready", flush=True)
    sys.stdin.read()
"""

SCAN = """
import socket, sys
for port in range(1, 65536):
    with socket.socket() as stranger:
        if stranger.connect_ex((sys.argv[1], port)) == 0:
            print(port)
"""


def test_a_scan_of_a_local_world(world: World, hosts: list[Host]) -> None:
    """From another host no port is open that was not before; what listens does so on loopback."""
    host, stranger = hosts[0], hosts[1]

    def listening() -> set[str]:
        return {line.split()[3] for line in host.run("ss -Hltn").stdout.splitlines()}

    before = listening()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with host.popen([sys.executable, "-c", LOCAL], **pipes) as notebook:
        assert notebook.stdout is not None
        assert notebook.stdout.readline() == b"ready\n"
        new = listening() - before
        scan = stranger.run([sys.executable, "-c", SCAN, host.address], timeout=SOON)
        notebook.communicate()
    found = set(scan.stdout.split())
    assert found
    assert found <= {each.rpartition(":")[2] for each in before}
    assert len(new) == 2  # gloo's, one for each rank
    assert all(each.startswith("127.0.0.1:") for each in new)
