"""Rows of cells, calls of the Python API and collectives: how long one takes that does little."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from nbdist.errors import WorkerError
from nbdist.world.world import World
from tests.bench.harness import Figure, percentile, ratios
from tests.bench.lab import DONE, REPLIED, CellFailed, Lab, Notebook, seconds_of
from tests.bench.starting import start_world

SIZES = (1, 2, 4, 8, 16, 32)
PEER_SIZES = (4, 16)
CELLS = 30
WARM_UP = 5
PASS = "%%distributed\npass"
PASS_BUDGETS = {4: 15, 8: 25, 16: 50, 32: 120}
RATIO_BUDGETS = {4: 1.7, 8: 2.3, 16: 4.0}
BARRIER = "%%distributed\ndist.barrier()"
LINES = '%%distributed\nfor i in range(50_000):\n    print(f"rank {rank} line {i}")'
FIRST = (
    '%%distributed\nimport time\nif rank == 0:\n    print("the first line")\n'
    "    time.sleep(2)\nelse:\n    time.sleep(2)"
)

Rounds = list[list[float]]
"""Milliseconds of each cell, in each run."""


def pass_cell(lab: Lab) -> Iterator[Figure]:
    """The least that a distributed cell takes, beside a plain one of the same notebook."""
    for count in PEER_SIZES:
        with lab.notebooks(count) as kernels:
            (times,) = _rounds(lab, partial(_pass_at_once, kernels))
            yield from _spread(f"peer: jupyter_client, n={count}", times)
    for ranks in SIZES:
        with lab.notebook() as notebook:
            start_world(notebook, ranks)
            plain, times = _rounds(lab, _cell(notebook, "pass"), _cell(notebook, PASS))
        yield from _spread(f"pass cell, n={ranks}", times, PASS_BUDGETS.get(ranks))
        yield from _spread("  in the notebook only, beside it", plain)
        values = ratios(*([percentile(each, 50) for each in rounds] for rounds in (times, plain)))
        yield Figure("  of a plain one", "x", values, RATIO_BUDGETS.get(ranks))


def barrier(lab: Lab) -> Iterator[Figure]:
    """A cell in which all ranks meet."""
    for ranks in SIZES:
        with lab.notebook() as notebook:
            start_world(notebook, ranks)
            (times,) = _rounds(lab, _cell(notebook, BARRIER))
            yield from _spread(f"barrier cell, n={ranks}", times)


def lines(lab: Lab) -> Iterator[Figure]:
    """Four ranks that print 50,000 lines each; the last line of each has to be shown."""
    with lab.notebook() as notebook:
        start_world(notebook, 4)
        runs = lab.runs_of(lambda: notebook.run(LINES))
    for run in runs:
        if not all(f"rank {rank} line 49999" in run.displays[-1].text for rank in range(4)):
            raise CellFailed("a last line is not shown")
    sizes = [sum(output.size for output in run.outputs) / 1000 for run in runs]
    yield Figure("4 ranks x 50,000 lines", "s", [run.seconds for run in runs], 5)
    yield Figure("what the notebook published meanwhile", "kB", sizes)


def firstline(lab: Lab) -> Iterator[Figure]:
    """How soon a line is seen while its rank goes on."""
    with lab.notebook() as notebook:
        start_world(notebook, 4)
        values = lab.runs_of(lambda: _first_line_once(notebook))
    yield Figure("rank 0's line shown, all sleep 2 s, n=4", "ms", values)


def _first_line_once(notebook: Notebook) -> float:
    for shown in notebook.run(FIRST).displays:
        if "the first line" in shown.text:
            return 1000 * shown.after
    raise CellFailed("the line was never shown")


def _pass_at_once(kernels: list[Notebook]) -> float:
    sent = [(kernel, kernel.send("pass")) for kernel in kernels]
    for is_enough in (REPLIED, DONE):
        for kernel, each in sent:
            kernel.wait(each, is_enough)
    return max(each.started + each.seconds for _, each in sent) - sent[0][1].started


def _cell(notebook: Notebook, source: str) -> Callable[[], float]:
    return lambda: notebook.run(source).seconds


def _rounds(lab: Lab, *asks: Callable[[], float]) -> list[Rounds]:
    """Ask in turn, so that all have the machine as it was at that time."""
    for ask in asks * WARM_UP:
        ask()
    found: list[Rounds] = [[] for _ in asks]
    for _ in range(lab.runs):
        cells = [[1000 * ask() for ask in asks] for _ in range(CELLS)]
        for rounds, times in zip(found, zip(*cells, strict=True), strict=True):
            rounds.append([*times])
    return found


def _spread(what: str, rounds: Rounds, budget: float | None = None) -> Iterator[Figure]:
    for percent, limit in ((50, budget), (95, None)):
        values = [percentile(times, percent) for times in rounds]
        yield Figure(f"{what}, p{percent}", "ms", values, limit)


CALL_SIZES = (4, 16)
CALL_BUDGETS = {"execute": 10.0, "run": 4.0, "gather": 4.0, "status": 10.0}
"""Milliseconds, at n=4."""


def one() -> int:
    """What is called."""
    return 1


def calls(lab: Lab) -> Iterator[Figure]:
    """`execute("pass")`, `run(f)`, `gather("x")` and `status()` of ranks that do nothing else."""
    for ranks in CALL_SIZES:
        with World(ranks, log_dir="") as world:
            world.execute("x = 1")
            asks: dict[str, Callable[[], object]] = {
                "execute": partial(world.execute, "pass"),
                "run": partial(world.run, one),
                "gather": partial(world.gather, "x"),
                "status": world.status,
            }
            for name, ask in asks.items():
                (times,) = _rounds(lab, partial(seconds_of, ask))
                budget = CALL_BUDGETS[name] if ranks == CALL_SIZES[0] else None
                values = [percentile(each, 50) for each in times]
                yield Figure(f"{name}, n={ranks}, p50", "ms", values, budget)


REDUCING = 2
"""As many as there are cores: more would measure how they take turns."""

HEALINGS = 20
TENSORS = {"1 KB": (256, 2000), "10 MB": (2_500_000, 60)}
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

PLAIN_GROUP = """
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


def collect(lab: Lab) -> Iterator[Figure]:
    """Microseconds of an all_reduce over gloo, n=2; the budget is a group of torch's own."""
    plain = {size: lab.runs_of(partial(_plain, *numbers)) for size, numbers in TENSORS.items()}
    with World(REDUCING, log_dir="") as world:
        world.execute(TIMED)
        for state in ("", f", healed {HEALINGS} times"):
            if state:
                _heal(world)
            for size, (elements, times) in TENSORS.items():
                source = f"timed({elements}, {times})"
                measure = partial(world.execute, "", fetch=(source,))
                values = [float(each.rank(0)) for each in lab.runs_of(measure)]
                limit = statistics.median(plain[size])
                yield Figure(f"all_reduce of {size}{state}", "µs", values, limit)


def _heal(world: World) -> None:
    for _ in range(HEALINGS):
        with suppress(WorkerError):
            world.execute("if rank == 0: raise ValueError\ndist.all_reduce(torch.ones(1))")
            raise AssertionError("nothing has failed")


def _plain(elements: int, times: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "plain.py")
        script.write_text(PLAIN_GROUP.replace("def main", TIMED + "\ndef main", 1))
        command = [sys.executable, script, f"{folder}/store", REDUCING, elements, times]
        done = subprocess.run(
            [*map(str, command)], capture_output=True, text=True, timeout=120, check=True
        )
    return float(done.stdout)
