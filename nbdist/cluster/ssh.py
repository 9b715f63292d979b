"""`--hosts a,b:4`: one agent on each of these hosts, over the user's own OpenSSH.

Its configuration, keys, agents, jump hosts and ControlMaster are all used; nothing is asked, as
there is nobody to answer.  Where a host is to be reached in a special way, `~/.ssh/config` says
so once for everything.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from nbdist.cluster.launcher import AgentCommand, Launched, agent_command
from nbdist.wire.ticket import Ticket
from nbdist.wire.wanted import Wanted

CONNECT_TIMEOUT = 5
"""Seconds for a host to answer."""

ALIVE_EVERY = 15
"""Seconds of silence after which ssh asks whether the host is there; three times, then it ends.

As many as the link timeout where that is longer: a machine that is waited for keeps its ssh.
"""


class SshLauncher:
    """`--launcher ssh`."""

    def launch(self, wanted: Wanted, ticket: Ticket, folder: Path) -> Launched:
        """Start an agent on each host."""

        def start(number: int) -> AgentCommand:
            host = wanted.hosts[number]
            command = ssh_command(host.destination, number, wanted)
            return AgentCommand(host.address, command, ticket, folder)

        names = [host.address for host in wanted.hosts]
        return Launched([start(n) for n in range(len(names))], len(names), names, again=start)


def ssh_command(host: str, number: int, wanted: Wanted) -> list[str]:
    """Return the command that starts an agent there."""
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(CONNECT_TIMEOUT),
        "ServerAliveInterval": str(max(ALIVE_EVERY, round(wanted.link_timeout))),
    }
    remote = shlex.join([*wanted.wrap, *agent_command(wanted.python, number)])
    return [
        *("ssh", "-T"),
        *(part for name, value in options.items() for part in ("-o", f"{name}={value}")),
        *("--", host, f"exec {remote}"),
    ]
