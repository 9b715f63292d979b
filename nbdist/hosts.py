"""The machines of `--hosts`: read from its text, or an error that shows the right forms; pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

from nbdist.errors import BadTopology, UsageError
from nbdist.topology import Layout
from nbdist.words import count

_FORMS = (
    "Use `--hosts a,b`, or `--hosts a:4,user@b:2` with the number of workers on each; write an "
    "IPv6 address in brackets"
    ", `[fe80::1]:2`."
)
_HOST = re.compile(r"(?:([^@]*)@)?(?:\[([^\]]*)\]|([^:\[\]]*))(?::([0-9]{1,6}))?")
# No option of ssh's, and nothing that a shell would take for more than a name.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_ZONE = re.compile(r"[A-Za-z0-9_.-]{1,15}")
_DOTTED = re.compile(r"[0-9.]+")


@dataclass(frozen=True, slots=True)
class Host:
    """A machine that ssh reaches; `slots` is for how many workers it has room, if that was said.

    `user` is "" for whomever ssh takes.
    """

    address: str
    slots: int | None = None
    user: str = ""

    def __str__(self) -> str:
        address = f"[{self.address}]" if ":" in self.address else self.address
        user = f"{self.user}@" if self.user else ""
        return f"{user}{address}" + ("" if self.slots is None else f":{self.slots}")

    @property
    def destination(self) -> str:
        """What stands in a command of ssh."""
        return f"{self.user}@{self.address}" if self.user else self.address


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read the value of `--hosts`."""
    hosts = tuple(_parse(item.strip(), text) for item in text.split(","))
    seen = set()
    for host in hosts:
        if host.address in seen:
            raise BadTopology("--hosts", text, f"{host.address} is listed twice", _FORMS)
        seen.add(host.address)
    return hosts


def read_hosts(given: str | Iterable[str]) -> str:
    """Read the hosts of a text, or several texts; write them as `--hosts` has them."""
    text = given if isinstance(given, str) else ",".join(map(str, given))
    return ",".join(map(str, parse_hosts(text)))


def _parse(item: str, text: str) -> Host:
    found = _HOST.fullmatch(item)
    if not found:
        raise BadTopology("--hosts", text, _why_not(item), _FORMS)
    user, six, name, slots = found.groups()
    if user is not None and not _NAME.fullmatch(user):
        raise BadTopology("--hosts", text, f"`{user}` cannot be a user", _FORMS)
    address = _name(name) if six is None else _six(six)
    if not address:
        raise BadTopology("--hosts", text, _why_not(item), _FORMS)
    if slots is not None and int(slots) < 1:
        raise BadTopology("--hosts", text, f"`{item}` allows no worker", _FORMS)
    return Host(address, None if slots is None else int(slots), user or "")


def _name(text: str) -> str:
    """Return a name or IPv4 address as it is to be written, "" for neither."""
    if not _NAME.fullmatch(text):
        return ""
    if not _DOTTED.fullmatch(text):
        return text.lower().rstrip(".")
    try:
        return str(IPv4Address(text))
    except ValueError:
        return ""


def _six(text: str) -> str:
    address, sign, zone = text.partition("%")
    if sign and not _ZONE.fullmatch(zone):
        return ""
    try:
        return f"{IPv6Address(address)}{sign}{zone}"
    except ValueError:
        return ""


def _why_not(item: str) -> str:
    if not item:
        return "there is nothing next to a comma"
    return f"`{item}` is not a host"


# --- which launcher the options of a world are for -----------------------------------------------


LOCAL = "local"
"""The launcher for this machine."""


def launcher_for(said: Mapping[str, object], environ: Mapping[str, str]) -> str:
    """Choose a launcher by what was said, or by where a process is; where none was named.

    In an allocation of Slurm's it is Slurm's, unless that is this machine alone.
    """
    if said.get("hosts"):
        return "ssh"
    nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES")
    # Slurm's daemon sets the second on the nodes; the shell of a `salloc` runs elsewhere.
    is_this_machine = nodes == "1" and "SLURMD_NODENAME" in environ
    is_in_job = environ.get("SLURM_JOB_ID") and not is_this_machine
    return "slurm" if said.get("salloc") or is_in_job else LOCAL


def check_room(
    typed: str, workers: int | None, layout: Layout | None, hosts: Sequence[Host]
) -> None:
    """Raise UsageError where the hosts have no room for what was `typed`, `-n 8` or `-j 2x4`."""
    slots = [host.slots for host in hosts]
    among = f"`{typed} --hosts {','.join(map(str, hosts))}`"
    if workers is not None and None not in slots:
        there_are = sum(filter(None, slots))
        if there_are < workers:
            raise UsageError(f"{among}: the hosts have room for {count(there_are, 'worker')}.")
    if layout is None:
        return
    if len(hosts) < (least := layout.least or layout.nodes):
        raise UsageError(f"{among}: {count(least, 'node')}, but {count(len(hosts), 'host')}.")
    small = [host for host in hosts if host.slots is not None and host.slots < layout.per_node]
    if len(hosts) - len(small) < least:
        raise UsageError(f"{among}: {small[0]} has no room for {count(layout.per_node, 'worker')}.")
