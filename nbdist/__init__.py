"""One notebook on many GPUs: persistent distributed worker kernels for Jupyter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbdist.world.result import CellResult
    from nbdist.world.world import World

__all__ = ["CellResult", "World", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the Python API when it is first used: `import nbdist` alone costs nothing."""
    if name == "World":
        from nbdist.world.world import World

        return World
    if name == "CellResult":
        from nbdist.world.result import CellResult

        return CellResult
    raise AttributeError(f"module 'nbdist' has no attribute {name!r}")


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Called by `%load_ext nbdist`."""
    from nbdist.notebook.extension import load

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Called by `%unload_ext nbdist`."""
    from nbdist.notebook.extension import unload

    unload(shell)
