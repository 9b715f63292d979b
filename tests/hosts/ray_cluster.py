"""A real Ray over the hosts: its head on this machine, without a CPU to give, a node on each host.

It lets nobody in without its token, as a Ray does by itself from 2.60 on.  Each node has 2 CPUs in
Ray's books, and a store of objects as small as Ray allows.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from tests.hosts.network import Host, Network, end, hurry
from tests.waiting import wait_until

RAY = (sys.executable, "-m", "ray.scripts.scripts", "start")
CPUS = 2
STORE_BYTES = 80_000_000
START_TIMEOUT = 120.0

# Of the nodes on hosts, so that nothing else there is taken for a part of Ray; besides, it waits
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


def missing() -> str | None:
    """Why there can be no Ray here, or None."""
    if importlib.util.find_spec("ray") is None:
        return "no Ray (pip install ray)"
    return None


class RayCluster:
    """A cluster of three nodes: this machine, and the first two hosts of a network."""

    def __init__(self, network: Network) -> None:
        # Not Ray's usual port: two heads share one without a word, and its clients get either.
        self._port, *self._ports = _free_ports(7)
        self.address = f"{network.address}:{self._port}"
        # Paths of sockets are in there, which may not be long.
        self.home = Path(tempfile.mkdtemp(prefix="nbr-", dir="/tmp"))
        """Of a user of this machine, who has the token there; Ray's own folder is in it."""
        self.folder = self.home / "ray"
        token = network.folder / "ray_token"
        token.write_text(secrets.token_hex())
        (self.home / ".ray").mkdir()
        (self.home / ".ray" / "auth_token").symlink_to(token)
        self.environ = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        """For Ray and its users, here and on the hosts; whoever has none of it is not let in."""
        self.hosts = network.hosts[:2]
        self._network = network
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start the head, and when it is there the nodes."""
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
        hurry(self._nodes["head"].pid)  # Ray's have little time to come up
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
        """End Ray on a host, as `ray stop` there does, or its head; what is ours ends by itself."""
        process = self._nodes.pop(name)
        is_up = process.poll() is None
        below = psutil.Process(process.pid).children(recursive=True) if is_up else []
        below = [each for each in below if "nbdist.agent" not in _words(each)]
        if is_up:
            end(process, sign)
        for each in below:
            with suppress(psutil.NoSuchProcess):
                each.kill()

    def actors(self, host: Host) -> list[str]:
        """What processes of Ray's have an agent below them there."""
        return [each for each in host.processes().values() if each.startswith("ray::Agent")]

    def texts(self) -> str:
        """All that Ray has written to its logs, here and on the hosts."""
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
    """Ports that nothing on this machine has, a moment ago at least: Ray takes no sockets."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in range(number)]
        return [each.getsockname()[1] for each in sockets]


def _words(process: psutil.Process) -> str:
    """Its command line, "" where it has just ended."""
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def _options(own: dict[str, object]) -> list[str]:
    common = ["--block", "--disable-usage-stats", f"--object-store-memory={STORE_BYTES}"]
    return [*common, *(f"--{name}={value}" for name, value in own.items())]
