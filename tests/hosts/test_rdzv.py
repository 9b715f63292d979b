"""Worlds whose ranks meet in a store of torch's own rendezvous: etcd 3.4, and c10d over ssh.

A real etcd is on one of the hosts, with the old interface that torch's rendezvous uses.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest

from nbdist.errors import StartError, WorkerDied, WorkerError
from tests.hosts.network import Host, Network, end
from tests.hosts.worlds import SUM, check_whole, new_world
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("path", "hosts")

PORT, PEER_PORT = 2379, 2380

RDZV_PORT = 29417

KILL = """
import os, signal, torch.distributed as dist
if rank == {rank}:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
"""


class Etcd:
    """An etcd with a single member, on a host of the network."""

    def __init__(self, network: Network, host: Host) -> None:
        log = network.folder / f"etcd-{host.name}.log"
        peers = f"http://127.0.0.1:{PEER_PORT}"
        options = {
            "data-dir": str(network.folder / f"etcd-{host.name}"),
            "listen-client-urls": f"http://0.0.0.0:{PORT}",
            "advertise-client-urls": f"http://{host.address}:{PORT}",
            "listen-peer-urls": peers,
            "initial-advertise-peer-urls": peers,
            "initial-cluster": f"default={peers}",
            "enable-v2": "true",
        }
        command = ["etcd", *(f"--{name}={value}" for name, value in options.items())]
        with log.open("wb") as output:
            self._process = host.popen(command, stdout=output, stderr=subprocess.STDOUT)
        host.lasts(self._process.pid, PORT, PEER_PORT)
        wait_until(lambda: PORT in host.listening(), f"etcd did not start; see {log}")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause etcd, which then accepts connections and does not answer."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        end(self._process)


@pytest.fixture
def host(hosts: list[Host]) -> Host:
    """A host for etcd; the test is skipped unless etcd and torch's client for it are installed."""
    if not shutil.which("etcd"):
        pytest.skip("no etcd (apt-get install etcd-server)")
    pytest.importorskip("etcd", reason="no python-etcd (pip install python-etcd)")
    return hosts[1]


def test_a_line_says_to_start_a_lost_etcd(network: Network, host: Host) -> None:
    """Without etcd a line says to start it; cells go on, and the world heals once etcd is back.

    Ranks meet in etcd for each new group, by either of torch's names for the backend.
    """
    endpoint = f"{host.address}:{PORT}"
    where = {"rdzv_backend": "etcd-v2", "rdzv_endpoint": endpoint}
    silent = f"--rdzv-endpoint {endpoint}`: no etcd answers there .*; start it"
    with pytest.raises(StartError, match=silent):
        new_world("node1:1,node2:1", **where)
    with ExitStack() as stack:
        with closing(Etcd(network, host)) as etcd:
            world = stack.enter_context(new_world("node1:1,node2:1", **where))
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
        with closing(Etcd(network, host)):
            check_whole(world, 2)
            assert world.gather("globals().get('kept')") == [0, None]
            world.restart(rdzv_backend="etcd")
            check_whole(world, 2)


def test_c10d_has_its_store_on_the_named_host(hosts: list[Host]) -> None:
    """The store of c10d is on the named host, and killed ranks are restarted all the same.

    With `static` the world goes on without the worker that was rank 0, and another gets its number.
    """
    endpoint = f"{hosts[0].address}:{RDZV_PORT}"
    with new_world(rdzv_backend="c10d", rdzv_endpoint=endpoint) as world:
        assert RDZV_PORT in hosts[0].listening()
        assert RDZV_PORT not in hosts[1].listening()
        world.execute("kept = rank")
        for rank in (0, 3):
            with pytest.raises(WorkerDied):
                world.execute(KILL.format(rank=rank))
            check_whole(world)
        assert world.gather("globals().get('kept')") == [None, 1, 2, None]

        world.restart(rdzv_backend="static")
        world.execute("kept = rank")
        world.scale(ranks=[1, 2, 3])
        check_whole(world, 3)
        assert world.gather("kept") == [1, 2, 3]
