"""Rows of big values: tensors to ranks and back beside a memcpy, errors, displays, `track`."""

from __future__ import annotations

import time
from collections.abc import Iterator

from nbdist.output.chart import curves_html, curves_text
from nbdist.world.world import World
from tests.bench.lab import CellFailed, Figure, Lab, Notebook
from tests.bench.starting import start_world

RANKS = 4
SHIP_BUDGET = 1.5

PREPARE = """
import ctypes, mmap, os, time, torch
source, target = torch.ones(2**28), torch.zeros(2**28)
def copied(address):
    started = time.perf_counter()
    ctypes.memmove(address, source.data_ptr(), 2**30)
    return time.perf_counter() - started
"""
COPY = "print(copied(target.data_ptr()))"
COPY_FRESH = """
fresh = mmap.mmap(-1, 2**30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # as malloc does
address = ctypes.addressof(view := ctypes.c_char.from_buffer(fresh))
print(copied(address))
del view
fresh.close()
"""
CHANGE = "source += 1\nexpected = float(source[-1])"
SHIP = "%%distributed\nlast = float(source[-1])"
CHECK_SHIPPED = "%dist_gather last --as lasts"
PIECES = "%%distributed\npiece = torch.full((2**26,), float(rank))"
GATHER = "%dist_gather piece --as pieces"
CHECK_GATHERED = "print([float(piece[-1]) for piece in pieces])\ndel pieces"


def ship(lab: Lab) -> Iterator[Figure]:
    """1 GiB to four ranks, and 256 MiB from each, as multiples of one memcpy of 1 GiB."""
    with lab.notebook() as notebook:
        start_world(notebook, RANKS)
        notebook.run(PREPARE, PIECES)
        # A first time without a figure: a virtual machine may have to get memory from its host.
        _once(notebook)
        # In turns, so that all figures suffer alike from other programs.
        runs = [_once(notebook) for _ in range(lab.runs)]
    warm, fresh, there, back = (tuple(values) for values in zip(*runs, strict=True))
    yield Figure("ship", "limit: memcpy of 1 GiB", "s", warm)
    yield Figure("ship", "limit: the same into a new array (page faults)", "s", fresh)
    for what, times in (("1 GiB to 4 ranks", there), ("256 MiB from each of 4", back)):
        yield Figure("ship", what, "s", times)
        yield Figure("ship", f"{what} / memcpy", "x", _ratios(times, warm), SHIP_BUDGET)
        yield Figure(
            "ship", f"{what} / memcpy into a new array", "x", _ratios(times, fresh), SHIP_BUDGET
        )


MODEL = """%%distributed
layers = [torch.nn.Linear(2048, 2048, bias=False) for _ in range(64)]
model = torch.nn.Sequential(*layers).requires_grad_(False)
model.load_state_dict({name: torch.full_like(value, 0.5) for name, value in
                       model.state_dict().items()})
"""
PASS = "%%distributed\nfor layer in model: layer.weight.sum()"
DIFF = "%dist_diff model"


def differ(lab: Lab) -> Iterator[Figure]:
    """A model of 1 GiB on four ranks compared."""
    with lab.notebook() as notebook:
        start_world(notebook, RANKS)
        notebook.run(MODEL, PASS)
        looks, passes = [], []
        for _ in range(lab.runs):
            passes.append(notebook.run(PASS).seconds)
            looks.append(notebook.run(DIFF).seconds)
    yield Figure("differ", "limit: one pass over 1 GiB on each of 4", "s", tuple(passes))
    yield Figure("differ", "%dist_diff of 1 GiB on each of 4", "s", tuple(looks), 2.0)


def _once(notebook: Notebook) -> tuple[float, ...]:
    warm = float(notebook.run(COPY).printed)
    fresh = float(notebook.run(COPY_FRESH).printed)
    notebook.run(CHANGE)
    there = notebook.run(SHIP).seconds
    notebook.run(CHECK_SHIPPED)
    if notebook.run("print(set(lasts) == {expected})").printed.strip() != "True":
        raise CellFailed("the ranks did not get the tensor as it is now")
    back = notebook.run(GATHER).seconds
    if notebook.run(CHECK_GATHERED).printed.strip() != "[0.0, 1.0, 2.0, 3.0]":
        raise CellFailed("the pieces that came back are not those of the ranks")
    return warm, fresh, there, back


def _ratios(times: tuple[float, ...], limits: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(time / limit for time, limit in zip(times, limits, strict=True))


GIANTS = {
    "RecursionError": "def again(n):\n    return again(n + 1)\nagain(0)",
    "a message of 10 MB": "raise ValueError('x' * 10_000_000)",
    "a message of 100 MB": "raise ValueError('x' * 100_000_000)",
    "HTML of 20 MB": "class Big:\n    def _repr_html_(self): return '<b>x</b>' * 2_500_000\nBig()",
    "HTML of 50 MB": "class Big:\n    def _repr_html_(self): return '<b>x</b>' * 6_250_000\nBig()",
}
GIANT_BUDGET = 2.0


def giants(lab: Lab) -> Iterator[Figure]:
    """What one rank says of many megabytes, as a multiple of what a plain kernel takes."""
    with lab.notebook() as plain, lab.notebook() as notebook:
        plain.run("import torch")  # as in a worker: tracebacks look through all modules
        start_world(notebook, 1)
        for what, source in GIANTS.items():
            pairs = [
                (
                    plain.run(source, may_fail=True).seconds,
                    notebook.run(f"%%distributed\n{source}", may_fail=True).seconds,
                )
                for _ in range(lab.runs)
            ]
            yield Figure("giants", f"{what}, n=1", "s", tuple(pair[1] for pair in pairs))
            yield Figure(
                "giants", "  a plain kernel beside it", "s", tuple(pair[0] for pair in pairs)
            )
            ratios = tuple(cell / alone for alone, cell in pairs)
            yield Figure("giants", "  of a plain one", "x", ratios, GIANT_BUDGET)


CALLS, FLOOD = 50_000, 10_000_000
CALL_BUDGET, NOTEBOOK_BUDGET, PICTURE_BUDGET = 5.0, 5.0, 0.05

LOOP = """
import time
value = {value}
begun = time.thread_time()
for _ in range({calls}): track(loss=value)
took = (time.thread_time() - begun) / {calls} * 1e6
"""

TRACKED = {"a float": "0.5", "a tensor": "torch.tensor(0.5)"}


def track(lab: Lab) -> Iterator[Figure]:
    """A call of `track` on a rank, ten million of them from four, and a picture of these."""
    with World(RANKS, log_dir="") as world:
        for what, value in TRACKED.items():
            took: list[float] = []
            for _ in range(lab.runs):
                world.execute(LOOP.format(value=value, calls=CALLS))
                took += world.gather("took")
            yield Figure("track", f"track({what}), CPU of a rank", "us", (*took,), CALL_BUDGET)
        begun = time.process_time()
        world.execute(LOOP.format(value="0.5", calls=FLOOD // RANKS))
        seconds = time.process_time() - begun
        what = f"{FLOOD:,} points from {RANKS} ranks, CPU of the notebook"
        yield Figure("track", what, "s", (seconds,), NOTEBOOK_BUDGET)
        curves, took = world.engine.outputs.curves, []
        for draw in (curves_html, curves_text):
            begun = time.process_time()
            draw(curves)
            took.append(time.process_time() - begun)
        yield Figure("track", "their picture, and their table", "s", (*took,), PICTURE_BUDGET)
