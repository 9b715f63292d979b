"""How each peer is started and used from a notebook, as its own documentation shows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

RANKS = 4
RESTART = "restart the kernel"


@dataclass(frozen=True)
class Peer:
    """A tool of users: its packages, and its cells for each ability, empty if no command exists."""

    name: str
    packages: str
    start: Sequence[str]
    """Cells after which `everywhere` works."""
    everywhere: Callable[[str], str]
    """Makes the cell that runs a source on all ranks, with `rank`, `dist` and `torch` defined."""
    again: Sequence[str] = ()
    """Cells that end the workers and start new ones; RESTART is the front end's kernel restart."""
    restart: Sequence[str] = ()
    """Cells that give new workers in the fastest way; if empty, those of `again`."""
    home: str = ""
    """The cell that makes `value` of all ranks the list `came`; SOURCE is code that sets it."""
    out: str = ""
    """The cell that gives the notebook's `value` to all ranks."""
    keeps: bool = True
    """Whether the next cell finds the ranks' variables."""
    kernel: str = "ipykernel_launcher"
    """The module that is the notebook's kernel."""
    interrupt_mode: str = "signal"
    """How Stop reaches the kernel, by its kernel specification."""
    live: str = ""
    """The comm by which its front end gets the outputs of ranks."""
    server: str = ""
    """Source of what its extension of the Jupyter server does meanwhile."""


def _magic(line: str) -> Callable[[str], str]:
    return lambda source: f"{line}\n{source}"


def _call(source: str) -> str:
    """Make a cell for tools that run functions: the cells that start such a tool define `run`."""
    return f"came = run({source!r})"


JOIN = """
import os, torch, torch.distributed as dist
if not dist.is_initialized():
    dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
"""

PORT = """
import socket
def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
"""

IPYPARALLEL = f"""
import ipyparallel
cluster = ipyparallel.Cluster(n={RANKS}, log_level=40)
client = cluster.start_and_connect_sync(activate=True)
client[:].block = True
def join(rank, port):
    import os
    os.environ.update(RANK=str(rank), WORLD_SIZE="{RANKS}", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
for rank, port in enumerate([free_port()] * {RANKS}):
    client[rank].apply_sync(join, rank, port)
"""

NOTEBOOK_LAUNCHER = f"""
from accelerate import notebook_launcher
def work(source):
    import torch, torch.distributed as dist
    from accelerate import PartialState
    PartialState(cpu=True)
    names = dict(torch=torch, dist=dist, rank=dist.get_rank(), world_size=dist.get_world_size())
    exec(source, names)
def run(source):
    notebook_launcher(work, (source,), num_processes={RANKS}, use_port=str(free_port()))
"""

# Without other handlers only rank 0's output is shown.
TORCHRUNX = f"""
import logging, sys, torchrunx
from torchrunx.utils.log_handling import RedirectHandler
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
def work(source, value):
    import torch, torch.distributed as dist
    names = dict(torch=torch, dist=dist, rank=dist.get_rank(), world_size=dist.get_world_size())
    exec(source, names)
    return names.get("value")
def run(source, value=None):
    launcher = torchrunx.Launcher(hostnames=["localhost"], workers_per_host={RANKS}, backend="gloo")
    launcher.set_logging_handlers(lambda: [RedirectHandler()])
    return launcher.run(work, source, value).results["localhost"]
"""

TORCHRUN = f"""
def run(source):
    with open("script.py", "w") as file:
        file.write({JOIN!r} + source + "\\ndist.destroy_process_group()\\n")
    get_ipython().system("torchrun --standalone --nproc-per-node {RANKS} script.py")
"""

# By default Ray shows lines that differ only in numbers once, and late.
RAY = f"""
import os
os.environ.update(RAY_DEDUP_LOGS="0", RAY_FLUSH_DRIVER_LOGS="1", RAY_USAGE_STATS_ENABLED="0")
import ray
ray.init(num_cpus={RANKS}, log_to_driver=True, include_dashboard=False)
@ray.remote(num_cpus=1)
class Rank:
    def __init__(self, rank, port):
        import os
        os.environ.update(RANK=str(rank), WORLD_SIZE="{RANKS}", MASTER_ADDR="127.0.0.1")
        os.environ["MASTER_PORT"] = str(port)
        self.names = {{}}
    def run(self, source):
        exec(source, self.names)
    def get(self, name):
        return self.names[name]
    def put(self, name, value):
        self.names[name] = value
"""

RAY_START = f"""
port = free_port()
ranks = [Rank.remote(rank, port) for rank in range({RANKS})]
def run(source):
    ray.get([each.run.remote(source) for each in ranks])
run({JOIN!r})
"""

# By default Monarch ends the notebook's kernel if a process fails.
MONARCH = """
import monarch.actor
from monarch.config import configure
configure(enable_log_forwarding=True)
monarch.actor.unhandled_fault_hook = print
from monarch.actor import Actor, current_rank, endpoint, this_host
class Rank(Actor):
    def __init__(self):
        self.names = {}
    @endpoint
    def join(self, size, port):
        import os
        os.environ.update(RANK=str(current_rank().rank), WORLD_SIZE=str(size))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    @endpoint
    def run(self, source):
        exec(source, self.names)
    @endpoint
    def get(self, name):
        return self.names[name]
    @endpoint
    def put(self, name, value):
        self.names[name] = value
"""

MONARCH_START = f"""
processes = this_host().spawn_procs({{"cpus": {RANKS}}})
await processes.logging_option(stream_to_client=True, aggregate_window_sec=None)
ranks = processes.spawn("ranks", Rank)
await ranks.join.call({RANKS}, free_port())
await ranks.run.call({JOIN!r})
"""

# A cell that is sent before all workers are connected is lost.
NBDISTRIBUTED = """%%capture
magics = get_ipython().magics_manager.registry["DistributedMagic"]
for _ in range(100):
    try: magics._comm_manager.send_to_all("get_status", {}, timeout=0.5)
    except TimeoutError: continue
    break
"""

JUPYTER_DISTRIBUTED = """
import asyncio, os, pathlib, time
from jupyter_distributed.process_registry import OrphanProcessReaper
folder = pathlib.Path(os.environ["JUPYTER_DISTRIBUTED_REGISTRY_FILE"]).parent
while not time.sleep(2):
    asyncio.run(OrphanProcessReaper(folder).reap())
"""

PEERS = (
    Peer(
        "nbdist",
        "",
        ("%load_ext nbdist", f"%%distributed -n {RANKS}\npass"),
        _magic("%%distributed"),
        again=("%dist_shutdown", f"%%distributed -n {RANKS}\npass"),
        restart=("%dist_restart",),
        home="%dist_gather value --as came",
        out="%dist_push value",
    ),
    Peer(
        "ipyparallel",
        "ipyparallel==9.2.0",
        (PORT, IPYPARALLEL, f"%%px\n{JOIN}"),
        _magic("%%px"),
        again=("client.close(); cluster.stop_cluster_sync()", IPYPARALLEL, f"%%px\n{JOIN}"),
        home="came = client[:]['value']",
        out="client.broadcast_view().push(dict(value=value), block=True)",
    ),
    Peer(
        "nbdistributed",
        "nbdistributed==0.1.0",
        ("%load_ext nbdistributed", f"%dist_init -n {RANKS}", NBDISTRIBUTED),
        _magic("%%distributed"),
        again=("%dist_shutdown", f"%dist_init -n {RANKS}", NBDISTRIBUTED),
        restart=("%dist_reset", f"%dist_init -n {RANKS}", NBDISTRIBUTED),
    ),
    Peer(
        "Jupyter Distributed",
        "jupyter-distributed==0.1.1",
        (JOIN,),
        lambda source: source,
        again=(RESTART, JOIN),
        kernel="jupyter_distributed.kernel",
        interrupt_mode="message",
        live="jupyter.distributed.rank_updates",
        server=JUPYTER_DISTRIBUTED,
    ),
    Peer(
        "notebook_launcher",
        "accelerate==1.15.0",
        (PORT, NOTEBOOK_LAUNCHER),
        _call,
        again=("pass",),
        keeps=False,
    ),
    Peer(
        "torchrunx",
        "torchrunx==0.4.0",
        (TORCHRUNX,),
        _call,
        again=("pass",),
        home="came = run(SOURCE)",
        out="_ = run('pass', value)",
        keeps=False,
    ),
    Peer(
        "torchrun",
        "",
        (TORCHRUN,),
        _call,
        again=("pass",),
        keeps=False,
    ),
    Peer(
        "Ray",
        "ray==2.60.0",
        (PORT, RAY, RAY_START),
        _call,
        again=("for each in ranks: ray.kill(each)", RAY_START),
        home="came = ray.get([each.get.remote('value') for each in ranks])",
        out="there = ray.put(value); ray.get([each.put.remote('value', there) for each in ranks])",
    ),
    Peer(
        "Monarch",
        "torchmonarch==0.7.0",
        (PORT, MONARCH, MONARCH_START),
        lambda source: f"_ = await ranks.run.call({source!r})",
        again=("await processes.stop()", MONARCH_START),
        home="came = [value for _, value in await ranks.get.call('value')]",
        out="_ = await ranks.put.call('value', value)",
    ),
)
