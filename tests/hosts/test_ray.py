"""Worlds on a Ray cluster of two hosts: what Ray shows of them, and when it says no.

What cells do there, and what goes wrong in them, is in `tests/hosts/test_worlds.py`.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nbdist.errors import StartError, WorkerDied
from nbdist.launch.ray import RayLauncher
from nbdist.wire.ticket import KeyPair, Ticket
from nbdist.wire.wanted import Wanted
from nbdist.world.world import World
from tests.hosts.network import Host, Network, wait_for
from tests.hosts.ray_cluster import RayCluster
from tests.hosts.worlds import agent_on, check_whole, new_world
from tests.waiting import SOON

pytestmark = [pytest.mark.shared_world, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def world(cluster: RayCluster, hosts_of_module: list[Host]) -> Iterator[World]:
    """A worker on each host, though there might be more hosts."""
    with new_world(None, layout="1:3x1", launcher="ray", name="on-ray") as world:
        yield world


def test_what_the_cluster_has_not(cluster: RayCluster, world: World) -> None:
    """Is named with what each node has, or with what others use of it."""
    with pytest.raises(
        StartError, match="2 nodes with 9 CPU each: the cluster has 3 nodes: "
    ) as it:
        new_world(None, layout="2x9", launcher="ray")
    assert "node1 has 2 CPU" in str(it.value)
    with pytest.raises(StartError, match=r"of 4 CPU, .* there is 2 CPU, .* free"):
        new_world(None, layout="2x2", launcher="ray")
    check_whole(world, 2)


def test_nodes_that_there_are_not(world: World) -> None:
    """It is told that Ray is not asked for them later, and what asks it."""
    assert world.size == 2
    assert world.session.lacks == (
        "2 of 3 nodes have come. With `--launcher ray` machines come at the start alone: "
        "`%dist_restart` asks for all again, with new workers.",
    )


SHOWN = """
import ray
ray.init(log_to_driver=False, logging_level="ERROR")
names = sorted(each["name"] for each in ray.util.list_named_actors(all_namespaces=True))
groups = [each["name"] for each in ray.util.placement_group_table().values()
          if each["state"] == "CREATED"]
print(names, groups)
"""


def shown() -> str:
    """The names of living actors and placement groups."""
    done = subprocess.run(
        [sys.executable, "-c", SHOWN], capture_output=True, text=True, timeout=SOON
    )
    assert not done.returncode, done.stderr
    return done.stdout.strip()


def test_what_ray_shows(world: World) -> None:
    """An actor for each node, named as the world is, and what it has reserved; ranks see no Ray."""
    world.execute("import os\nnames = [name for name in os.environ if name.startswith('RAY_')]")
    assert world.gather("names") == [[]] * 2
    assert shown() == "['nbdist:on-ray/0', 'nbdist:on-ray/1'] ['nbdist:on-ray']"


def test_nothing_is_left_of_a_world(cluster: RayCluster, world: World) -> None:
    """Not in Ray either: its actors and what it had reserved."""
    assert [len(cluster.actors(host)) for host in cluster.hosts] == [1, 1]
    world.shutdown()
    assert shown() == "[] []"
    assert [cluster.actors(host) for host in cluster.hosts] == [[], []]


@pytest.fixture
def launched(cluster: RayCluster, network: Network, tmp_path: Path) -> Iterator[object]:
    """Agents with a ticket that a test knows, to a port that takes their connection in silence."""
    with socket.create_server((network.address, 0)) as silent:
        ticket = Ticket(
            (network.address,), silent.getsockname()[1], "x" * 40, KeyPair.new(), fork=False
        )
        wanted = Wanted(launcher="ray", min_nodes=2, max_nodes=2, per_node=1, python=sys.executable)
        launched = RayLauncher().launch(wanted, ticket, tmp_path)
        yield launched, ticket
        for process in launched.processes:
            process.end(SOON)
            process.close()


def test_the_ticket_is_in_no_text(cluster: RayCluster, launched) -> None:  # type: ignore[no-untyped-def]
    """Not in arguments, variables, or what Ray writes to its logs; and one can be ended alone."""
    _, ticket = launched
    secret = ticket.keys.secret.encode()
    for host in cluster.hosts:
        wait_for(
            lambda host=host: any("nbdist.node" in each for each in host.processes().values()),
            f"an agent on {host.name}",
        )
    for process in psutil.process_iter():
        for name in ("cmdline", "environ"):
            try:
                text = Path(f"/proc/{process.pid}/{name}").read_bytes()
            except OSError:
                continue
            assert secret not in text, f"{name} of {process}"
    one, other = launched[0].processes
    one.end(0.0)
    assert (one.exit_code(), other.exit_code()) == (-signal.SIGKILL, None)
    texts = cluster.texts()
    assert "Agent" in texts
    assert ticket.keys.secret not in texts


def test_agents_that_end(cluster: RayCluster, launched) -> None:  # type: ignore[no-untyped-def]
    """How is told of the one that was killed, and of the one whose actor was; nothing stays."""
    (first, second), (one, other) = launched[0].processes, cluster.hosts
    assert (first.exit_code(), first.host, second.host) == (None, "node1", "node2")
    wait_for(lambda: agent_on(one) and agent_on(other), "agents", SOON)
    os.kill(agent_on(one), signal.SIGKILL)
    assert select.select([first], [], [], SOON)[0] == [first]
    assert first.exit_code() == -signal.SIGKILL
    above = psutil.Process(agent_on(other)).parents()
    next(each for each in above if "ray::" in each.cmdline()[0]).kill()
    assert select.select([second], [], [], SOON)[0] == [second]
    assert "died" in " ".join(second.last_lines())
    wait_for(lambda: not agent_on(other), "the agent is gone", SOON)


def test_a_cluster_that_is_stopped(cluster: RayCluster, hosts_of_module: list[Host]) -> None:
    """Its ranks are lost, which is told with the host, and nothing of them stays there."""
    with new_world(None, layout="2x1", launcher="ray") as world:
        stopping = threading.Timer(1.0, cluster.stop, ("node2",))
        stopping.start()
        with pytest.raises(WorkerDied, match=r"rank 1 on node2"):
            world.execute(
                "import time, torch.distributed as dist\nif rank: time.sleep(99)\ndist.barrier()"
            )
        stopping.join()
    assert not agent_on(cluster.hosts[1])


OTHER = """
import json, ray
from ray.experimental.internal_kv import _internal_kv_get as get, _internal_kv_put as put
ray.init(log_to_driver=False, logging_level="ERROR")
place = {"namespace": b"cluster"}
found = json.loads(get(b"CLUSTER_METADATA", **place))
found["python_version"] = "3.9.1"
put(b"CLUSTER_METADATA", json.dumps(found).encode(), overwrite=True, **place)
"""


def test_a_cluster_with_another_python(cluster: RayCluster) -> None:
    """Is refused in a line with both versions; no test can come after it."""
    subprocess.run([sys.executable, "-c", OTHER], check=True, timeout=SOON)
    with pytest.raises(StartError, match=r"Python: 3\.9\.1 .*Python: 3\.1") as it:
        new_world(None, layout="2x1", launcher="ray")
    assert len(str(it.value).splitlines()) == 1
