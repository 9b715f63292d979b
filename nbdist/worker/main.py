"""The life of a worker: its kernel, its group, its cells, its end."""

from __future__ import annotations

import asyncio
import atexit
import os
import socket
import sys
import tempfile
import time
import traceback
import warnings
from multiprocessing import process

import torch.distributed as dist

from nbdist.system.processes import safe_path
from nbdist.wire.spec import LAST_LINE_SAYS, Versions, WorkerStart, difference, versions_here
from nbdist.wire.work import mark
from nbdist.worker.control import ControlThread
from nbdist.worker.environment import (
    Scaling,
    pickle_cell_definitions_by_value,
    prepare_torch,
    ready_names,
)
from nbdist.worker.group.group import Group
from nbdist.worker.kernel import make_app
from nbdist.worker.memory import reserve_addresses
from nbdist.worker.namespace import import_ops
from nbdist.worker.probe import write_stacks_to
from nbdist.worker.process import BadEnvironment, leave_world_in_children, set_limit
from nbdist.worker.publishing import LargeOutputs
from nbdist.worker.streams import flush_c_streams, write_all
from nbdist.worker.surroundings import Around
from nbdist.worker.tasks import Tasks


def run_worker(start: WorkerStart) -> None:
    """Bind the kernel, join the group, say so, and run cells until the worker is to end."""
    own_path = list(sys.path)
    prepare_torch(start)
    import_ops()
    app = make_app(start.connection_file, start.rank, start.token)
    app.session.large = LargeOutputs(
        start.log_folder, "" if start.world.node is None else socket.gethostname()
    )
    app.kernel.namespace.start_with(ready_names(start))
    quieten()
    reserve_addresses()
    write_stacks_to(start.stack_file)
    pickle_cell_definitions_by_value()
    app.kernel.own_modules.is_kept_in_step = start.world.sync_code
    group = Group(start) if start.world.backend is not None else None
    app.kernel.group = group
    leave_world_in_children(group.leave if group is not None else None)
    scaling = Scaling(start, app.kernel.namespace, group, app.session.large)
    ControlThread(app.kernel, group, scaling)
    tasks = Tasks(start.task_socket, app.kernel, app.session)
    app.kernel.ask, app.session.catch_up = tasks.ask, tasks.catch_up
    write_all(mark(start.token, "up"))
    if group is not None:
        group.form()
    app.kernel.around = Around(start, own_path)
    # Once the kernel reads from its sockets: the agent then writes to them, and until then they are
    # this thread's, which zmq does not let two threads use at once.
    asyncio.get_event_loop().call_soon(write_all, mark(start.token, "ready"))
    app.start()
    tasks.close()
    if group is not None:
        group.end()
    elif dist.is_initialized():
        dist.destroy_process_group()
    # What exit handlers do is wanted; taking the interpreter apart would take 0.15 s more.
    atexit._run_exitfuncs()
    flush_c_streams()
    os._exit(0)


def quieten() -> None:
    """Drop what IPython does and says for people who sit at a terminal."""
    # Lightning refuses to run several processes where it finds a prompt.
    for prompt in ("ps1", "ps2"):
        if hasattr(sys, prompt):
            delattr(sys, prompt)
    # Leaving by exit() is not how a worker ends.
    warnings.filterwarnings("ignore", message="To exit: use")


# --- makes a fresh process, forked or spawned, the worker of one rank -------------------------


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
