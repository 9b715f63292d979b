"""Waits for facts of which no event tells, with a bound."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

SOON = 60 * max(1, round(os.getloadavg()[0] / (os.cpu_count() or 1)))
"""Seconds in which all comes that comes at all: more where other programs have the processors."""

STEP = 0.01


def wait_until(is_so: Callable[[], object], what: str = "", timeout: float = SOON) -> None:
    """Return as soon as it is so; fail, saying what is not so, when it does not become so."""
    deadline = time.monotonic() + timeout
    while not is_so():
        assert time.monotonic() < deadline, f"still not so after {timeout:.0f} s: {what}"
        time.sleep(STEP)


async def until(is_so: Callable[[], object], what: str = "", timeout: float = SOON) -> None:
    """The same on an event loop."""
    deadline = time.monotonic() + timeout
    while not is_so():
        assert time.monotonic() < deadline, f"still not so after {timeout:.0f} s: {what}"
        await asyncio.sleep(STEP)
