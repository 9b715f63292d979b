"""A worker that was spawned, not forked: reads its `WorkerStart` from stdin and becomes it."""

from __future__ import annotations

import os
import pickle
import sys

from nbdist.worker.main import become_worker
from nbdist.worker.process import die_with_parent

die_with_parent(os.getppid())
worker_start = pickle.load(sys.stdin.buffer)
# Users' code finds stdin empty.
nothing = os.open(os.devnull, os.O_RDONLY)
os.dup2(nothing, 0)
os.close(nothing)
become_worker(worker_start)
