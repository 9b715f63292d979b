"""Worlds on a Ray cluster of two hosts: how they live, what Ray shows of them, when it says no."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from nbdist.cluster.ray import RayLauncher
from nbdist.cluster.ticket import KeyPair, Ticket, listen_with
from nbdist.config import WorldConfig
from nbdist.world.world import World
from tests.hosts.launched import allocated, lives
from tests.hosts.network import Host, Network
from tests.hosts.ray_cluster import RayCluster
from tests.hosts.worlds import agent_on, lose
from tests.traces import shows
from tests.waiting import SOON, wait_until

pytestmark = pytest.mark.shared_world

TICKET = Ticket(("127.0.0.1",), 1, "x" * 40, KeyPair.new(), fork=False)


def wanted(per_node: int = 1) -> WorldConfig:
    """So many workers on each of two nodes."""
    return WorldConfig(launcher="ray", layout=f"2x{per_node}", python=sys.executable)


def refused(folder: Path, per_node: int = 1) -> str:
    """Why Ray places no such agents."""
    with pytest.raises(OSError, match="cluster") as found:
        RayLauncher().launch(wanted(per_node), TICKET, folder)
    assert "\n" not in str(found.value)
    return str(found.value)


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


def test_a_world(cluster: RayCluster, hosts: list[Host], network: Network) -> None:
    """It lives as over ssh, and Ray has nothing of it afterwards."""
    actors = lambda: [each for host in cluster.hosts for each in cluster.actors(host)]  # noqa: E731
    lives(allocated("ray", actors), network)
    assert shown() == "[] []"


def test_who_has_not_the_token(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither asked for it nor found, or another: one line says what to set."""
    (home := tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    for mode, token in (("disabled", ""), ("token", ""), ("token", "f" * 64)):
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
        monkeypatch.setenv("RAY_AUTH_TOKEN", token)
        assert "by its token: set RAY_AUTH_MODE=token before" in refused(tmp_path)
    assert [*home.iterdir()] == []


def test_agents_that_end(
    cluster: RayCluster, hosts_of_module: list[Host], network: Network, tmp_path: Path
) -> None:
    """Each alone, and how is told; the ticket is in no text of theirs, nor of Ray's logs."""
    keys, context = KeyPair.new(), zmq.Context()
    with context.socket(zmq.ROUTER) as head:  # which has nothing to say to them
        head.linger = 0
        listen_with(head, keys)
        port = head.bind_to_random_port(f"tcp://{network.address}", min_port=0)
        ticket = Ticket((network.address,), port, keys.public, keys, fork=False)
        launched = RayLauncher().launch(wanted(), ticket, tmp_path)
        (first, second), (one, other) = launched.processes, cluster.hosts
        try:
            assert (first.exit_code(), first.host, second.host) == (None, "node1", "node2")
            wait_until(lambda: agent_on(one) and agent_on(other), "agents")
            is_in_no_text(ticket.keys.secret, cluster)
            os.kill(agent_on(one), signal.SIGKILL)
            assert select.select([first], [], [], SOON)[0] == [first]
            assert (first.exit_code(), second.exit_code()) == (-signal.SIGKILL, None)
            second.end(0.0)
            assert second.exit_code() == -signal.SIGKILL
            assert "died" in " ".join(second.last_lines())
            wait_until(lambda: not agent_on(other), "the agent is gone")
        finally:
            for process in launched.processes:
                process.end(SOON)
                process.close()
            launched.close()
    context.term()


def is_in_no_text(secret: str, cluster: RayCluster) -> None:
    """Not in arguments, variables, or what Ray writes to its logs."""
    for process in psutil.process_iter():
        assert not (name := shows(process.pid, secret)), f"{name} of {process}"
    texts = cluster.texts()
    assert "Agent" in texts
    assert secret not in texts


@pytest.fixture(scope="module")
def world(cluster: RayCluster, hosts_of_module: list[Host]) -> Iterator[World]:
    """A worker on each host, though there might be more hosts.

    The cluster is found as this machine's, and its token in the home folder of the user.
    """
    world = World(layout="1:3x1", launcher="ray", name="on-ray", log_dir="", show=False)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_ADDRESS", *cluster.environ):
            patch.delenv(name)
        patch.setenv("RAY_TMPDIR", str(cluster.home))
        patch.setenv("HOME", str(cluster.home))
        world.start()
    with world:
        yield world


def test_what_ray_shows(cluster: RayCluster, world: World) -> None:
    """An actor for each node, named as the world is, and what it has reserved; ranks see no Ray.

    It is told that Ray is not asked for missing nodes later, and what asks it.
    """
    world.execute("import os\nnames = [name for name in os.environ if name.startswith('RAY_')]")
    assert world.gather("names") == [[]] * 2
    assert shown() == "['nbdist:on-ray/0', 'nbdist:on-ray/1'] ['nbdist:on-ray']"
    assert [len(cluster.actors(host)) for host in cluster.hosts] == [1, 1]
    assert world.session.lacks == (
        "2 of 3 nodes have come. With `--launcher ray` machines come at the start alone: "
        "`%dist_restart` asks for all again, with new workers.",
    )


def test_a_node_that_is_stopped(cluster: RayCluster, world: World, network: Network) -> None:
    """Its ranks are lost, which is told with the host, and nothing of them stays there."""
    (last,) = world.gather("__import__('socket').gethostname()", ranks=[1])
    said = lose(world, network, lambda: cluster.stop(last))
    assert f"rank 1 on {last}" in said
    world.shutdown()
    host = next(host for host in cluster.hosts if host.name == last)
    wait_until(lambda: not agent_on(host), f"the agent on {last} ends with Ray there")
