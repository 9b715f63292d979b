"""One notebook on many GPUs: persistent distributed worker kernels for Jupyter."""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Called by `%load_ext nbdist`."""
    from nbdist.notebook.extension import load

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Called by `%unload_ext nbdist`."""
    from nbdist.notebook.extension import unload

    unload(shell)
