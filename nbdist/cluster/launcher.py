"""What a launcher is: something that starts one agent on each machine, and knows when it ends.

Launchers run in the process of a world's head, and are found by their names among the entry
points `nbdist.launchers`.  To start an agent is to run `agent_command` there with the ticket
on stdin; the agent ends when that does, and comes to the head by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from nbdist import plugins
from nbdist.wire.child import Child
from nbdist.wire.interpreter import agent_command as agent_command  # launchers find all here
from nbdist.wire.ticket import Ticket
from nbdist.wire.wanted import Wanted

ARRIVE_TIMEOUT = 60.0
"""Seconds for an agent that was started to come: Python starts there, perhaps over a network."""

KILL_TIMEOUT = 2.0
"""Seconds for a process that was killed to be gone."""


class LaunchError(Exception):
    """No agent can be started; the message says why, and what to do."""


class AgentProcess(Protocol):
    """The local end of agents elsewhere: a process whose life is tied to theirs."""

    host: str
    command: str

    def fileno(self) -> int:
        """Return a descriptor that turns readable when it has ended."""

    def exit_code(self) -> int | None:
        """Return how it ended; None while it runs."""

    def last_lines(self) -> list[str]:
        """Return the end of what it has written."""

    def complaint(self) -> str:
        """Say in one line why it has ended, "" where its last lines say it."""

    def end(self, timeout: float) -> None:
        """Have it end: its stdin at once, by force after `timeout` seconds.

        Called in a thread.
        """

    def close(self) -> None:
        """Let go of all descriptors, after `end`."""


@dataclass(frozen=True, slots=True)
class Launched:
    """What a launcher has started: processes, and how many agents will come of them.

    `hosts` are their names as the user knows them, by the node's number, where that is known.
    They come within `arrive_timeout` seconds; `invitation` is a command for each machine, where
    somebody else is to start them.  `again` starts that of one node once more, which has ended
    or was lost; None where that cannot be.
    """

    processes: Sequence[AgentProcess]
    nodes: int
    hosts: Sequence[str] = ()
    invitation: str = ""
    arrive_timeout: float = ARRIVE_TIMEOUT
    again: Callable[[int], AgentProcess] | None = None
    news: Callable[[], str] = str
    """Says what they wait for meanwhile, "" for nothing."""


class Launcher(Protocol):
    """Starts agents; made anew for each world."""

    def launch(self, wanted: Wanted, ticket: Ticket, folder: Path) -> Launched:
        """Start one agent on each machine; raises LaunchError, or OSError, where none can be.

        `folder` is for files of its own, such as the logs of what it runs: it lasts as long as
        the world.  Called once, in the head.
        """


def find_launcher(name: str) -> Launcher:
    """Make the launcher of that name, which the notebook has found among the entry points.

    Raises LaunchError where its module cannot be had.
    """
    try:
        made = plugins.entry_points(plugins.LAUNCHERS)[name].load()
    except (ImportError, AttributeError) as error:
        raise LaunchError(f"`--launcher {name}` cannot be loaded: {error}") from error
    return cast("Launcher", made())


class AgentCommand(Child):
    """An agent, or several, by a command that runs here: `ssh`, `srun`, an interpreter.

    It gets the ticket on its stdin, which stays open as long as the agents are to run.
    """

    def __init__(
        self,
        host: str,
        command: Sequence[str],
        ticket: Ticket,
        folder: Path,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Raises OSError where it cannot be started."""
        super().__init__(host, command, folder / f"{host.replace('/', '_')}.log", environ)
        assert self._process.stdin is not None
        # Where it has ended at once, its exit code and last lines say why.
        with suppress(BrokenPipeError):
            self._process.stdin.write(ticket.to_line())
            self._process.stdin.flush()

    def complaint(self) -> str:
        """Say nothing: what has run here is not known."""
        return ""

    def end(self, timeout: float) -> None:
        """Have it end: its stdin at once, by force after `timeout` seconds."""
        self._end_stdin()
        if self._ends_in(timeout):
            return
        self._process.terminate()
        if not self._ends_in(KILL_TIMEOUT):
            self._process.kill()
            self._ends_in(KILL_TIMEOUT)
