"""The life of a worker: its kernel, its group, its cells, its end."""

from __future__ import annotations

import atexit
import os
import sys
import warnings

import torch.distributed as dist

from nbdist.wire.marks import mark
from nbdist.wire.messages import RankStart
from nbdist.wire.tasks import task_socket
from nbdist.worker.control import answer_control
from nbdist.worker.dumping import write_stacks_to
from nbdist.worker.environment import prepare_torch, ready_names
from nbdist.worker.group import Group
from nbdist.worker.kernel import make_app
from nbdist.worker.scaling import Scaling
from nbdist.worker.spawning import pickle_cell_classes_by_value
from nbdist.worker.streams import flush_c_streams, write_all
from nbdist.worker.tasks import Tasks


def run_worker(orders: RankStart) -> None:
    """Bind the kernel, join the group, say so, and run cells until told to end."""
    prepare_torch(orders)
    app = make_app(orders.connection_file, orders.rank, orders.token)
    app.kernel.namespace.start_with(ready_names(orders))
    quieten()
    write_stacks_to(orders.stack_file, app.control_thread)
    pickle_cell_classes_by_value()
    group = Group(orders) if orders.world.backend is not None else None
    app.kernel.group = group
    answer_control(app.kernel, group, Scaling(orders, app.kernel.namespace, group))
    tasks = Tasks(task_socket(orders), app.kernel, app.session)
    write_all(mark(orders.token, "up"))
    if group is not None:
        group.form()
    write_all(mark(orders.token, "ready"))
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
