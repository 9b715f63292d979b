"""Whether other machines of a world can be reached from this one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from nbdist.wire.many import Target

REACH_TIMEOUT = 4.0
"""Seconds for a machine to answer: two lost packets are sent again by then."""


async def first_unreached(targets: Sequence[Target], timeout: float = REACH_TIMEOUT) -> str:
    """Try all at once; return which could not be reached, where and why, "" for none."""
    tried = await asyncio.gather(*(_try(target, timeout) for target in targets))
    return next(filter(None, tried), "")


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
