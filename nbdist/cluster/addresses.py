"""By which addresses other machines reach this one."""

from __future__ import annotations

import socket

import psutil

OUTSIDE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses that nobody has (RFC 5737, RFC 3849): nothing is sent there."""


def addresses(asked: str | None) -> tuple[str, ...]:
    """List them, the likeliest first; `asked` is an address or an interface of this machine.

    That is the one with which packets leave for elsewhere: others may be bridges of
    containers, by which no other machine can be reached.
    """
    found = psutil.net_if_addrs()
    if asked and asked not in found:
        return (asked,)
    usable = [
        each.address.partition("%")[0]
        for name, on in found.items()
        if asked in (None, "", name)
        for each in on
        if each.family in (socket.AF_INET, socket.AF_INET6) and not _is_local(each.address)
    ]
    leaving = [_leaving(*each) for each in OUTSIDE]
    ordered = sorted(usable, key=lambda text: (text not in leaving, ":" in text))
    return tuple(ordered) or ("127.0.0.1",)


def listened_at(asked: str | None) -> tuple[str, ...]:
    """List where to listen: at what was asked for, where this machine has it; () for everywhere.

    A name, or the address of a gateway, leads here by ways of its own.
    """
    found = addresses(asked) if asked else ()
    own = {each.address for on in psutil.net_if_addrs().values() for each in on}
    return found if own.issuperset(found) else ()


def _leaving(family: socket.AddressFamily, outside: str) -> str:
    """Return the own address of packets that leave for there, "" where there is no way."""
    with socket.socket(family, socket.SOCK_DGRAM) as tried:
        try:
            tried.connect((outside, 9))  # it is only looked up: a datagram would be sent later
        except OSError:
            return ""
        return str(tried.getsockname()[0])


def _is_local(address: str) -> bool:
    """Say whether it means another machine to each, or needs an interface besides."""
    return address.startswith(("127.", "169.254.", "fe80:")) or address == "::1"
