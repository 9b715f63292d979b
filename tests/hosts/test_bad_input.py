"""What cannot work on other hosts: one clear line with the remedy, soon, and nothing is left."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nbdist.errors import StartError, WorkerError
from nbdist.world.world import World
from tests.hosts.network import Host, Network
from tests.hosts.sshd import Sshd
from tests.hosts.worlds import SUM, check_whole, new_world

WRAPPER = """#!/bin/sh
export PYTHONPATH={folder} TMPDIR={temporary}
exec {python} "$@"
"""


@pytest.fixture(autouse=True)
def ssh(sshd: Sshd, hosts: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's ssh."""
    monkeypatch.setenv("PATH", sshd.environ["PATH"])


def refused(hosts: str, **options: object) -> str:
    """The first line of what is said where a world does not start on these hosts."""
    with pytest.raises(StartError) as found:
        new_world(hosts, **options)
    return str(found.value).splitlines()[0]


@pytest.mark.parametrize(
    ("alias", "why"),
    [
        (
            "unknown-host",
            "the name unknown-host cannot be resolved: an address, or a `HostName` in ~/.ssh/",
        ),
        (
            "node2-refused",
            "it refused the login (publickey): `ssh node2-refused true` has to work without a",
        ),
        ("node2-changed", "its host key is not the one that ssh knows: `ssh node2-changed` in a"),
        ("node2-closed", "ssh cannot reach "),
    ],
)
def test_a_host_that_ssh_does_not_reach(alias: str, why: str) -> None:
    """What ssh says, and what to do about it; the other host is left as it was."""
    said = refused(f"{alias}:1,node1:1")
    assert said.startswith(f"the agent on {alias} could not start: {why}")


@pytest.mark.parametrize(
    ("python", "why"),
    [
        ("/no/python", "there is no /no/python there: `--python` names the interpreter, by its"),
        ("/bin/sh", "it exited with code 2. Started with `ssh "),
        ("/usr/bin/python3", "the interpreter there has no nbdist: `pip install nbdist=="),
    ],
)
def test_no_interpreter_for_it(python: str, why: str) -> None:
    """It does not exist, is none, or has no nbdist."""
    said = refused("node1:1,node2:1", python=python)
    assert "the agent on node" in said
    assert why in said


def test_another_torch(hosts: list[Host]) -> None:
    """Both versions are named, and nothing is started."""
    python = wrapped(hosts[1], "torch-2.3.1.dist-info/METADATA", "Name: torch\nVersion: 2.3.1\n")
    wrapped(hosts[0])
    said = refused("node1:1,node2:1", python=python)
    assert said.startswith("the workers could not start: node2 has torch 2.3.1, the notebook ")
    assert "`pip install torch==" in said


def wrapped(host: Host, file: str = "", text: str = "", temporary: str = "/tmp") -> str:
    """An interpreter of the host with one more file that comes first on its path, or a TMPDIR."""
    folder = "/tmp/python"
    host.run(f"rm -rf {folder} && mkdir {folder}")
    if file:
        path = host.path(f"{folder}/{file}")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    host.path(f"{folder}/run").write_text(
        WRAPPER.format(folder=folder, python=sys.executable, temporary=temporary)
    )
    host.run(f"chmod +x {folder}/run")
    return f"{folder}/run"


# --- the way from host to host ----------------------------------------------------------------


def test_a_host_that_does_not_reach_the_notebook(hosts: list[Host], network: Network) -> None:
    """Each address of the notebook's is named, with the port."""
    for address in (network.address, network.address6):
        hosts[1].block_to(address)
    said = refused("node1:1,node2:1", address=network.address)
    where = f"node2 cannot reach the notebook's machine at {network.address}:"
    assert said.startswith(f"the agent on node2 could not start: {where}")
    assert ": no answer within 5 s" in said


def test_hosts_that_do_not_reach_one_another(hosts: list[Host]) -> None:
    """Which one, the other's address and port, before a rank waits for the group."""
    hosts[0].block_to(hosts[1].address)
    said = refused("node1:1,node2:1")
    where = f"node1 cannot reach node2 at {hosts[1].address}:"
    assert said.startswith(f"the workers could not start: {where}")
    assert ": no answer within 4 s; gloo and nccl connect all machines" in said


# --- what differs from host to host -----------------------------------------------------------

AHEAD = "import time\nof_kernel = time.time_ns\ntime.time_ns = lambda: of_kernel() + 3600 * 10**9\n"


def test_a_clock_that_is_an_hour_ahead(hosts: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which rank failed first is right all the same, and after how long; with a full disk there."""
    monkeypatch.setenv("NBDIST_LOG_DIR", "/tmp/logs")
    python = wrapped(hosts[0], "sitecustomize.py", AHEAD)
    wrapped(hosts[1])
    hosts[0].run("mkdir /tmp/logs && mount -t tmpfs -o size=16k tmpfs /tmp/logs")
    with World(hosts="node1:1,node2:1", show=False, python=python) as world:
        world.execute("print('x' * 100_000)")
        source = f"{SUM}\nimport time\nif rank == 0: time.sleep(1)\nassert False, rank"
        with pytest.raises(WorkerError) as found:
            world.execute(source)
        assert found.value.rank == 1
        assert "first: rank 1 on node2 after " in str(found.value)
        seconds = float(str(found.value).split(" after ")[1].split(" s:")[0])
        assert seconds < 1800
    hosts[0].run("umount /tmp/logs && rm -r /tmp/logs")
    hosts[1].run("rm -r /tmp/logs")


def test_no_room_for_code(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The host and the folder are named."""
    (tmp_path / "mine.py").write_text(f"text = {'x' * 500_000!r}\n")
    monkeypatch.chdir(tmp_path)
    wrapped(hosts[0])
    python = wrapped(hosts[1], temporary="/tmp/small")
    hosts[1].run("mkdir /tmp/small && mount -t tmpfs -o size=100k tmpfs /tmp/small")
    try:
        said = refused("node1:1,node2:1", python=python, sync_code=True)
    finally:
        hosts[1].run("umount /tmp/small")
    where = "node2 could not be sent the notebook's folder: /tmp/small/nbdist-code-"
    assert said.startswith(f"the workers could not start: {where}")
    assert ": No space left on device" in said


def test_two_worlds_of_one_name(hosts: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has files of its own on each host; the hosts of one are reached over IPv6 alone."""
    monkeypatch.setenv("NBDIST_LOG_DIR", "/tmp/logs")
    options = {"show": False, "name": "same"}
    with (
        World(hosts="node1-v6:1,node2-v6:1", **options) as first,  # type: ignore[arg-type]
        World(hosts="node1:1", **options) as second,  # type: ignore[arg-type]
    ):
        check_whole(first, 2)
        for number, world in enumerate((first, second)):
            world.execute(f"print('world {number}')")
        folders = {first.logs[0], second.logs[0]}
        assert len(folders) == 2
        for number, world in enumerate((first, second)):
            file = hosts[0].path(f"{world.logs[0]}/stdout.log")
            assert file.read_text() == f"world {number}\n"
    for host in hosts[:2]:
        host.run("rm -r /tmp/logs")
