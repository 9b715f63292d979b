"""By which address the head can be reached from this machine, and whether the others can."""

from __future__ import annotations

import asyncio
import errno
import os
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from nbdist.wire.many import Target
from nbdist.wire.ticket import Ticket

WAY_TIMEOUT = 5.0
"""Seconds for one of the head's addresses to answer."""

ORDER_GRACE = 0.2
"""Seconds more for one that comes before the quickest in order."""

REACH_TIMEOUT = 4.0
"""Seconds for a machine to answer: two lost packets are sent again by then."""


class NoWay(OSError):
    """No address of the head can be reached; the message names each with its port, and why."""


@dataclass(frozen=True, slots=True)
class Way:
    """The address of the head that was reached, and the own one that leads there."""

    address: str
    own: str


def find_way(ticket: Ticket) -> Way:
    """Connect to all addresses at once, and take the first, in their order, that answers.

    An earlier one has `ORDER_GRACE` seconds more than the quickest: on the head's own machine
    all answer, also those by which no other can be reached.  Raises NoWay after
    `WAY_TIMEOUT` seconds, or as soon as all have refused.
    """
    problems: dict[str, str] = {}
    ways: dict[str, Way] = {}
    with selectors.DefaultSelector() as waiting:
        tried = [each for each in ticket.addresses if _begin(each, ticket.port, waiting, problems)]
        end = time.monotonic() + WAY_TIMEOUT
        try:
            while waiting.get_map() and (left := end - time.monotonic()) > 0:
                for key, _ in waiting.select(left):
                    waiting.unregister(key.fileobj)
                    _take(key.data, ways, problems)
                if ways:
                    end = min(end, time.monotonic() + ORDER_GRACE)
        finally:
            for key in waiting.get_map().values():
                key.data[0].close()
    for address in tried:
        if address in ways:
            return ways[address]
        problems.setdefault(address, f"no answer within {WAY_TIMEOUT:.0f} s")
    said = "; ".join(f"{name}:{ticket.port}: {why}" for name, why in problems.items())
    raise NoWay(f"{socket.gethostname()} cannot reach the notebook's machine at {said}")


def _take(tried: tuple[socket.socket, str], ways: dict[str, Way], problems: dict[str, str]) -> None:
    """Note what became of one attempt."""
    attempt, address = tried
    with attempt:
        code = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            problems[address] = os.strerror(code)
        else:
            ways[address] = Way(address, attempt.getsockname()[0])


def _begin(
    address: str, port: int, waiting: selectors.BaseSelector, problems: dict[str, str]
) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    attempt = socket.socket(family, socket.SOCK_STREAM)
    attempt.settimeout(0.0)
    code = attempt.connect_ex((address, port))
    if code not in (0, errno.EINPROGRESS):
        problems[address] = os.strerror(code)
        attempt.close()
        return False
    waiting.register(attempt, selectors.EVENT_WRITE, (attempt, address))
    return True


async def first_unreached(targets: Sequence[Target], timeout: float = REACH_TIMEOUT) -> str:
    """Try all at once; return which could not be reached, where and why, "" for none."""
    tried = await asyncio.gather(*(_try(target, timeout) for target in targets))
    return next(filter(None, tried), "")


async def is_refused(target: Target, timeout: float = REACH_TIMEOUT) -> bool:
    """Say whether the machine answers that nobody listens there."""
    try:
        async with asyncio.timeout(timeout):
            _, writer = await asyncio.open_connection(target.address, target.port)
    except ConnectionRefusedError:
        return True
    except OSError:  # TimeoutError is one
        return False
    writer.close()
    return False


async def _try(target: Target, timeout: float) -> str:
    place = f"{target.name} at {target.address}:{target.port}"
    try:
        async with asyncio.timeout(timeout):
            _, writer = await asyncio.open_connection(target.address, target.port)
    except ConnectionRefusedError:
        return ""  # nothing listens there, and it is the machine that says so
    except TimeoutError:
        return f"{place}: no answer within {timeout:.0f} s"
    except OSError as error:
        return f"{place}: {error.strerror or error}"
    writer.close()
    return ""
