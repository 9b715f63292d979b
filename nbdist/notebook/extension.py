"""Loads nbdist into an IPython shell, and takes all of it out again."""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from nbdist.notebook.settings import NbDist
from nbdist.world.launcher import find_launcher
from nbdist.world.link import Link
from nbdist.world.requirements import check_libraries

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.core.magic import Magics

    from nbdist.notebook.desks import Desks

_loaded: WeakKeyDictionary[InteractiveShell, tuple[Desks, list[Magics]]] = WeakKeyDictionary()


def load(shell: InteractiveShell) -> None:
    """Register the magics and the settings, and have torch imported in the background.

    Raises WrongVersion, and does nothing then.
    """
    check_libraries()
    settings = NbDist(parent=shell)
    link = prestart() if settings.prestart else None
    # The rest of the extension is imported while the agent starts.
    from nbdist.notebook.desks import Desks
    from nbdist.notebook.magics import ALL_MAGICS

    desks = Desks(shell, settings)
    desks.default.take_over(link)
    magics: list[Magics] = [kind(shell, desks) for kind in ALL_MAGICS]
    shell.configurables.append(settings)  # type: ignore[arg-type]
    shell.register_magics(*magics)
    shell.events.register("post_run_cell", desks.notice_names)
    atexit.register(desks.close)
    _loaded[shell] = desks, magics


def prestart() -> Link:
    """Start an agent, which has its nursery import torch meanwhile."""
    link = Link(find_launcher("local"))
    link.open()
    return link


def unload(shell: InteractiveShell) -> None:
    """End the workers and leave the shell as it was."""
    desks, magics = _loaded.pop(shell)
    desks.close()
    atexit.unregister(desks.close)
    shell.events.unregister("post_run_cell", desks.notice_names)
    # Magics put themselves there.
    for configurable in (desks.settings, *magics):
        shell.configurables.remove(configurable)  # type: ignore[arg-type]
    for each in magics:
        for kind, names in each.magics.items():
            for name in names:
                shell.magics_manager.magics[kind].pop(name, None)
