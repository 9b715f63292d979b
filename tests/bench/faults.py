"""Rows of what goes wrong, until all ranks work again, and of asking what ranks are at."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from nbdist.world.world import World
from tests.bench.harness import Figure
from tests.bench.lab import CellFailed, Lab, Notebook, seconds_of
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
        for what, (source, budget) in {**FAULTS, **STOPS}.items():
            is_stop = what in STOPS
            press = PRESS.format(after=STOP_AFTER) if is_stop else ""
            values = lab.runs_of(partial(_once, notebook, press + CATCH.format(source=source)))
            before = STOP_AFTER if is_stop else 0.0
            yield Figure(what, "s", [each - before for each in values], budget)


def _once(notebook: Notebook, cell: str) -> float:
    sent = notebook.run(cell, ALL_REDUCE.format(options=""))
    if "caught" not in sent.printed:
        raise CellFailed("the cell did not fail")
    if not any(f"sum {RANKS}.0" in shown.text for shown in sent.displays):
        raise CellFailed("the all_reduce afterwards gave no sum")
    return sent.seconds


MANY_RANKS = 16
SETTLE_SECONDS = 1.0

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
            looks = {"status": (world.status, 0.2), "stacks": (world.stacks, 1.0)}
            for what, source in SITUATIONS.items():
                seconds = int(SETTLE_SECONDS + 1 + lab.runs)
                running = world.submit(world.task(source.format(seconds=seconds)))
                settled = time.monotonic() + SETTLE_SECONDS
                while time.monotonic() < settled:
                    world.session.receive(0.1)
                for name, (ask, budget) in looks.items():
                    values = lab.runs_of(partial(seconds_of, ask))
                    yield Figure(f"{name}, {what}, n={ranks}", "s", values, budget)
                world.session.wait(running)
