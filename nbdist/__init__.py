"""One notebook on many GPUs: persistent distributed worker kernels for Jupyter.

In a notebook, after `%load_ext nbdist`:

    %%distributed -n 4          run the cell on four workers, which share a process group
    %dist_gather loss           copy a variable from all ranks, as a list
    %dist_status                show what each rank does
    %dist_output                show the last cell's output again
    %dist_run train.py          run a script on all workers
    %dist_restart               restart all workers, even if they hang
    %dist_help                  list the magics; %dist_help gather shows the help of one

In Python:

    with nbdist.World(n=4) as world:
        trained = world.run(train, model).rank(0)
    nbdist.current_world().gather("loss")  # the notebook's own workers
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from collections.abc import Iterator

    from IPython.core.interactiveshell import InteractiveShell

    from nbdist.errors import NbdistError, UsageError, WorkerDied, WorkerError
    from nbdist.notebook.jobs import Job
    from nbdist.notebook.pool_world import current_world
    from nbdist.worker.tracking import track, watch
    from nbdist.world.result import CellResult
    from nbdist.world.world import World, attach, distributed, run

__all__ = [
    "CellResult",
    "Job",
    "NbdistError",
    "UsageError",
    "WorkerDied",
    "WorkerError",
    "World",
    "__version__",
    "attach",
    "current_world",
    "distributed",
    "run",
    "track",
    "watch",
]

_MODULES = {
    "CellResult": "nbdist.world.result",
    "Job": "nbdist.notebook.jobs",
    "World": "nbdist.world.world",
    "attach": "nbdist.world.world",
    "current_world": "nbdist.notebook.pool_world",
    "distributed": "nbdist.world.world",
    "run": "nbdist.world.world",
    "track": "nbdist.worker.tracking",
    "watch": "nbdist.worker.tracking",
}


@contextmanager
def _own_imports() -> Iterator[None]:
    """Within this context, look for modules in the working directory after all other folders.

    If that directory came first, a user's file `psutil.py` would run in place of the package.
    """
    before, here = list(sys.path), os.path.realpath("/proc/self/cwd")
    last = [each for each in before if not os.path.isabs(each) or os.path.realpath(each) == here]
    sys.path[:] = [*(each for each in before if each not in last), *last]
    try:
        yield
    finally:
        sys.path[:] = [*before, *(each for each in sys.path if each not in before)]


def __getattr__(name: str) -> Any:
    """Return a public object by name; import the object's module if it is not imported yet."""
    if name in __all__:
        with _own_imports():
            return getattr(import_module(_MODULES.get(name, "nbdist.errors")), name)
    raise AttributeError(f"module 'nbdist' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names of `__all__`, without names that this file only imports for itself."""
    return [*__all__]


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics; `%load_ext nbdist` calls this function."""
    with _own_imports():
        from nbdist.notebook.extension import load

        load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Remove the magics and end or detach the workers; `%unload_ext nbdist` calls this function."""
    from nbdist.notebook.extension import unload

    unload(shell)
