"""Worlds whose ranks meet in a store of torch's own rendezvous: etcd 3.4, and c10d over ssh."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from torch._C._distributed_c10d import PrefixStore

from nbdist.errors import StartError, WorkerDied, WorkerError
from nbdist.wire.spec import TorchStore
from nbdist.worker.group.torch_rendezvous import TorchRendezvous
from nbdist.world.world import World
from tests.hosts.etcd import PORT, Etcd
from tests.hosts.network import Host, Network
from tests.hosts.worlds import SUM, check_whole

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
