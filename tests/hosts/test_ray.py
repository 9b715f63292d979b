"""Worlds on a Ray cluster of two hosts: how they live, what Ray shows of them, and refusals.

The head of a real Ray is on this machine and offers no CPU; each host is a node with two CPUs.
The cluster refuses clients without its token, as Ray does by default from 2.60 on.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
import zmq

from nbdist.cluster.ray import RayLauncher
from nbdist.cluster.ticket import KeyPair, Ticket, listen_with
from nbdist.config import WorldConfig
from tests.hosts.network import Host, Network, end, hurry
from tests.hosts.worlds import agent_on, allocated, has_slots, inherited, lose, survives_an_agent
from tests.traces import command_line, shows
from tests.waiting import SOON, wait_until

RAY = (sys.executable, "-m", "ray.scripts.scripts", "start")
CPUS = 2
STORE_BYTES = 80_000_000
START_TIMEOUT = 120.0

# Ports of nodes on hosts, so that nothing else there is taken for a part of Ray; Ray also waits
# 15 s at most for its daemons to say which ports they have chosen.
PORTS = {
    "node-manager-port": 7001,
    "object-manager-port": 7002,
    "runtime-env-agent-port": 7003,
    "dashboard-agent-listen-port": 7004,
    "dashboard-agent-grpc-port": 7005,
    "metrics-export-port": 7006,
    "min-worker-port": 7100,
    "max-worker-port": 7150,
}
WORKER_PORTS = (7100, 7151)


class RayCluster:
    """A cluster of three nodes: this machine, and the first two hosts of a network."""

    def __init__(self, network: Network) -> None:
        # Not Ray's usual port: two heads would share a port silently, and clients get either.
        self._port, *self._ports = _free_ports(7)
        self.address = f"{network.address}:{self._port}"
        # A short path: the folder holds sockets, whose paths may not be long.
        self.home = Path(tempfile.mkdtemp(prefix="nbr-", dir="/tmp"))
        """The home of a user of this machine, with the token and Ray's own folder."""
        self.folder = self.home / "ray"
        token = network.folder / "ray_token"
        token.write_text(secrets.token_hex())
        (self.home / ".ray").mkdir()
        (self.home / ".ray" / "auth_token").symlink_to(token)
        self.environ = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        """Variables for Ray and its users, here and on hosts, by which Ray lets programs in."""
        self.hosts = network.hosts[:2]
        self._network = network
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start the head, and when the head is up the nodes."""
        own = dict(zip([*PORTS][:6], self._ports, strict=True))
        head = {"node-ip-address": self._network.address, "temp-dir": self.folder, **own}
        head["port"] = self._port
        command = ["--head", "--num-cpus=0", "--include-dashboard=false", *_options(head)]
        with self._log("head").open("wb") as log:
            self._nodes["head"] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *RAY, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | self.environ,
            )
        hurry(self._nodes["head"].pid)  # Ray's daemons have little time to come up
        self._await("head")
        for host in self.hosts:
            node = {"node-ip-address": host.address, "address": self.address, **PORTS}
            with self._log(host.name).open("wb") as log:
                process = host.popen(
                    [*RAY, f"--num-cpus={CPUS}", *_options(node)],
                    environ=self.environ,
                    stdout=log,
                    stderr=log,
                )
            hurry(process.pid)
            self._nodes[host.name] = process
            host.lasts(process.pid, *PORTS.values(), *range(*WORKER_PORTS))
        for host in self.hosts:
            self._await(host.name)
            below = psutil.Process(self._nodes[host.name].pid).children()
            self._network.keepers.update(
                [self._nodes[host.name].pid, *(each.pid for each in below)]
            )

    def stop(self, name: str, sign: signal.Signals = signal.SIGTERM) -> None:
        """End Ray on a host, as `ray stop` does, or its head; agents end by themselves."""
        process = self._nodes.pop(name)
        is_up = process.poll() is None
        below = psutil.Process(process.pid).children(recursive=True) if is_up else []
        below = [each for each in below if "nbdist.agent" not in " ".join(command_line(each))]
        if is_up:
            end(process, sign)
        for each in below:
            with suppress(psutil.NoSuchProcess):
                each.kill()

    def actors(self, host: Host) -> list[str]:
        """Return the command lines of Ray's actors that have agents on the host."""
        return [each for each in host.processes().values() if each.startswith("ray::Agent")]

    def kill_actor(self, host: Host) -> None:
        """Kill the only actor that has an agent on the host."""
        found = host.processes().items()
        (actor,) = (pid for pid, line in found if line.startswith("ray::Agent"))
        os.kill(actor, signal.SIGKILL)

    def texts(self) -> str:
        """Return all text that Ray has written to its logs, here and on the hosts."""
        folders = [self.folder, *(host.path(str(self.folder)) for host in self.hosts)]
        logs = [path for folder in folders for path in folder.glob("session_2*/logs/**/*")]
        return "".join(path.read_text(errors="replace") for path in logs if path.is_file())

    def close(self) -> None:
        for name in [*self._nodes]:
            self.stop(name, signal.SIGKILL)
        shutil.rmtree(self.home)

    def _log(self, name: str) -> Path:
        return self.home / f"{name}.log"

    def _await(self, name: str) -> None:
        def is_up() -> bool:
            assert self._nodes[name].poll() is None, self._log(name).read_text()
            return "Ray runtime started" in self._log(name).read_text()

        wait_until(is_up, f"Ray on {name}; see {self._log(name)}", START_TIMEOUT)


def _free_ports(number: int) -> list[int]:
    """Return ports that were free a moment ago, since Ray takes no open sockets."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in range(number)]
        return [each.getsockname()[1] for each in sockets]


def _options(own: dict[str, object]) -> list[str]:
    common = ["--block", "--disable-usage-stats", f"--object-store-memory={STORE_BYTES}"]
    return [*common, *(f"--{name}={value}" for name, value in own.items())]


@pytest.fixture(scope="module")
def cluster(network: Network) -> Iterator[RayCluster]:
    """A real Ray with a node on each of the first two hosts; this process knows the cluster."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("no Ray (pip install ray)")
    cluster = RayCluster(network)
    try:
        cluster.start()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_ADDRESS", cluster.address)
            for name, value in cluster.environ.items():
                patch.setenv(name, value)
            yield cluster
    finally:
        cluster.close()


pytestmark = pytest.mark.shared_world

TICKET = Ticket(("127.0.0.1",), 1, "x" * 40, KeyPair.new(), fork=False)


WANTED = WorldConfig(launcher="ray", layout="2x1", python=sys.executable)


SHOWN = """
import ray
ray.init(log_to_driver=False, logging_level="ERROR")
names = sorted(each["name"] for each in ray.util.list_named_actors(all_namespaces=True))
groups = [each["name"] for each in ray.util.placement_group_table().values()
          if each["state"] == "CREATED"]
print(names, groups)
"""


def shown() -> str:
    """Return the names of living actors and placement groups."""
    done = subprocess.run(
        [sys.executable, "-c", SHOWN], capture_output=True, text=True, timeout=SOON
    )
    assert not done.returncode, done.stderr
    return done.stdout.strip()


def test_a_missing_token_is_explained_in_one_line(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the token the launch fails with a line that says which variable to set."""
    (home := tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    for mode in ("disabled", "token"):
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
        with pytest.raises(OSError, match="by its token: set RAY_AUTH_MODE=token") as found:
            RayLauncher().launch(WANTED, TICKET, tmp_path)
        assert "\n" not in str(found.value)
    assert [*home.iterdir()] == []


def test_agents_end_alone_and_hide_their_ticket(
    cluster: RayCluster, hosts_of_module: list[Host], network: Network, tmp_path: Path
) -> None:
    """Each agent ends alone, with its exit code; the secret is in no process or log."""
    keys, context = KeyPair.new(), zmq.Context()
    with context.socket(zmq.ROUTER) as head:  # which sends nothing to the agents
        head.linger = 0
        listen_with(head, keys)
        port = head.bind_to_random_port(f"tcp://{network.address}", min_port=0)
        ticket = Ticket((network.address,), port, keys.public, keys, fork=False)
        launched = RayLauncher().launch(WANTED, ticket, tmp_path)
        (first, second), (one, other) = launched.processes, cluster.hosts
        try:
            assert (first.exit_code(), first.host, second.host) == (None, "node1", "node2")
            wait_until(lambda: agent_on(one) and agent_on(other), "agents")
            is_in_no_text(ticket.keys.secret, cluster)
            os.kill(agent_on(one), signal.SIGKILL)
            assert select.select([first], [], [], SOON)[0] == [first]
            assert (first.exit_code(), second.exit_code()) == (-signal.SIGKILL, None)
            cluster.kill_actor(other)
            assert select.select([second], [], [], SOON)[0] == [second]
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
    """Assert that arguments and variables of processes, and Ray's logs, lack the secret."""
    for process in psutil.process_iter():
        assert not (name := shows(process.pid, secret)), f"{name} of {process}"
    texts = cluster.texts()
    assert "Agent" in texts
    assert secret not in texts


def test_a_world_lives_on_ray(cluster: RayCluster, hosts: list[Host], network: Network) -> None:
    """Ray shows the world's actors and its reservation; a node may be stopped.

    nbdist finds the cluster as this machine's, and its token in the user's home folder.
    """
    actors = lambda: [each for host in cluster.hosts for each in cluster.actors(host)]  # noqa: E731
    launched = allocated("ray", actors)
    launched.options["layout"] = "2:3x2"  # Ray has two nodes, of three at most
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("RAY_ADDRESS", *cluster.environ):
                patch.delenv(name)
            patch.setenv("RAY_TMPDIR", str(cluster.home))
            patch.setenv("HOME", str(cluster.home))
            world = stack.enter_context(inherited(launched, network))
        has_slots(world)
        assert world.gather("[name for name in os.environ if name.startswith('RAY_')]") == [[]] * 4
        name = f"nbdist:{world.engine.rank_table.spec.name}"
        assert shown() == f"['{name}/0', '{name}/1'] ['{name}']"
        assert [len(cluster.actors(host)) for host in cluster.hosts] == [1, 1]
        assert world.engine.start_notes.missing == (
            "2 of 3 nodes have come. With `--launcher ray` machines come at the start alone: "
            "`%dist_restart` asks for all again, with new workers.",
        )
        survives_an_agent(world, launched, network)
        assert "rank 2 on node2" in lose(world, network, lambda: cluster.stop("node2"))
        wait_until(lambda: not agent_on(cluster.hosts[1]), "the agent ends with Ray there")
    assert shown() == "[] []"
