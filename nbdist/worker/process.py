"""Turns a fresh process, forked or spawned, into the worker of one rank.

Called by `nbdist.worker.__main__` and, in the child of a fork, by `nbdist.node.nursery`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback

from nbdist.wire.messages import RankStart

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    Python polls for a lost parent need the GIL; this does not.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before we asked
        os._exit(1)


def set_environment(orders: RankStart) -> None:
    """Give a fork the notebook's environment, and torchrun's variables.

    A worker that was spawned has them, and what a wrapper has made of them.
    """
    os.environ.clear()
    os.environ.update(orders.world.environ)
    os.environ.update(orders.environ)


def set_place(orders: RankStart) -> None:
    """Give the process the notebook's path and folder."""
    first = orders.world.sys_path
    own = [entry for entry in sys.path if entry not in first] if orders.world.own_path else ()
    sys.path[:] = [*first, *own]
    os.chdir(orders.world.cwd)


def become_worker(orders: RankStart, parent_pid: int, *, forked: bool) -> None:
    """Run the worker of this rank until its kernel ends."""
    die_with_parent(parent_pid)
    if forked:
        set_environment(orders)
    set_place(orders)
    # Imports wait until here, so that a spawned worker has its environment before torch.
    from nbdist.worker.forked import renew_what_is_shared
    from nbdist.worker.run import run_worker

    try:
        if forked:
            renew_what_is_shared()
        run_worker(orders)
    except Exception:  # noqa: BLE001 (whatever it was: told, and the end of the process)
        # Taking the interpreter apart could wait for ever for the kernel's open sockets.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
