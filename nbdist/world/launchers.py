"""What can put agents on machines, by name: this machine's own one, and what the head loads.

Launchers of other machines are entry points of the group `nbdist.launchers`; the house's own
live in `nbdist.launch`, others come with packages of their own.  All run in the head's process.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from nbdist.config import LAUNCHERS, LOCAL
from nbdist.errors import UsageError

AGENT, HEAD = "nbdist.agent", "nbdist.head"
"""What is started on this machine: its agent, or the head of agents on several."""


def launcher_names() -> list[str]:
    """List what `--launcher` can be."""
    return sorted({LOCAL, *(point.name for point in entry_points(group=LAUNCHERS))})


def module_of(launcher: str) -> str:
    """Say what to start here for a launcher; UsageError, with those there are, for none."""
    names = launcher_names()
    if launcher not in names:
        raise UsageError(f"`--launcher {launcher}`: available: {', '.join(names)}.")
    return AGENT if launcher == LOCAL else HEAD
