"""A real etcd on one of the hosts, with the old interface that torch's rendezvous speaks."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.hosts.network import Host, Network, end
from tests.waiting import wait_until

PORT, PEER_PORT = 2379, 2380


def missing() -> str | None:
    """Why there can be no etcd here, or None."""
    if not shutil.which("etcd"):
        return "no etcd (apt-get install etcd-server)"
    return None


class Etcd:
    """An etcd of one member, on a host of the network."""

    def __init__(self, network: Network, host: Host) -> None:
        self.host = host
        self.address = f"{self.host.address}:{PORT}"
        """What `rdzv_endpoint` is for torch, on every host and on this machine."""
        self._log = network.folder / f"etcd-{host.name}.log"
        url, peers = f"http://{self.address}", f"http://127.0.0.1:{PEER_PORT}"
        options = {
            "data-dir": str(network.folder / f"etcd-{host.name}"),
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
        wait_until(lambda: PORT in self.host.listening(), f"etcd did not start; see {self._log}")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Have it stand still: it takes connections, and does not answer."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        end(self._process)
