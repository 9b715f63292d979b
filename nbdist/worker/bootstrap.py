"""Makes a fresh process, forked or spawned, the worker of one rank.

Called by `nbdist.worker.__main__` and, in the child of a fork, by `nbdist.agent.fork_server`.
Imports torch only when a spawned worker has its environment.

A forked worker gets what an interpreter that was spawned would have of its own.  What a fork
shares with its siblings, gone through with Python 3.11 and torch 2.13:

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
                       with `--no-fork` they have as many as there are ranks.
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
                       TORCH_COMPILE_DISABLE), workers are spawned: `can_fork_with`.
=====================  ==============================================================
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from multiprocessing import process

from nbdist.system.processes import safe_path
from nbdist.wire.spec import LAST_LINE_SAYS, Versions, WorkerStart, difference, versions_here
from nbdist.worker.process import BadEnvironment, set_limit

AUTHKEY_BYTES = 32


def set_environment(start: WorkerStart) -> None:
    """Give a fork the notebook's environment, and torchrun's variables.

    A worker that was spawned has them, and what a wrapper has made of them.
    """
    os.environ.clear()
    os.environ.update(start.world.environ)
    os.environ.update(start.environ)


def restore_path_variable(start: WorkerStart) -> None:
    """Give a worker that was spawned the PYTHONPATH which its own start was spared.

    Unless a wrapper has made another of it.
    """
    wanted = {**start.world.environ, **start.environ}
    if "PYTHONPATH" in wanted and os.environ.get("PYTHONPATH", "") == safe_path(
        wanted, start.world.cwd
    ):
        os.environ["PYTHONPATH"] = wanted["PYTHONPATH"]


def become_worker(start: WorkerStart, *, forked: bool) -> None:
    """Run the worker of this rank until its kernel ends."""
    set_limit()
    if forked:
        set_environment(start)
    else:
        restore_path_variable(start)
    os.chdir(start.world.cwd)
    end_unless_as(start.world.versions)
    # Imports wait until here, so that a spawned worker has its environment before torch.
    from nbdist.worker.main import run_worker
    from nbdist.worker.remedies import why_not_started

    try:
        if forked:
            renew_what_is_shared()
        run_worker(start)
    except BadEnvironment as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(1)
    except Exception as error:  # noqa: BLE001 (whatever it was, it is printed and the process ends)
        # Taking the interpreter apart could wait for ever for the kernel's open sockets.
        why = why_not_started(start.gpu or start.device, error)
        sys.stderr.write(f"{why}\n" if why else traceback.format_exc())
        sys.stderr.flush()
        os._exit(LAST_LINE_SAYS if why else 1)


def end_unless_as(versions: Versions) -> None:
    """End a process that the notebook could not send its functions to, and say why in a line."""
    if versions and (found := difference(versions_here(), versions)):
        has = f"{sys.executable} has {found.what} {found.there}, the notebook {found.here}"
        sys.stderr.write(f"{has}: {found.why}. `--python` names another one\n")
        sys.stderr.flush()
        os._exit(LAST_LINE_SAYS)


def renew_what_is_shared() -> None:
    """Be as different from the fork server's other children as if this one were spawned."""
    import torch

    torch.default_generator.seed()
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()
    process.current_process().authkey = os.urandom(AUTHKEY_BYTES)
    tempfile.tempdir = None
    time.tzset()
