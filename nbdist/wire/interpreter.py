"""How nbdist starts interpreters of its own: agent, fork server, spawned workers.

None of them looks into the notebook's folder for what it imports: `random.py` there is a
file of the user's, and not Python's module.  It imports next to nothing, because the agent
has this before it starts the fork server.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

MODULE = ("-P", "-m")
"""Options before a module to run; with `-P` the working directory is not on `sys.path`."""

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))


def agent_command(python: str, number: int = -1) -> list[str]:
    """Return the command that runs an agent; `number` is the node's, where one is known."""
    node = [] if number < 0 else ["--node", str(number)]
    return [python or sys.executable, *MODULE, "nbdist.agent", "--ticket", *node]


def safe_path(environ: Mapping[str, str], folder: str) -> str:
    """Take from PYTHONPATH what leads to this working directory: it, "", and relative entries.

    An entry that nbdist itself was imported from stays.
    """
    entries = environ.get("PYTHONPATH", "").split(os.pathsep)
    unsafe = {os.path.realpath(folder)} - {_ROOT}
    return os.pathsep.join(
        each for each in entries if os.path.isabs(each) and os.path.realpath(each) not in unsafe
    )


def safe_environ(environ: Mapping[str, str], folder: str) -> dict[str, str]:
    """Make the environment of an interpreter that will have this working directory."""
    rest = {name: value for name, value in environ.items() if name != "PYTHONPATH"}
    path = safe_path(environ, folder)
    return {**rest, "PYTHONPATH": path} if path else rest
