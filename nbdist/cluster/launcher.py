"""Launchers start one agent on each machine and notice when it ends: by ssh, or `nbdist join`.

They run in the head, which finds them among the entry points `nbdist.launchers`. A launcher runs
`agent_command` on a machine with the ticket on stdin; the agent then connects to the head by
itself, and ends when its stdin is closed.
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
from nbdist.system.processes import MODULE, Child
from nbdist.system.processes import agent_command as agent_command  # launchers import it from here
from nbdist.topology import Host

ARRIVE_TIMEOUT = 60.0  # seconds for a started agent to connect: Python has to start first
KILL_TIMEOUT = 2.0  # seconds for a killed process to be gone


class LaunchError(Exception):
    """No agent can be started; the message says why, and the remedy."""


class AgentProcess(ABC):
    """A local process whose end is the end of agents on other machines, and the other way round.

    `command` has started the agent of `host`; `host` is "" if the process stands for several hosts.
    """

    host = ""
    command = ""

    @abstractmethod
    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the process has ended."""

    def exit_code(self) -> int | None:
        """Return the exit code; None while it runs."""
        return None

    def last_lines(self) -> list[str]:
        """Return the last lines that it has written."""
        return []

    def complaint(self) -> str:
        """Return in one line why it has ended; "" if its last lines say it."""
        return ""

    @abstractmethod
    def end(self, timeout: float) -> None:
        """Close its stdin, and kill it after `timeout` seconds; called in a thread."""

    @abstractmethod
    def close(self) -> None:
        """Close all descriptors; called after `end`."""


@dataclass(frozen=True, slots=True)
class Launched:
    """What a launcher has started: processes, and the number of agents that will come from them.

    `hosts` are the agents' names by node number, if they are known. The agents come within
    `arrive_timeout` seconds. `invitation` is a command to run on each machine if the user has to
    start them. `again` starts the agent of one node again, after it has ended or was lost; None if
    that is not possible.
    """

    processes: Sequence[AgentProcess]
    nodes: int
    hosts: Sequence[str] = ()
    invitation: str = ""
    arrive_timeout: float = ARRIVE_TIMEOUT
    again: Callable[[int], AgentProcess] | None = None
    news: Callable[[], str] = str
    """Returns what the agents wait for meanwhile, "" for nothing."""
    close: Callable[[], object] = str
    """Removes what is left at the end; called in a thread."""


class Launcher(Protocol):
    """Starts agents; a new one is made for each world."""

    def launch(self, wanted: WorldConfig, ticket: Ticket, folder: Path) -> Launched:
        """Start an agent on each machine, with logs in `folder`; LaunchError, or OSError."""


def find_launcher(name: str) -> Launcher:
    """Return a new launcher of that name; raises LaunchError if its module cannot be imported."""
    try:
        made = plugins.entry_points(plugins.LAUNCHERS)[name].load()
    except (ImportError, AttributeError) as error:
        raise LaunchError(f"`--launcher {name}` cannot be loaded: {error}") from error
    return cast("Launcher", made())


class AgentCommand(Child, AgentProcess):
    """Agents that end with the stdin of a local command, as `ssh`, `srun` or an interpreter."""

    def __init__(
        self,
        host: str,
        command: Sequence[str],
        ticket: Ticket,
        folder: Path,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Start the command and write the ticket to its stdin; OSError if it cannot start."""
        super().__init__(host, command, folder / f"{host.replace('/', '_')}.log", environ)
        assert self._process.stdin is not None
        # If it has ended at once, its exit code and last lines say why.
        with suppress(BrokenPipeError):
            self._process.stdin.write(ticket.to_line())
            self._process.stdin.flush()

    def end(self, timeout: float) -> None:
        self._end_stdin()
        if self._ends_in(timeout):
            return
        self._process.terminate()
        if not self._ends_in(KILL_TIMEOUT):
            self._process.kill()
            self._ends_in(KILL_TIMEOUT)


CONNECT_TIMEOUT = 5  # seconds for a host to answer
ALIVE_EVERY = 15
"""Seconds of silence after which ssh asks whether the host is there; after three times it ends.

A longer link timeout replaces it, so that a machine that is waited for keeps its ssh.
"""


class SshLauncher:
    """The launcher of `--launcher ssh`, and of `--hosts`."""

    def launch(self, wanted: WorldConfig, ticket: Ticket, folder: Path) -> Launched:
        """Start an agent on each host; here without ssh, as there may be no ssh server."""
        hosts = wanted.named_hosts

        def start(number: int) -> AgentCommand:
            host = hosts[number]
            if is_this_machine(host):
                command = [*wanted.wrapper, *agent_command(wanted.python, number)]
            else:
                command = ssh_command(host.destination, number, wanted)
            return AgentCommand(host.address, command, ticket, folder)

        names = [host.address for host in hosts]
        return Launched([start(n) for n in range(len(names))], len(names), names, again=start)


def is_this_machine(host: Host) -> bool:
    """Return True for a name or an address of this machine, without asking a name server.

    A host with a user is another machine: ssh logs in as that user.
    """
    name = socket.gethostname().lower()
    names = {"localhost", name, name.partition(".")[0]}
    return not host.user and host.address.lower() in names | own_addresses()


def ssh_command(host: str, number: int, wanted: WorldConfig) -> list[str]:
    """Return the command that starts an agent on a host by ssh."""
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(CONNECT_TIMEOUT),
        "ServerAliveInterval": str(max(ALIVE_EVERY, wanted.link_timeout or 0)),
    }
    remote = shlex.join([*wanted.wrapper, *agent_command(wanted.python, number)])
    return [
        *("ssh", "-T"),
        *(part for name, value in options.items() for part in ("-o", f"{name}={value}")),
        *("--", host, f"exec {remote}"),
    ]


WAIT_TIMEOUT = 3600.0  # seconds for all machines to come; Stop ends the wait


class JoinLauncher:
    """The launcher of `--launcher join`."""

    def launch(self, wanted: WorldConfig, ticket: Ticket, folder: Path) -> Launched:
        """Write the world's key for `nbdist join`; the head waits for `min_nodes` machines.

        The key is in the user's state folder while the world exists.
        """
        drop_dead_join_keys()
        key, invitation = write_join_key(ticket), f"nbdist join {place_of(ticket)}"
        return Launched((), wanted.min_nodes, (), invitation, WAIT_TIMEOUT, close=key.unlink)


_KNOWN = {
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
"""What ssh, a shell and Python print, and the reason that users read; the first match counts."""


def why_refused(host: str, lines: Sequence[str], command: str = "") -> str:
    """Return the first known reason in the last lines of `command`, with a remedy; else ""."""
    text = "\n".join(lines)
    for pattern, said in _KNOWN.items():
        if found := re.search(pattern, text, re.MULTILINE):
            # In the command, the words of `--wrap` are before the interpreter.
            *wrapper, _ = re.split(r"[\s'\"]+", command.partition(f" {' '.join(MODULE)} ")[0])
            is_wrapper = not {*wrapper}.isdisjoint(found.groups())
            named_by = "`--wrap` names it" if is_wrapper else "`--python` names the interpreter"
            known = {"host": host, "version": __version__, "named_by": named_by}
            return said.format(*found.groups(), **known).rstrip(". ")
    return ""
