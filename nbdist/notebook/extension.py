"""Loads nbdist into an IPython shell, and takes all of it out again."""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from nbdist.notebook.magics import DistributedMagics
from nbdist.notebook.settings import NbDist

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_loaded: WeakKeyDictionary[InteractiveShell, DistributedMagics] = WeakKeyDictionary()


def load(shell: InteractiveShell) -> None:
    """Register the magics and the settings, and have torch imported in the background."""
    settings = NbDist(parent=shell)
    magics = DistributedMagics(shell, settings)
    shell.configurables.append(settings)  # type: ignore[arg-type]
    shell.register_magics(magics)
    shell.events.register("post_run_cell", magics.notice_names)
    atexit.register(magics.desk.close)
    _loaded[shell] = magics
    if settings.prestart:
        magics.desk.prestart()


def unload(shell: InteractiveShell) -> None:
    """End the workers and leave the shell as it was."""
    magics = _loaded.pop(shell)
    magics.desk.close()
    atexit.unregister(magics.desk.close)
    shell.events.unregister("post_run_cell", magics.notice_names)
    # Magics put themselves there.
    for configurable in (magics.desk.settings, magics):
        shell.configurables.remove(configurable)  # type: ignore[arg-type]
    for kind, names in magics.magics.items():
        for name in names:
            shell.magics_manager.magics[kind].pop(name, None)
