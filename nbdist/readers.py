"""Readers of flags' values: of their text, or of what Python gives; pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Any

from nbdist.errors import BadTopology, UsageError

_NAME_LIMIT, _PART_LIMIT = 200, 100
_BYTES = re.compile(r"([0-9]{1,6})([MGT])(?:i?B)?", re.IGNORECASE)
_PATTERN = re.compile(r"[A-Za-z0-9_*?]+")
_ADDRESS = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9_.:%-]{0,100}")
_ENDPOINT = re.compile(r"(?:[A-Za-z0-9_.-]{1,250}|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")


def whole_number(
    flag: str, what: str, least: int = 1, most: int = 999_999_999
) -> Callable[[Any], int]:
    """Make a reader of whole numbers, for argparse's `type`; UsageError has `what` they are."""

    def read(value: object) -> int:
        text = unquoted(str(value))
        is_number = text.isascii() and text.isdigit() and len(text) <= len(str(most))
        if not is_number or not least <= int(text) <= most:
            raise UsageError(f"`{flag} {text}`: {what}.")
        return int(text)

    return read


def unquoted(text: str) -> str:
    """Strip the quotes around a text, which IPython leaves there."""
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    return text[1:-1] if is_quoted else text


read_restarts = whole_number(
    "--max-restarts", "a number of attempts after the first, such as 3, or 0", least=0
)


def number_of_seconds(flag: str) -> Callable[[Any], float]:
    """Make a reader of a flag's seconds, also for argparse's `type`; it raises UsageError."""

    def read(value: Any) -> float:
        text = unquoted(value) if isinstance(value, str) else value
        try:
            seconds = float(text)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < float("inf"):
            raise UsageError(f"`{flag} {text}`: a number of seconds, such as 30 or 0.5.")
        return seconds

    return read


def read_name(name: str) -> str:
    """Read the value of `--name`, which can be a folder below the log folder, and stays there."""
    bad = any(part in ("", ".", "..") or len(part) > _PART_LIMIT for part in name.split("/"))
    if bad or not name.isprintable() or len(name) > _NAME_LIMIT:
        raise UsageError(
            f"`--name {name}`: it names a folder below the log folder, such as `exp` or `exp/run1`."
        )
    return name


def read_environ(given: Mapping[str, object] | Iterable[str] | None) -> dict[str, str]:
    """Read the variables of `env`, or of all `--env`, each `NAME=VALUE`."""
    if given is None or isinstance(given, Mapping):
        return {str(name): str(value) for name, value in (given or {}).items()}
    found = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign or not name.isidentifier() or not name.isascii():
            raise UsageError(f"`--env {name}`: a name and its value, such as `--env SEED=1`.")
        found[name] = unquoted(value)
    return found


def read_words(flag: str, form: str) -> Callable[[str], str]:
    """Make a reader of what a shell could read: a command, or its options."""

    def read(text: str) -> str:
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise UsageError(f"`{flag} {text}`: {str(error).lower()}.") from None
        if not words:
            raise UsageError(f'`{flag} ""`: {form}.')
        return text

    return read


read_wrap = read_words("--wrap", 'a command and its arguments, such as `--wrap "nice -n 5"`')

read_salloc = read_words("--salloc", 'options of salloc, such as `--salloc "-p gpu -t 2:00:00"`')


def read_memory(text: object) -> str:
    """Read the value of `--memory`; in the form of Slurm and Kubernetes, `16G`."""
    found = _BYTES.fullmatch(str(text).replace(" ", ""))
    if not found or not int(found[1]):
        raise UsageError(f"`--memory {text}`: memory for each worker, such as 16G or 500M.")
    return f"{int(found[1])}{found[2].upper()}"


def read_patterns(text: str | Iterable[str]) -> str:
    """Read the value of `--copy-env`: names of variables, with `*` and `?`."""
    text = text if isinstance(text, str) else ",".join(text)
    patterns = [each.strip() for each in text.split(",")]
    if not all(map(_PATTERN.fullmatch, patterns)):
        raise UsageError(
            f"`--copy-env {text}`: names of variables, such as `--copy-env 'HF_*,WANDB_*'`."
        )
    return ",".join(patterns)


def read_address(text: str) -> str:
    """Read the value of `--address`: an address, a name, or a network interface's."""
    bare = text.strip()
    if bare[:1] + bare[-1:] == "[]":
        bare = bare[1:-1]
    if not _ADDRESS.fullmatch(bare):
        raise UsageError(
            f"`--address {text}`: an address of this machine or a network interface, such as "
            "10.0.0.1 or eth0; the port is found."
        )
    return bare


def read_endpoint(text: str) -> str:
    """Read the value of `--rdzv-endpoint`."""
    found = _ENDPOINT.fullmatch(text)
    if not found or not 0 < int(found[1]) < 1 << 16:
        raise UsageError(f"`--rdzv-endpoint {text}`: HOST:PORT, such as etcd.example.org:2379.")
    return text


# --- the machines of `--hosts` ------------------------------------------------------------


_FORMS = (
    "Use `--hosts a,b`, or `--hosts a:4,user@b:2` with the number of workers on each; write an "
    "IPv6 address in brackets, `[fe80::1]:2`."
)
_HOST = re.compile(r"(?:([^@]*)@)?(?:\[([^\]]*)\]|([^:\[\]]*))(?::([0-9]{1,6}))?")
# No option of ssh's, and nothing that a shell would take for more than a name.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_ZONE = re.compile(r"[A-Za-z0-9_.-]{1,15}")
_DOTTED = re.compile(r"[0-9.]+")


@dataclass(frozen=True, slots=True)
class Host:
    """A machine that ssh reaches, with room for `slots` workers if that was said."""

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
    hosts: dict[str, Host] = {}
    try:
        for item in text.split(","):
            host = _parse(item.strip())
            if host.address in hosts:
                raise ValueError(f"{host.address} is listed twice")
            hosts[host.address] = host
    except ValueError as why:
        raise BadTopology("--hosts", text, str(why), _FORMS) from None
    return tuple(hosts.values())


def read_hosts(given: str | Iterable[str]) -> str:
    """Read the hosts of a text, or several texts; write them as `--hosts` has them."""
    text = given if isinstance(given, str) else ",".join(map(str, given))
    return ",".join(map(str, parse_hosts(text)))


def _parse(item: str) -> Host:
    """Read one host; ValueError with the reason, as a phrase."""
    if not item:
        raise ValueError("there is nothing next to a comma")
    found = _HOST.fullmatch(item)
    user, six, name, slots = found.groups() if found else (None, None, "", None)
    if user is not None and not _NAME.fullmatch(user):
        raise ValueError(f"`{user}` cannot be a user")
    try:
        address = _address(name) if six is None else _six(six)
    except ValueError:
        raise ValueError(f"`{item}` is not a host") from None
    if slots is not None and int(slots) < 1:
        raise ValueError(f"`{item}` allows no worker")
    return Host(address, None if slots is None else int(slots), user or "")


def _address(name: str) -> str:
    """Return a name or IPv4 address as it is to be written; ValueError for neither."""
    if not _NAME.fullmatch(name):
        raise ValueError
    return str(IPv4Address(name)) if _DOTTED.fullmatch(name) else name.lower().rstrip(".")


def _six(text: str) -> str:
    address, sign, zone = text.partition("%")
    if sign and not _ZONE.fullmatch(zone):
        raise ValueError
    return f"{IPv6Address(address)}{sign}{zone}"
