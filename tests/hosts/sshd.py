"""A real sshd on each host, and the ssh of a user who has a key and aliases for the hosts.

Each host has some aliases, of which no name server knows:
`node1`, `node1-v6` (over IPv6), `node1-refused` (with a key that the host does not accept),
`node1-changed` (which had another host key once), `node1-closed` (a port where nothing listens).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.hosts.network import Host, Network, end, of_tests, sh
from tests.waiting import wait_until

SSHD = "/usr/sbin/sshd"
# The root folder of sshd's process without privileges; packages make the folder at boot.
PRIVILEGE_FOLDER = Path("/run/sshd")

SERVER = """\
Port 22
HostKey {folder}/{name}.host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
SetEnv {of_tests}
"""

CLIENT = """\
Host *-refused
  IdentityFile {folder}/other_key
Host *-changed
  UserKnownHostsFile {folder}/known_hosts_changed
Host *-closed
  Port 1
Host * !*-refused
  IdentityFile {folder}/key
Host *
  IdentitiesOnly yes
  BatchMode yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile none
"""


def missing() -> str | None:
    """Return why this machine can have no sshd, or None."""
    if not (Path(SSHD).exists() and shutil.which("ssh") and shutil.which("ssh-keygen")):
        return "no sshd (apt-get install openssh-server openssh-client)"
    return None


class Sshd:
    """The sshd of every host, and the keys and settings of a user's ssh."""

    def __init__(self, network: Network) -> None:
        self.folder = network.folder / "ssh"
        self.folder.mkdir()
        PRIVILEGE_FOLDER.mkdir(exist_ok=True)
        for name in ("key", "other_key", "other_host_key"):
            self._make_key(name)
        config = self.folder / "config"
        config.write_text("".join(map(_aliases, network.hosts)) + self._filled(CLIENT))
        self._processes = [self._start(host) for host in network.hosts]
        self._write_known_hosts(network.hosts)
        self.path = self.folder / "bin"
        """A folder to put before PATH: its `ssh` is this machine's, with the user's settings."""
        self.path.mkdir()
        ssh = self.path / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {config} "$@"\n')
        ssh.chmod(0o755)
        for host in network.hosts:
            wait_until(lambda host=host: 22 in host.listening(), f"sshd on {host.name}")  # type: ignore[misc]

    @property
    def environ(self) -> dict[str, str]:
        """Variables for a program of this machine that calls `ssh`."""
        return {"PATH": f"{self.path}:{os.environ['PATH']}"}

    def close(self) -> None:
        for process in self._processes:
            end(process)

    def _filled(self, text: str, name: str = "") -> str:
        variables = " ".join(f"{variable}={value}" for variable, value in of_tests().items())
        return text.format(folder=self.folder, name=name, of_tests=variables)

    def _make_key(self, name: str) -> None:
        key = str(self.folder / name)
        sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "nbdist test", "-f", key)

    def _start(self, host: Host) -> subprocess.Popen[bytes]:
        self._make_key(f"{host.name}.host_key")
        config = self.folder / f"{host.name}.sshd_config"
        config.write_text(self._filled(SERVER, host.name))
        # A user without a password may log in with a key, a locked user may not.
        host.run("sed -i 's/^root:[^:]*:/root:*:/' /etc/shadow")
        log = (self.folder / f"{host.name}.log").open("wb")
        with log:
            process = host.popen([SSHD, "-D", "-e", "-f", str(config)], stderr=log)
        host.lasts(process.pid, 22)
        return process

    def _write_known_hosts(self, hosts: list[Host]) -> None:
        other = (self.folder / "other_host_key.pub").read_text()
        for file, is_true in (("known_hosts", True), ("known_hosts_changed", False)):
            keys = [(self.folder / f"{host.name}.host_key.pub").read_text() for host in hosts]
            lines = [
                f"{host.address},{host.address6} {key if is_true else other}"
                for host, key in zip(hosts, keys, strict=True)
            ]
            (self.folder / file).write_text("".join(lines))


def _aliases(host: Host) -> str:
    names = [host.name, *(f"{host.name}-{kind}" for kind in ("refused", "changed", "closed"))]
    return (
        f"Host {host.name}-v6\n  HostName {host.address6}\n"
        f"Host {' '.join(names)}\n  HostName {host.address}\n"
    )
