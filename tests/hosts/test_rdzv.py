"""Worlds whose ranks meet in a store of torch's own rendezvous: etcd 3.4, and c10d over ssh.

A real etcd on one of the hosts, with the old interface that torch's rendezvous speaks.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest
from torch._C._distributed_c10d import PrefixStore

from nbdist.errors import StartError, WorkerDied, WorkerError
from nbdist.wire.spec import TorchStore
from nbdist.worker.group.torch_rendezvous import TorchRendezvous
from nbdist.world.world import World
from tests.hosts.network import Host, Network, end
from tests.hosts.worlds import SUM, check_whole
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


@pytest.fixture(scope="session")
def etcd(network: Network) -> Iterator[Etcd]:
    """A real etcd on the first host."""
    if reason := missing():
        pytest.skip(reason)
    etcd = Etcd(network, network.hosts[0])
    yield etcd
    etcd.close()


RDZV_PORT = 29417

KILL = """
import os, signal, torch.distributed as dist
if rank == {rank}:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
"""


@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_ranks_meet_in_etcd(etcd: Etcd, backend: str) -> None:
    """They have one store, in each generation another, and who is new has the newest."""
    pytest.importorskip("etcd", reason="no python-etcd (pip install python-etcd)")
    where = TorchStore(backend, etcd.address, f"world-{backend}-{time.time_ns()}")
    ranks = [TorchRendezvous(where, rank) for rank in range(2)]
    for generation in (1, 2):
        with ThreadPoolExecutor() as pool:
            meets = [pool.submit(each.meet, generation, 2) for each in ranks]
        one, other = (PrefixStore("a", each.result()) for each in meets)
        assert not one.check(["key"])
        one.set("key", str(generation))
        assert other.get("key") == b"%d" % generation
        assert other.add("count", 2) == 2
        assert not any(each.compares for each in ranks)
        ranks[1] = TorchRendezvous(where, 1)


def test_c10d_over_hosts(launch: Callable[..., World], hosts: list[Host]) -> None:
    """Its store is on a rank of the host that is named; killed ranks are replaced all the same."""
    endpoint = f"{hosts[0].address}:{RDZV_PORT}"
    world = launch(rdzv_backend="c10d", rdzv_endpoint=endpoint)
    assert RDZV_PORT in hosts[0].listening()
    assert RDZV_PORT not in hosts[1].listening()
    world.execute("kept = rank")
    for rank in (0, 3):
        with pytest.raises(WorkerDied):
            world.execute(KILL.format(rank=rank))
        check_whole(world)
    assert world.gather("globals().get('kept')") == [None, 1, 2, None]


def test_ranks_of_other_numbers(launch: Callable[..., World], hosts: list[Host]) -> None:
    """Where rank 0 has ended another has its number, and is what torch's rank 0 is (10 s)."""
    endpoint = f"{hosts[0].address}:{RDZV_PORT}"
    world = launch(rdzv_backend="static", rdzv_endpoint=endpoint)
    world.execute("kept = rank")
    world.scale(ranks=[1, 2, 3])
    check_whole(world, 3)
    assert world.gather("kept") == [1, 2, 3]


def test_etcd_goes_away(network: Network, launch: Callable[..., World]) -> None:
    """A line names it and says to start it; what runs goes on, and heals once it is there again."""
    pytest.importorskip("etcd", reason="no python-etcd (pip install python-etcd)")
    endpoint = f"{network.hosts[1].address}:{PORT}"
    options = {"rdzv_backend": "etcd-v2", "rdzv_endpoint": endpoint}
    silent = f"--rdzv-endpoint {endpoint}`: no etcd answers there .*; start it"
    with pytest.raises(StartError, match=silent):
        launch("node1:1,node2:1", **options)
    with closing(Etcd(network, network.hosts[1])) as etcd:
        world = launch("node1:1,node2:1", **options)
        world.execute("kept = rank")
        with etcd.paused():
            world.execute(SUM)
            with pytest.raises(WorkerDied, match=f"{silent}.*`%dist_restart`"):
                world.execute(KILL.format(rank=1))
        check_whole(world, 2)
    with pytest.raises(WorkerError, match=silent):
        world.execute("dist.new_group()")
    with pytest.raises(WorkerDied, match=f"{silent}.*`%dist_restart`"):
        world.execute(KILL.format(rank=1))
    with closing(Etcd(network, network.hosts[1])):
        check_whole(world, 2)
        assert world.gather("globals().get('kept')") == [0, None]
