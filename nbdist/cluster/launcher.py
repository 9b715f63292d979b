"""Launchers, which start an agent on each machine; here the launchers `ssh` and `join`.

Launchers run in the head, which finds them among the entry points `nbdist.launchers`.  A launcher
has `agent_command` run on each machine with the ticket on stdin; the agent then connects to the
head by itself, and exits when its stdin is closed.
"""

from __future__ import annotations

import re
import shlex
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from nbdist import __version__, plugins
from nbdist.cluster.ticket import (
    Ticket,
    drop_dead_join_keys,
    own_addresses,
    place_of,
    write_join_key,
)
from nbdist.config import WorldConfig
from nbdist.system.processes import MODULE_OPTIONS, Child
from nbdist.system.processes import agent_command as agent_command  # used by launchers of plugins
from nbdist.topology import Host

AGENTS_ARRIVE_TIMEOUT = 60.0  # seconds for a started agent to connect: Python has to start first
LAUNCHER_KILL_TIMEOUT = 2.0  # seconds for a process to exit after a signal


class LaunchError(Exception):
    """No agent can be started; the message says why."""


class LauncherProcess(ABC):
    """A local process, such as `ssh`, that ends with its agents, and whose end ends its agents.

    `command` has started the agent of `host`; `host` is "" if the process stands for several hosts.
    """

    host = ""
    command = ""

    @abstractmethod
    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the process has ended."""

    def exit_code(self) -> int | None:
        """Return the exit code; None while the process runs, and by default."""
        return None

    def last_lines(self) -> list[str]:
        """Return the last lines that the process has written; by default none."""
        return []

    def complaint(self) -> str:
        """Return a line for the user on why the process has ended, or ""; by default ""."""
        return ""

    @abstractmethod
    def end(self, timeout: float) -> None:
        """Close stdin, and end a process that runs `timeout` seconds longer; called in a thread."""

    @abstractmethod
    def close(self) -> None:
        """Close all descriptors, after the process has ended."""


@dataclass(frozen=True, slots=True)
class Launched:
    """The processes that a launcher has started, and the number of agents to wait for.

    `hosts` are the agents' names by node number, if they are known. The agents must connect within
    `arrive_timeout` seconds. `invitation` is a command that the user has to run on each machine,
    "" if the launcher starts the agents. `again` restarts the agent of a node, after the agent has
    ended or was lost; None if that is not possible.
    """

    processes: Sequence[LauncherProcess]
    nodes: int
    hosts: Sequence[str] = ()
    invitation: str = ""
    arrive_timeout: float = AGENTS_ARRIVE_TIMEOUT
    again: Callable[[int], LauncherProcess] | None = None
    news: Callable[[], str] = str
    """Returns a line on why missing agents have to wait, as in a queue; "" if nothing is known."""
    close: Callable[[], object] = str
    """Removes leftovers after all processes have ended; called in a thread."""


class Launcher(Protocol):
    """Starts the agents of a world; each `NodePool` makes a new launcher."""

    def launch(self, config: WorldConfig, ticket: Ticket, folder: Path) -> Launched:
        """Start an agent on each machine, with logs in `folder`; raises LaunchError or OSError."""


def find_launcher(name: str) -> Launcher:
    """Return a new launcher of that name; raises LaunchError if its class cannot be imported."""
    try:
        launcher = plugins.entry_points(plugins.LAUNCHERS_GROUP)[name].load()
    except (ImportError, AttributeError) as error:
        raise LaunchError(f"`--launcher {name}` cannot be loaded: {error}") from error
    return cast("Launcher", launcher())


class AgentCommand(Child, LauncherProcess):
    """A local command whose agents exit when its stdin closes: `ssh`, `srun`, an interpreter."""

    def __init__(
        self,
        host: str,
        command: Sequence[str],
        ticket: Ticket,
        folder: Path,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Start the command, and write the ticket to its stdin; OSError if it cannot start."""
        super().__init__(host, command, folder / f"{host.replace('/', '_')}.log", environ)
        assert self._process.stdin is not None
        # If the command has ended at once, its exit code and last lines say why.
        with suppress(BrokenPipeError):
            self._process.stdin.write(ticket.to_line())
            self._process.stdin.flush()

    def end(self, timeout: float) -> None:
        self._close_stdin()
        if self._exits_within(timeout):
            return
        self._process.terminate()
        if not self._exits_within(LAUNCHER_KILL_TIMEOUT):
            self._process.kill()
            self._exits_within(LAUNCHER_KILL_TIMEOUT)


SSH_CONNECT_TIMEOUT = 5  # seconds for a host to answer
ALIVE_EVERY = 15
"""Seconds of silence after which ssh asks the host for an answer; ssh ends after three in vain.

A longer `link_timeout` is used instead: ssh must not end before the head counts a host as lost.
"""


class SshLauncher:
    """The launcher of `--launcher ssh`, and of `--hosts`."""

    def launch(self, config: WorldConfig, ticket: Ticket, folder: Path) -> Launched:
        """Start an agent on each host by ssh; on this machine, which may lack sshd, directly."""
        hosts = config.named_hosts

        def start(number: int) -> AgentCommand:
            host = hosts[number]
            if is_this_machine(host):
                command = [*config.wrapper, *agent_command(config.python, number)]
            else:
                command = ssh_command(host.destination, number, config)
            return AgentCommand(host.address, command, ticket, folder)

        names = [host.address for host in hosts]
        return Launched([start(n) for n in range(len(names))], len(names), names, again=start)


def is_this_machine(host: Host) -> bool:
    """Return True if a host's name or address is this machine's; no name server is asked.

    A host with a user counts as another machine: ssh logs in as that user.
    """
    name = socket.gethostname().lower()
    names = {"localhost", name, name.partition(".")[0]}
    return not host.user and host.address.lower() in names | own_addresses()


def ssh_command(host: str, number: int, config: WorldConfig) -> list[str]:
    """Return the command that starts an agent on a host by ssh."""
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(SSH_CONNECT_TIMEOUT),
        "ServerAliveInterval": str(max(ALIVE_EVERY, config.link_timeout or 0)),
    }
    remote = shlex.join([*config.wrapper, *agent_command(config.python, number)])
    return [
        *("ssh", "-T"),
        *(part for name, value in options.items() for part in ("-o", f"{name}={value}")),
        *("--", host, f"exec {remote}"),
    ]


WAIT_TIMEOUT = 3600.0  # seconds for all machines to join; Stop ends the wait


class JoinLauncher:
    """The launcher of `--launcher join`."""

    def launch(self, config: WorldConfig, ticket: Ticket, folder: Path) -> Launched:
        """Write the ticket to a file for `nbdist join`; the head waits for `min_nodes` machines.

        The file is in the user's state folder, and is removed when the world ends.
        """
        drop_dead_join_keys()
        key, invitation = write_join_key(ticket), f"nbdist join {place_of(ticket)}"
        return Launched((), config.min_nodes, (), invitation, WAIT_TIMEOUT, close=key.unlink)


_FAILURE_REASONS = {
    r"Could not resolve hostname (\S+?):": "the name {0} cannot be resolved: an address, or a"
    " `HostName` in ~/.ssh/config",
    r"REMOTE HOST IDENTIFICATION HAS CHANGED": "its host key is not the one that ssh knows:"
    " `ssh {host}` in a terminal says which",
    r"Host key verification failed": "ssh does not know its host key yet: `ssh {host}` once, in a"
    " terminal",
    r"Permission denied \((.*?)\)": "it refused the login ({0}): `ssh {host} true` has to work"
    " without a password",
    r"ssh: connect to host (\S+) port (\d+): (.*)": "ssh cannot reach {0}:{1}: {2}",
    r"No module named '?nbdist": "the interpreter there has no nbdist: `pip install"
    " nbdist=={version}` there, or `--python` names another one",
    r"No module named '?(torch|zmq|psutil|ipykernel)\b": "the interpreter there has no {0}:"
    " `--python` names one that has it",
    r"(?:exec: |env: |sh: .*?: )*['\u2018]?(/?[^\s:'\u2018\u2019]+)['\u2019]?: "
    r"(?:not found|No such file or directory|command not found)": "there is no {0} there:"
    " {named_by}, by its path on all machines",
    r"(?:exec: )?(\S+): Permission denied": "{0} cannot be executed there: {named_by}",
    r"^nbdist: (.*)": "{0}",
}
"""By pattern of a line of ssh, a shell, Python or nbdist: the reason that users read."""


def why_refused(host: str, lines: Sequence[str], command: str = "") -> str:
    """Return the reason by the first of `_FAILURE_REASONS` that fits the lines; "" if none fits."""
    text = "\n".join(lines)
    for pattern, reason in _FAILURE_REASONS.items():
        if match := re.search(pattern, text, re.MULTILINE):
            # In the command, the words of `--wrap` are before the interpreter.
            *wrapper, _ = re.split(
                r"[\s'\"]+", command.partition(f" {' '.join(MODULE_OPTIONS)} ")[0]
            )
            is_wrapper = not {*wrapper}.isdisjoint(match.groups())
            named_by = "`--wrap` names it" if is_wrapper else "`--python` names the interpreter"
            fields = {"host": host, "version": __version__, "named_by": named_by}
            return reason.format(*match.groups(), **fields).rstrip(". ")
    return ""
