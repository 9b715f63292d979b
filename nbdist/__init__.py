"""One notebook on many GPUs: persistent distributed worker kernels for Jupyter."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbdist.errors import NbdistError, UsageError, WorkerDied, WorkerError
    from nbdist.world.result import CellResult
    from nbdist.world.stages import distributed, run
    from nbdist.world.world import World

__all__ = [
    "CellResult",
    "NbdistError",
    "UsageError",
    "WorkerDied",
    "WorkerError",
    "World",
    "__version__",
    "distributed",
    "run",
]

_MODULES = {
    "CellResult": "nbdist.world.result",
    "World": "nbdist.world.world",
    "distributed": "nbdist.world.stages",
    "run": "nbdist.world.stages",
}


def __getattr__(name: str) -> Any:
    """Import the Python API when it is first used: `import nbdist` alone costs nothing."""
    if name in __all__:
        return getattr(import_module(_MODULES.get(name, "nbdist.errors")), name)
    raise AttributeError(f"module 'nbdist' has no attribute {name!r}")


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Called by `%load_ext nbdist`."""
    from nbdist.notebook.extension import load

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Called by `%unload_ext nbdist`."""
    from nbdist.notebook.extension import unload

    unload(shell)
