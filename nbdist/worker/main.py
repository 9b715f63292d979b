"""The life of a worker: its kernel, its group, its cells, its end."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import warnings

import torch.distributed as dist

from nbdist.wire.spec import WorkerStart
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
from nbdist.worker.op import import_ops
from nbdist.worker.probe import write_stacks_to
from nbdist.worker.process import leave_world_in_children
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
    write_all(mark(start.token, "ready"))
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
