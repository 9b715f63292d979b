"""Gives a forked worker of its own what an interpreter that was spawned would have.

Called by `nbdist.worker.process` in the child, when it has its environment and before its
kernel is made.  What a fork shares with its siblings, gone through with Python 3.11 and
torch 2.13:

=====================  ==============================================================
random state           torch's generator of the CPU and numpy's global one are seeded
                       here.  `random` does so itself at a fork; torch makes and seeds
                       the generators of GPUs when CUDA is initialised, which is never
                       before the fork; `secrets`, `os.urandom`, `uuid` and OpenSSL
                       (since 1.1.1) ask the kernel, or notice the fork.
temporary names        `tempfile` notices the fork and draws names of its own; the
                       folder that it found is looked for again here, because the
                       worker's TMPDIR may be another.
multiprocessing        the key by which processes trust one another is renewed here.
time zone              read from the environment again here.
hash seed              the same for all workers, as for the fork server: it is set once
                       for an interpreter.  Sets of strings have one order on all ranks;
                       with `--no-nursery` they have as many as there are ranks.
atexit                 what was registered on import is called in each worker, as in a
                       spawned one.  None of it removes anything that is shared.
descriptors            the fork server's are closed: its socket in `_fork`, the rest
                       when it leaves `serve`.  0, 1 and 2 are the worker's.
threads                none: the fork server has one thread (a test asserts it), so that
                       no lock is held, and pools (OpenMP, autograd, ipykernel) are made
                       in the worker.
profiler               off; torch's notes the process when it is first used.
what was read from     threads and debug level: `nbdist.worker.environment`.  Python's own
the environment        (PYTHONHASHSEED, PYTHONWARNINGS ...) are those of the time of
on import              `%load_ext`.  Where torch's are others since (TORCH_LOGS,
                       TORCH_COMPILE_DISABLE), workers are spawned: `has_imported_for`.
=====================  ==============================================================
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from multiprocessing import process

import torch

AUTHKEY_BYTES = 32


def renew_what_is_shared() -> None:
    """Be as different from the fork server's other children as if this one were spawned."""
    torch.default_generator.seed()
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()
    process.current_process().authkey = os.urandom(AUTHKEY_BYTES)
    tempfile.tempdir = None
    time.tzset()
