"""Rows of cells, calls and collectives that do little, of faults, and of looks at ranks."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial

from nbdist.errors import WorkerError
from nbdist.world import dispatch, inbox
from nbdist.world.world import World
from tests.bench.lab import DONE, REPLIED, CellFailed, Figure, Lab, Notebook, percentile, seconds_of
from tests.bench.starting import ALL_REDUCE, start_world

RATIO_BUDGETS = {4: 1.7, 8: 2.3, 16: 4.0}

SIZES = (1, 2, 4, 8, 16, 32)
PEER_SIZES = (4, 16)
CELLS = 30
WARM_UP = 5
PASS = "%%distributed\npass"
PASS_BUDGETS = {4: 15, 8: 25, 16: 50, 32: 120}
LINES = '%%distributed\nfor i in range(50_000):\n    print(f"rank {rank} line {i}")'


def pass_cell(lab: Lab) -> Iterator[Figure]:
    """The least that a distributed cell takes, and what the notebook and Jupyter alone take."""
    with lab.notebook() as notebook:
        yield from _spread("pass", "limit: in the notebook only", _cells(lab, notebook, "pass"))
    for count in PEER_SIZES:
        with lab.notebooks(count) as kernels:
            times = _rounds(lab, partial(_pass_at_once, kernels))
            yield from _spread("pass", f"peer: jupyter_client, n={count}", times)
    for ranks in SIZES:
        with lab.notebook() as notebook:
            start_world(notebook, ranks)
            times = _cells(lab, notebook, PASS)
            yield from _spread("pass", f"pass cell, n={ranks}", times, PASS_BUDGETS.get(ranks))


def ratio(lab: Lab) -> Iterator[Figure]:
    """A `pass` cell on all workers beside a plain one of the same notebook."""
    for ranks, budget in RATIO_BUDGETS.items():
        with lab.notebook() as notebook:
            start_world(notebook, ranks)
            yield from _beside_plain(lab, notebook, ranks, budget)


def _beside_plain(lab: Lab, notebook: Notebook, ranks: int, budget: float) -> Iterator[Figure]:
    """Measure both cells in turn, so that both have the machine in the same state."""
    for _ in range(WARM_UP):
        notebook.run(PASS)
    plain, cells = [], []
    for _ in range(lab.runs):
        pairs = [
            (1000 * notebook.run("pass").seconds, 1000 * notebook.run(PASS).seconds)
            for _ in range(CELLS)
        ]
        plain.append(percentile([pair[0] for pair in pairs], 50))
        cells.append(percentile([pair[1] for pair in pairs], 50))
    ratios = tuple(cell / alone for cell, alone in zip(cells, plain, strict=True))
    yield Figure("ratio", f"pass cell, n={ranks}, p50", "ms", tuple(cells))
    yield Figure("ratio", "  plain pass beside it, p50", "ms", tuple(plain))
    yield Figure("ratio", "  of a plain one", "x", ratios, budget)


def lines(lab: Lab) -> Iterator[Figure]:
    """Four ranks that print 50,000 lines each; the last line of each has to be shown."""
    with lab.notebook() as notebook:
        start_world(notebook, 4)
        runs = [notebook.run(LINES) for _ in range(lab.runs)]
    for run in runs:
        if not all(f"rank {rank} line 49999" in run.displays[-1].text for rank in range(4)):
            raise CellFailed("a last line is not shown")
    sizes = tuple(sum(output.size for output in run.outputs) / 1000 for run in runs)
    yield Figure("lines", "4 ranks x 50,000 lines", "s", tuple(run.seconds for run in runs), 5)
    yield Figure("lines", "what the notebook published meanwhile", "kB", sizes)


def _pass_at_once(kernels: list[Notebook]) -> float:
    sent = [(kernel, kernel.send("pass")) for kernel in kernels]
    for kernel, each in sent:
        kernel.wait(each, REPLIED)
    last = max(each.started + each.seconds for _, each in sent)
    for kernel, each in sent:
        kernel.wait(each, DONE)
    return last - sent[0][1].started


def _cells(lab: Lab, notebook: Notebook, source: str) -> list[list[float]]:
    return _rounds(lab, lambda: notebook.run(source).seconds)


def _rounds(lab: Lab, once: Callable[[], float]) -> list[list[float]]:
    for _ in range(WARM_UP):
        once()
    return [[1000 * once() for _ in range(CELLS)] for _ in range(lab.runs)]


def _spread(
    row: str, what: str, rounds: list[list[float]], budget: float | None = None
) -> Iterator[Figure]:
    for percent in (50, 95):
        values = tuple(percentile(times, percent) for times in rounds)
        limit = budget if percent == 50 else None
        yield Figure(row, f"{what}, p{percent}", "ms", values, limit)


WIDGETS = """%%distributed
import ipywidgets
sliders = [ipywidgets.IntSlider() for _ in range({number})]"""


def widgets(lab: Lab) -> Iterator[Figure]:
    """What a hundred sliders on each of eight ranks take, and a `pass` cell before and after."""
    with lab.notebook() as notebook:
        start_world(notebook, 8)
        yield from _spread("widgets", "pass cell, n=8", _cells(lab, notebook, PASS))
        notebook.run(WIDGETS.format(number=1))
        took = notebook.run(WIDGETS.format(number=100)).seconds
        yield Figure("widgets", "100 sliders on each of 8 ranks", "s", (took,))
        yield from _spread("widgets", "pass cell, n=8, after that", _cells(lab, notebook, PASS))


CALL_SIZES = (4, 16)
CALL_BUDGETS = {"execute": 10.0, "run": 4.0, "gather": 4.0, "status": 10.0}
"""Milliseconds with four ranks."""


def one() -> int:
    """Return a number: the function that ranks call."""
    return 1


def calls(lab: Lab) -> Iterator[Figure]:
    """`execute("pass")`, `run(f)`, `gather("x")` and `status()` of ranks that do nothing else."""
    for ranks in CALL_SIZES:
        with World(ranks, log_dir="") as world:
            world.execute("x = 1")
            asks: dict[str, Callable[[], object]] = {
                "execute": lambda world=world: world.execute("pass"),
                "run": lambda world=world: world.run(one),
                "gather": lambda world=world: world.gather("x"),
                "status": lambda world=world: world.status(),
            }
            for name, ask in asks.items():
                values = tuple(_median(ask) for _ in range(lab.runs))
                budget = CALL_BUDGETS[name] if ranks == CALL_SIZES[0] else None
                yield Figure("calls", f"{name}, n={ranks}, p50", "ms", values, budget)


def _median(ask: Callable[[], object]) -> float:
    for _ in range(WARM_UP):
        ask()
    return percentile([1000 * seconds_of(ask) for _ in range(CELLS)], 50)


REDUCING = 2
"""Ranks, as many as there are cores: more ranks would measure how cores are shared."""

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
    plain = {
        size: sorted(_plain(*numbers) for _ in range(lab.runs)) for size, numbers in TENSORS.items()
    }
    with World(REDUCING, log_dir="") as world:
        world.execute(TIMED)
        for state in ("", f", healed {HEALINGS} times"):
            if state:
                _heal(world)
            for size, (elements, times) in TENSORS.items():
                measure = _in(world, f"timed({elements}, {times})")
                values = tuple(measure() for _ in range(lab.runs))
                limit = plain[size][len(plain[size]) // 2]
                yield Figure("collect", f"all_reduce of {size}{state}", "µs", values, limit)


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
    with tempfile.TemporaryDirectory() as folder:
        script = f"{folder}/plain.py"
        with open(script, "w", encoding="utf-8") as file:
            file.write(PLAIN_GROUP.replace("def main", TIMED + "\ndef main", 1))
        numbers = (str(number) for number in (REDUCING, elements, times))
        done = subprocess.run(
            [sys.executable, script, f"{folder}/store", *numbers],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    return float(done.stdout)


# --- faults, until all ranks work again; looks at the state of ranks --------------------------

RANKS = 4
STOP_AFTER = 1.0
"""Seconds into a cell when Stop is pressed, which the figures leave out."""

RAISES = "if rank == 1: raise ValueError('bad')\n"
FAULTS = {
    "1 of 4 raises before a small all_reduce": (RAISES + "dist.all_reduce(torch.ones(9))", 0.5),
    "1 of 4 raises before a 100 MB all_reduce": (
        RAISES + "dist.all_reduce(torch.ones(25_000_000))",
        0.5,
    ),
    "1 of 4 skips a barrier": ("if rank != 1: dist.barrier()", None),
    "1 of 4 killed in a barrier, replaced": (
        "import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()",
        1.0,
    ),
}
STOPS = {
    "Stop of Python code": ("import time\ntime.sleep(600)", 0.3),
    "Stop of ranks in a barrier": ("import time\nif rank: time.sleep(600)\ndist.barrier()", 5),
    "Stop of a rank that ignores it": (
        "import signal, time\nif rank == 1: signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "while True: time.sleep(0.1)",
        5,
    ),
}
CATCH = (
    "try:\n    get_ipython().run_cell_magic('distributed', '', {source!r})\n"
    "except BaseException as error:\n    print('caught', error)"
)
PRESS = (
    "import os, signal, threading\n"
    "threading.Timer({after}, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
)


def faults(lab: Lab) -> Iterator[Figure]:
    """From a failure, a death or Stop, until an all_reduce has worked again."""
    with lab.notebook() as notebook:
        start_world(notebook, RANKS)
        for what, (source, budget) in FAULTS.items():
            cell = CATCH.format(source=source)
            values = tuple(_once(notebook, cell) for _ in range(lab.runs))
            yield Figure("faults", what, "s", values, budget)
        for what, (source, budget) in STOPS.items():
            cell = PRESS.format(after=STOP_AFTER) + CATCH.format(source=source)
            values = tuple(_once(notebook, cell) - STOP_AFTER for _ in range(lab.runs))
            yield Figure("faults", what, "s", values, budget)


def _once(notebook: Notebook, cell: str) -> float:
    sent = notebook.run(cell, ALL_REDUCE.format(options=""))
    if "caught" not in sent.printed:
        raise CellFailed("the cell did not fail")
    if not any(f"sum {RANKS}.0" in shown.text for shown in sent.displays):
        raise CellFailed("the all_reduce afterwards gave no sum")
    return sent.seconds


MANY_RANKS = 16
SETTLE_SECONDS = 1.0
STATUS_BUDGET, STACKS_BUDGET = 0.2, 1.0

SITUATIONS = {
    "all in a collective": "import time\nif rank == 0: time.sleep({seconds})\ndist.barrier()",
    "one holds the GIL": "import ctypes\nif rank == 1: ctypes.PyDLL(None).sleep({seconds})",
    "all in Python code": (
        "import time\nend = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass"
    ),
}


def look(lab: Lab) -> Iterator[Figure]:
    """What ranks do, asked while they do it: state of each, and stacks; n=4 and 16."""
    for ranks in (4, MANY_RANKS):
        with World(ranks, log_dir="") as world:
            for what, source in SITUATIONS.items():
                seconds = int(SETTLE_SECONDS + 1 + lab.runs)
                running = world.submit(world.task(source.format(seconds=seconds)))
                settled = time.monotonic() + SETTLE_SECONDS
                while time.monotonic() < settled:
                    inbox.receive(world.engine, 0.1)
                status = tuple(seconds_of(world.status) for _ in range(lab.runs))
                yield Figure("look", f"status, {what}, n={ranks}", "s", status, STATUS_BUDGET)
                stacks = tuple(seconds_of(world.stacks) for _ in range(lab.runs))
                yield Figure("look", f"stacks, {what}, n={ranks}", "s", stacks, STACKS_BUDGET)
                dispatch.wait(world.engine, running)
