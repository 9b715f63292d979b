"""Rows of what a collective costs: in a world, after healing, and in a group of torch's own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

from nbdist.errors import WorkerError
from nbdist.world.world import World
from tests.bench.harness import Figure
from tests.bench.lab import Lab

RANKS = 2
"""As many as there are cores: more would measure how they take turns."""

HEALINGS = 20
SIZES = {"1 KB": (256, 2000), "10 MB": (2_500_000, 60)}
"""Elements of a float32 tensor, and how often it is reduced in one run."""

TIMED = """
import time
def timed(elements, times):
    tensor = torch.zeros(elements)
    for _ in range(times // 10):
        dist.all_reduce(tensor)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(times):
        dist.all_reduce(tensor)
    return (time.perf_counter() - start) / times * 1e6
"""

PLAIN = """
import sys, torch, torch.distributed as dist, torch.multiprocessing
def main(rank, store, size, elements, times):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    found = timed(elements, times)
    if rank == 0:
        print(found)
    dist.destroy_process_group()
if __name__ == "__main__":
    store, *numbers = sys.argv[1:]
    torch.multiprocessing.spawn(main, (store, *map(int, numbers)), nprocs=int(numbers[0]))
"""


def collectives(lab: Lab) -> Iterator[Figure]:
    """Microseconds of an all_reduce over gloo, n=2; the budget is a group of torch's own."""
    plain = {
        size: sorted(_plain(*numbers) for _ in range(lab.runs)) for size, numbers in SIZES.items()
    }
    with World(RANKS, log_dir="") as world:
        world.execute(TIMED)
        for state in ("", f", healed {HEALINGS} times"):
            if state:
                _heal(world)
            for size, (elements, times) in SIZES.items():
                measure = _in(world, f"timed({elements}, {times})")
                values = tuple(measure() for _ in range(lab.runs))
                limit = plain[size][len(plain[size]) // 2]
                yield Figure("collect", f"all_reduce of {size}{state}", "µs", values, limit)


NOTED = """
import statistics
from nbdist.worker.group import gloo
def without(self, *args, **options):
    own = gloo._Wait(self)
    gloo._waits.append(own)
    try:
        is_done = gloo._wait_for_work(self, *args, **options)
    finally:
        gloo._waits.remove(own)
    if own.is_over and not is_done:
        raise ConnectionResetError(gloo.ABORTED)
    return is_done
def of(wait, times, tensor=torch.zeros(256)):
    dist.Work.wait = wait
    dist.barrier()
    start = time.perf_counter()
    for _ in range(times):
        dist.all_reduce(tensor)
    return time.perf_counter() - start
def noted(rounds, times):
    try:
        found = [of(gloo.wait, times) / of(without, times) for _ in range(rounds)]
    finally:
        dist.Work.wait = gloo.wait
    return statistics.median(found)
"""


def timeline(lab: Lab) -> Iterator[Figure]:
    """An all_reduce of 1 KB whose wait is noted for `%dist_timeline`, beside one that is not."""
    with World(RANKS, log_dir="") as world:
        world.execute(f"import time\n{NOTED}")
        measure = _in(world, "noted(40, 50)")
        values = tuple(measure() for _ in range(lab.runs))
        yield Figure("timeline", "all_reduce of 1 KB: waits noted / not", "x", values, 1.05)


def _in(world: World, expression: str) -> Callable[[], float]:
    return lambda: float(world.execute("", fetch=(expression,)).rank(0))


def _heal(world: World) -> None:
    for _ in range(HEALINGS):
        try:
            world.execute("if rank == 0: raise ValueError\ndist.all_reduce(torch.ones(1))")
        except WorkerError:
            continue
        raise AssertionError("nothing has failed")


def _plain(elements: int, times: int) -> float:
    """The same between two processes that nbdist has not touched."""
    with tempfile.TemporaryDirectory() as folder:
        script = f"{folder}/plain.py"
        with open(script, "w", encoding="utf-8") as file:
            file.write(PLAIN.replace("def main", TIMED + "\ndef main", 1))
        numbers = (str(number) for number in (RANKS, elements, times))
        done = subprocess.run(
            [sys.executable, script, f"{folder}/store", *numbers],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    return float(done.stdout)
