"""Rows of what is big: tensors to all ranks and back beside a memcpy, errors and displays."""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench.harness import Figure
from tests.bench.lab import CellFailed, Lab, Notebook
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
COPY_SHARED = """
contents = (ctypes.c_char * 2**30).from_address(source.data_ptr())
descriptor, done = os.memfd_create("bench"), 0
started = time.perf_counter()
while done < 2**30:
    done += os.pwrite(descriptor, memoryview(contents)[done:], done)
print(time.perf_counter() - started)
os.close(descriptor)
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
        # Once in vain: a virtual machine may have to ask its host for the memory first.
        _once(notebook)
        # By turns, so that what else goes on meets all of them.
        runs = [_once(notebook) for _ in range(lab.runs)]
    warm, fresh, shared, there, back = (tuple(values) for values in zip(*runs, strict=True))
    yield Figure("ship", "limit: memcpy of 1 GiB", "s", warm)
    yield Figure("ship", "limit: the same into a new array (page faults)", "s", fresh)
    yield Figure("ship", "limit: the same into new shared memory", "s", shared)
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
BIG_DICT = "big = {n: torch.full((2_500_000,), float(n)) for n in range(100)}"
USE = "%%distributed\nlast = float(big[99][-1]) + len(big)"
ANEW = "big = {n: each.clone() + 1 for n, each in big.items()}"


def differ(lab: Lab) -> Iterator[Figure]:
    """A model of 1 GiB on four ranks compared; a dict of 1 GB shipped again."""
    with lab.notebook() as notebook:
        start_world(notebook, RANKS)
        notebook.run(MODEL, PASS, "import torch", BIG_DICT, USE)
        looks, passes, whole = [], [], []
        for _ in range(lab.runs):
            passes.append(notebook.run(PASS).seconds)
            looks.append(notebook.run(DIFF).seconds)
            notebook.run(ANEW)
            whole.append(notebook.run(USE).seconds)
    yield Figure("differ", "limit: one pass over 1 GiB on each of 4", "s", tuple(passes))
    yield Figure("differ", "%dist_diff of 1 GiB on each of 4", "s", tuple(looks), 2.0)
    yield Figure("differ", "a dict of 1 GB to 4 ranks, all of it", "s", tuple(whole))


def _once(notebook: Notebook) -> tuple[float, ...]:
    warm = float(notebook.run(COPY).printed)
    fresh = float(notebook.run(COPY_FRESH).printed)
    shared = float(notebook.run(COPY_SHARED).printed)
    notebook.run(CHANGE)
    there = notebook.run(SHIP).seconds
    notebook.run(CHECK_SHIPPED)
    if notebook.run("print(set(lasts) == {expected})").printed.strip() != "True":
        raise CellFailed("the ranks did not get the tensor as it is now")
    back = notebook.run(GATHER).seconds
    if notebook.run(CHECK_GATHERED).printed.strip() != "[0.0, 1.0, 2.0, 3.0]":
        raise CellFailed("the pieces that came back are not those of the ranks")
    return warm, fresh, shared, there, back


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
        plain.run("import torch")  # as a worker has: tracebacks look through all modules
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
