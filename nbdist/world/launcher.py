"""What puts an agent on a machine, as the world sees it.

Launchers are named by the entry-point group `nbdist.launchers`; the house's own live in
`nbdist.launch`, others come with packages of their own.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol, cast

from nbdist.errors import UsageError

GROUP = "nbdist.launchers"


class AgentProcess(Protocol):
    """The local end of an agent: a process whose life is tied to the agent's."""

    pid: int
    host: str
    command: str

    def fileno(self) -> int:
        """A descriptor that turns readable when the agent has ended."""

    def exit_code(self) -> int | None:
        """None while it runs."""

    def last_lines(self) -> list[str]:
        """The end of what it wrote to its log."""

    def end(self, timeout: float) -> None:
        """Have it end, by force after `timeout` seconds; `fileno` stays valid."""

    def close(self) -> None:
        """Let go of all descriptors, after `end`."""


class Launcher(Protocol):
    """Starts agents that connect to `runtime / "notebook.sock"`."""

    def launch(self, runtime: Path, *, nursery: bool) -> list[AgentProcess]:
        """One process per machine.  Called by `nbdist.world.link.Link`."""


def find_launcher(name: str) -> Launcher:
    """The launcher of that name; UsageError with the names there are when there is none."""
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        raise UsageError(f"`--launcher {name}`: there are only {', '.join(sorted(found))}.")
    return cast("Launcher", found[name].load()())
