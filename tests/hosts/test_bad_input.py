"""What cannot work on other hosts: one clear line with the remedy, soon, and nothing is left."""

from __future__ import annotations

import sys

import pytest

from nbdist.errors import StartError, WorkerError
from nbdist.world.world import World
from tests.hosts.network import Host, Network
from tests.hosts.worlds import SUM, new_world

pytestmark = pytest.mark.usefixtures("path", "hosts")

WRAPPER = """#!/bin/sh
export PYTHONPATH={folder}
exec {python} "$@"
"""


def refused(hosts: str, **options: object) -> str:
    """The first line of what is said where a world does not start on these hosts."""
    with pytest.raises(StartError) as found:
        new_world(hosts, **options)
    return str(found.value).splitlines()[0]


@pytest.mark.parametrize(
    ("host", "python", "why"),
    [
        ("no-host", None, "the name no-host cannot be resolved: an address, or a `HostName` in ~/"),
        ("node2-refused", None, "it refused the login (publickey): `ssh node2-refused true` has "),
        ("node2-changed", None, "its host key is not the one that ssh knows: `ssh node2-changed` "),
        ("node2-closed", None, "ssh cannot reach "),
        ("node2", "/no/python", "there is no /no/python there: `--python` names the interpreter, "),
        ("node2", "/bin/sh", "it exited with code 2. Started with `ssh "),
        ("node2", "/usr/bin/python3", "the interpreter there has no nbdist: `pip install nbdist=="),
    ],
)
def test_no_agent_there(host: str, python: str | None, why: str) -> None:
    """What ssh or the shell there says, and what to do about it."""
    said = refused(host, python=python)
    assert said.startswith(f"the agent on {host} could not start: {why}")


def test_another_torch(hosts: list[Host]) -> None:
    """Both versions are named, and nothing is started."""
    python = wrapped(hosts[1], "torch-2.3.1.dist-info/METADATA", "Name: torch\nVersion: 2.3.1\n")
    wrapped(hosts[0])
    said = refused("node1:1,node2:1", python=python)
    assert said.startswith("the workers could not start: node2 has torch 2.3.1, the notebook ")
    assert "`pip install torch==" in said


def wrapped(host: Host, file: str = "", text: str = "") -> str:
    """An interpreter of the host, with one more file that comes first on its path."""
    folder = "/tmp/python"
    host.run(f"rm -rf {folder} && mkdir {folder}")
    if file:
        path = host.path(f"{folder}/{file}")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    host.path(f"{folder}/run").write_text(WRAPPER.format(folder=folder, python=sys.executable))
    host.run(f"chmod +x {folder}/run")
    return f"{folder}/run"


def test_a_host_that_does_not_reach_the_notebook(hosts: list[Host], network: Network) -> None:
    """Each address of the notebook's is named, with the port."""
    for address in (network.address, network.address6):
        hosts[1].block_to(address)
    said = refused("node2:1", address=network.address)
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


AHEAD = "import time\nof_kernel = time.time_ns\ntime.time_ns = lambda: of_kernel() + 3600 * 10**9\n"


def test_a_clock_that_is_an_hour_ahead(hosts: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which rank failed first is right all the same; over IPv6 alone, with a full disk there."""
    monkeypatch.setenv("NBDIST_LOG_DIR", "/tmp/logs")
    python = wrapped(hosts[0], "sitecustomize.py", AHEAD)
    wrapped(hosts[1])
    hosts[0].run("mkdir /tmp/logs && mount -t tmpfs -o size=16k tmpfs /tmp/logs")
    with World(hosts="node1-v6:1,node2-v6:1", show=False, python=python) as world:
        world.execute("print('x' * 100_000)")
        source = f"{SUM}\nimport time\nif rank == 0: time.sleep(1)\nassert False, rank"
        with pytest.raises(WorkerError) as found:
            world.execute(source)
        assert found.value.rank == 1
        assert "first: rank 1 on node2-v6 after " in str(found.value)
        seconds = float(str(found.value).split(" after ")[1].split(" s:")[0])
        assert seconds < 1800
    hosts[0].run("umount /tmp/logs && rm -r /tmp/logs")
    hosts[1].run("rm -r /tmp/logs")
