"""Rows of many machines: real hosts over a cable, and simulated ones by the hundred."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from nbdist.system.processes import cpu_seconds
from nbdist.world.world import World
from tests.bench.lab import Figure, Lab, Notebook, percentile, seconds_of
from tests.bench.simulated import install
from tests.hosts import network as networks
from tests.hosts import sshd as sshds
from tests.hosts.network import Host, Network, end
from tests.hosts.sshd import Sshd
from tests.traces import command_line
from tests.waiting import wait_until

# --- simulated machines ---------------------------------------------------------------------

SIZES = (8, 64, 256, 1024)
PER_NODE = 8
CELLS = 10
WARM_UP = 3
CPU_BUDGET = 250.0
"""Milliseconds of the notebook's processor for a `pass` cell on 1,024 ranks."""

SOURCES = {
    "pass cell": "pass",
    "the same 100 lines": "for i in range(100): print('line', i)",
    "100 different lines": "for i in range(100): print('rank', rank, 'line', i)",
}
PATHS = """
import os, sys
sys.path[:0] = {paths!r}
os.environ["PYTHONPATH"] = os.pathsep.join({paths!r})
%load_ext nbdist
"""


def many(lab: Lab) -> Iterator[Figure]:
    """8 to 1,024 simulated ranks on agents of 8: start, `pass` cell, output, and whose CPU."""
    with lab.new_folder() as folder:
        install(folder)
        for ranks in SIZES:
            with lab.notebook() as notebook:
                notebook.run(PATHS.format(paths=[str(folder), str(Path(__file__).parents[2])]))
                yield from _simulated(lab, notebook, ranks)


def _simulated(lab: Lab, notebook: Notebook, ranks: int) -> Iterator[Figure]:
    cell = f"%%distributed -j {ranks // PER_NODE}x{PER_NODE} --launcher simulated\npass"
    yield Figure("many", f"start, {ranks} ranks", "s", (notebook.run(cell).seconds,))
    ours = psutil.Process(notebook.pid)
    # The guard, and its child, the head itself.
    heads = [p for p in ours.children(recursive=True) if "nbdist.cluster" in command_line(p)]
    for name, source in SOURCES.items():
        for _ in range(WARM_UP):
            notebook.run(f"%%distributed\n{source}")
        rounds = [_round(notebook, (ours, *heads), source) for _ in range(lab.runs)]
        walls, cpus, *of_heads = zip(*rounds, strict=True)
        budget = CPU_BUDGET if (name, ranks) == ("pass cell", SIZES[-1]) else None
        yield Figure("many", f"{name}, {ranks} ranks, p50", "ms", walls)
        yield Figure("many", "  CPU of the notebook", "ms", cpus, budget)
        used = tuple(map(sum, zip(*of_heads, strict=True)))
        yield Figure("many", "  CPU of the head", "ms", used)


def _round(
    notebook: Notebook, processes: tuple[psutil.Process, ...], source: str
) -> tuple[float, ...]:
    before = [cpu_seconds(each.pid) for each in processes]
    walls = [1000 * notebook.run(f"%%distributed\n{source}").seconds for _ in range(CELLS)]
    used = [cpu_seconds(each.pid) - was for each, was in zip(processes, before, strict=True)]
    return percentile(walls, 50), *(1000 * each / CELLS for each in used)


# --- real hosts -----------------------------------------------------------------------------

HOSTS = "node1:2,node2:2"
PAIRS = 30
SSH_PORT = 22
MORE_BUDGET = 5.0
"""Milliseconds that a `pass` cell may take beyond a local cell and the round trip."""

SIZE = 256 << 20
TIMES_BUDGET = 1.25
"""Times the seconds that iperf3 takes for the same bytes: 80 % of its rate."""

GIGABIT = 1000


@contextmanager
def _two_hosts() -> Iterator[list[Host]]:
    if reason := networks.missing() or sshds.missing():
        sys.stderr.write(f"no hosts: {reason}\n")
        yield []
        return
    network, before = Network(("node1", "node2")), os.environ["PATH"]
    try:
        sshd = Sshd(network)
        os.environ["PATH"] = sshd.environ["PATH"]
        yield network.hosts
        sshd.close()
    finally:
        os.environ["PATH"] = before
        network.close()


def hosts(lab: Lab) -> Iterator[Figure]:
    """Two hosts over ssh: start, and a `pass` cell beside one on as many ranks here."""
    with _two_hosts() as found, lab.notebook() as notebook:
        if not found:
            return
        notebook.run(f"import os\nos.environ['PATH'] = {os.environ['PATH']!r}\n%load_ext nbdist")
        far, near = (f"%%distributed --pool {pool}\npass" for pool in ("far", "near"))
        first = notebook.run(f"%%distributed --pool far --hosts {HOSTS}\npass").seconds
        yield Figure("hosts", "start, 2 hosts x 2, from a fresh notebook", "s", (first,))
        notebook.run("%%distributed --pool near -n 4\npass")
        rounds = [_beside(notebook, far, near) for _ in range(lab.runs)]
        trips = [1000 * _round_trip(found[0]) for _ in range(lab.runs)]
    fars, nears = zip(*rounds, strict=True)
    more = tuple(a - b - trip for a, b, trip in zip(fars, nears, trips, strict=True))
    yield Figure("hosts", "pass cell, 2 hosts x 2, p50", "ms", fars)
    yield Figure("hosts", "  beside it 4 ranks here, p50", "ms", nears)
    yield Figure("hosts", "  round trip", "ms", tuple(trips))
    yield Figure("hosts", "  more than both together", "ms", more, MORE_BUDGET)


def _beside(notebook: Notebook, one: str, other: str) -> tuple[float, float]:
    pairs = [(notebook.run(one).seconds, notebook.run(other).seconds) for _ in range(PAIRS)]
    first, second = zip(*pairs, strict=True)
    return 1000 * percentile(first, 50), 1000 * percentile(second, 50)


def _round_trip(host: Host) -> float:
    return percentile([_connecting(host) for _ in range(PAIRS)], 50)


def _connecting(host: Host) -> float:
    started = time.perf_counter()
    socket.create_connection((host.address, SSH_PORT)).close()
    return time.perf_counter() - started


def carry(lab: Lab) -> Iterator[Figure]:
    """256 MiB to a host, and back, beside iperf3 over the same cable."""
    with _two_hosts() as found:
        if not found:
            return
        for limit, cable in ((None, "a cable without a limit"), (GIGABIT, "1 Gbit/s")):
            for host in found if limit else ():
                host.limit(GIGABIT)
            yield from _carried(lab, found, cable)


def _carried(lab: Lab, found: list[Host], cable: str) -> Iterator[Figure]:
    with World(hosts="node1:2", log_dir="", show=False) as world:
        rounds = []
        for number in range(lab.runs):
            value = torch.full((SIZE // 4,), float(number))
            there = seconds_of(lambda value=value: world.execute("", names={"big": value}))  # type: ignore[misc]
            back = seconds_of(lambda: world.gather("big", ranks=[0]))
            rounds.append((there, back, _iperf(found[0])))
    theres, backs, peers = zip(*rounds, strict=True)
    ratios = tuple(there / peer for there, peer in zip(theres, peers, strict=True))
    yield Figure("carry", f"256 MiB to a host, {cable}", "s", theres)
    yield Figure("carry", "  peer: iperf3, as many bytes", "s", peers)
    yield Figure("carry", "  of what iperf3 takes", "x", ratios, TIMES_BUDGET)
    yield Figure("carry", "  back from a rank", "s", backs)


def _iperf(host: Host) -> float:
    server = host.popen(["iperf3", "-s", "-1"], stdout=subprocess.DEVNULL)
    wait_until(lambda: 5201 in host.listening(), "iperf3 listens")
    command = ["iperf3", "-c", host.address, "-J", "-n", str(SIZE)]
    done = subprocess.run(command, capture_output=True, text=True)
    end(server)
    return 8 * SIZE / float(json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"])
