"""A worker that was spawned, not forked: reads its `RankStart` from stdin and becomes it."""

from __future__ import annotations

import os
import pickle
import sys

from nbdist.worker.process import become_worker


def main() -> None:
    """Read the orders, leave stdin empty, and run until the kernel ends."""
    orders = pickle.load(sys.stdin.buffer)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    become_worker(orders, parent_pid=os.getppid(), forked=False)


main()
