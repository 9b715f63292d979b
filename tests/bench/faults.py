"""Rows of what goes wrong: how long until the notebook is free and all ranks work again."""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench.harness import Figure
from tests.bench.lab import Lab
from tests.bench.notebook import CellFailed, Notebook
from tests.bench.starting import ALL_REDUCE, start_world

RANKS = 4
STOP_AFTER = 1.0
"""Seconds into a cell at which Stop is pressed; they are not counted."""

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
