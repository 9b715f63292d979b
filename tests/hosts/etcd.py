"""A real etcd on one of the hosts, with the old interface that torch's rendezvous speaks."""

from __future__ import annotations

import shutil
import subprocess

from tests.hosts.network import Network, end, wait_for

PORT, PEER_PORT = 2379, 2380


def missing() -> str | None:
    """Why there can be no etcd here, or None."""
    if not shutil.which("etcd"):
        return "no etcd (apt-get install etcd-server)"
    return None


class Etcd:
    """An etcd of one member, on the network's first host."""

    def __init__(self, network: Network) -> None:
        self.host = network.hosts[0]
        self.address = f"{self.host.address}:{PORT}"
        """What `rdzv_endpoint` is for torch, on every host and on this machine."""
        self._log = network.folder / "etcd.log"
        url, peers = f"http://{self.address}", f"http://127.0.0.1:{PEER_PORT}"
        options = {
            "data-dir": str(network.folder / "etcd"),
            "listen-client-urls": f"http://0.0.0.0:{PORT}",
            "advertise-client-urls": url,
            "listen-peer-urls": peers,
            "initial-advertise-peer-urls": peers,
            "initial-cluster": f"default={peers}",
            "enable-v2": "true",
        }
        with self._log.open("wb") as log:
            self._process = self.host.popen(
                ["etcd", *(f"--{name}={value}" for name, value in options.items())],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.host.lasts(self._process.pid, PORT, PEER_PORT)
        wait_for(lambda: PORT in self.host.listening(), f"etcd did not start; see {self._log}")

    def close(self) -> None:
        end(self._process)
