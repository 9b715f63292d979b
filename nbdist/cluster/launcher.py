"""Launchers, which start an agent on each machine: their interface, and the launchers ssh and join.

Launchers run in the head, which finds them among the entry points `nbdist.launchers`. Most
launchers run `agent_command` on each machine, and write the ticket to the command's stdin; for the
launcher join, the user starts the agents. An agent then connects to the head by itself, and exits
when its stdin is closed.
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
from nbdist.system.processes import agent_command as agent_command  # launchers import it here
from nbdist.topology import Host

AGENTS_ARRIVE_TIMEOUT = 60.0  # seconds for Python to start on a machine, and its agent to connect
LAUNCHER_KILL_TIMEOUT = 2.0  # seconds for a launcher's process to exit, for example after a signal


class LaunchError(Exception):
    """Raised if agents cannot be started; the message says why."""


class LauncherProcess(ABC):
    """A process that runs one or more agents, such as `ssh` or `srun` on the head's machine.

    The process exits when its agents have exited, and the agents exit when the process does.
    `command` is the command of the process. `host` is the host of its agent, or "" if it has agents
    on several hosts.
    """

    host = ""
    command = ""

    @abstractmethod
    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the process has ended."""

    def exit_code(self) -> int | None:
        """Return the exit code of the process; None while the process runs.

        The default is None, which also means that the exit code is not known.
        """
        return None

    def last_lines(self) -> list[str]:
        """Return the last lines that the process has written.  The default is no lines."""
        return []

    def complaint(self) -> str:
        """Return a line that tells the user why the process has ended.

        The default is "", which means that the reason is not known.
        """
        return ""

    @abstractmethod
    def end(self, timeout: float) -> None:
        """End the process and its agents; called in a thread.

        Close the stdin of the process, so that its agents exit. If the process does not exit within
        `timeout` seconds, end it.
        """

    @abstractmethod
    def close(self) -> None:
        """Close all descriptors of this object; called after the process has ended."""


@dataclass(frozen=True, slots=True)
class Launched:
    """The result of `Launcher.launch`: the started processes, and how many agents will connect.

    `nodes` is the number of agents, which must connect within `arrive_timeout` seconds. `hosts` has
    the names of the nodes in the order of their numbers, if the launcher knows them. `invitation`
    is a command that the user must run on each machine, or "" if the launcher itself starts the
    agents. `again` gets the number of a node and starts the node's agent again, after the agent has
    exited or was lost; it is None if the launcher cannot do so.
    """

    processes: Sequence[LauncherProcess]
    nodes: int
    hosts: Sequence[str] = ()
    invitation: str = ""
    arrive_timeout: float = AGENTS_ARRIVE_TIMEOUT
    again: Callable[[int], LauncherProcess] | None = None
    news: Callable[[], str] = str
    """Returns a line that says why agents have not started yet, for example a queue, or ""."""
    close: Callable[[], object] = str
    """Called in a thread after all processes have ended, to remove files of the launcher."""


class Launcher(Protocol):
    """Starts the agents of a world; a launcher object is used for only one call of `launch`."""

    def launch(self, config: WorldConfig, ticket: Ticket, folder: Path) -> Launched:
        """Start an agent on each machine that the world needs, and give each agent the ticket.

        `config` has the options that say which machines these are. The launcher can write log files
        to `folder`. Raises LaunchError or OSError if an agent cannot be started.
        """


def find_launcher(name: str) -> Launcher:
    """Return a new launcher of this name; raises LaunchError if its class cannot be imported."""
    try:
        launcher = plugins.entry_points(plugins.LAUNCHERS_GROUP)[name].load()
    except (ImportError, AttributeError) as error:
        raise LaunchError(f"`--launcher {name}` cannot be loaded: {error}") from error
    return cast("Launcher", launcher())


class AgentCommand(Child, LauncherProcess):
    """A process that runs agents until its stdin is closed.

    Its command is for example `ssh` or `srun`, or Python itself for an agent on this machine.
    """

    def __init__(
        self,
        host: str,
        command: Sequence[str],
        ticket: Ticket,
        folder: Path,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Start the command, and write the ticket to its stdin; raise OSError if that fails."""
        super().__init__(host, command, folder / f"{host.replace('/', '_')}.log", environ)
        assert self._process.stdin is not None
        # A command that has exited at once is no error here: its exit code and last lines say why.
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


SSH_CONNECT_TIMEOUT = 5  # seconds for a host to answer ssh
ALIVE_EVERY = 15
"""Seconds of silence after which ssh sends the host a request; ssh exits if three get no answer.

If the option `--link-timeout` is longer, ssh waits for that time instead, so that ssh does not exit
before the head counts the host as lost.
"""


class SshLauncher:
    """Starts agents by ssh, for `--launcher ssh` and `--hosts`."""

    def launch(self, config: WorldConfig, ticket: Ticket, folder: Path) -> Launched:
        """Start an agent on each host by ssh.

        On this machine, which may have no ssh server, start the agent directly.
        """
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
    """Return True if a host's name or address is this machine's, without asking a name server.

    A host that is given with a user counts as another machine, because ssh logs in as this user.
    """
    name = socket.gethostname().lower()
    names = {"localhost", name, name.partition(".")[0]}
    return not host.user and host.address.lower() in names | own_addresses()


def ssh_command(host: str, number: int, config: WorldConfig) -> list[str]:
    """Return the command that starts the agent with this number on a host by ssh."""
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
    """Starts no agents itself, for `--launcher join`: the user runs `nbdist join` on machines."""

    def launch(self, config: WorldConfig, ticket: Ticket, folder: Path) -> Launched:
        """Write the ticket to a file in the user's state folder, in which `nbdist join` finds it.

        The file is removed when the head shuts down the agents. The head waits until at least
        `config.min_nodes` machines have joined.
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
"""Why no agent has started, in words for the user; the keys are patterns of error messages.

The error messages are those of ssh, a shell, Python or nbdist.
"""


def why_refused(host: str, lines: Sequence[str], command: str = "") -> str:
    """Return why no agent was started on a host, or "" if the reason is not known.

    `command` is the command that should have started the agent, and `lines` are the last lines that
    it has written. The first pattern of `_FAILURE_REASONS` that matches them gives the reason.
    """
    text = "\n".join(lines)
    for pattern, reason in _FAILURE_REASONS.items():
        if match := re.search(pattern, text, re.MULTILINE):
            # Find out which option names the missing program: `--wrap`, whose words come before the
            # interpreter in the command, or `--python`, which names the interpreter.
            *wrapper, _ = re.split(
                r"[\s'\"]+", command.partition(f" {' '.join(MODULE_OPTIONS)} ")[0]
            )
            is_wrapper = not {*wrapper}.isdisjoint(match.groups())
            named_by = "`--wrap` names it" if is_wrapper else "`--python` names the interpreter"
            fields = {"host": host, "version": __version__, "named_by": named_by}
            return reason.format(*match.groups(), **fields).rstrip(". ")
    return ""
