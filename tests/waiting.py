"""Waits, with a timeout, for conditions that no event announces, and acts when they hold."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil  # missing in the environments of tests/matrix


def _busy() -> int:
    """Return the running tasks per core, over a minute or at this moment, whichever is more."""
    last_minute, _, _, tasks, _ = Path("/proc/loadavg").read_text().split()
    now = int(tasks.partition("/")[0])
    return max(1, round(max(float(last_minute), now) / (os.cpu_count() or 1)))


SOON = int(os.environ.setdefault("TESTS_SOON", str(60 * _busy())))
"""Seconds within which everything happens that a test waits for: more on a busy machine.
All processes of a run have the same number, because cases of tests have names with it."""

os.environ.setdefault("PYTEST_TIMEOUT", str(10 * SOON))  # for a test that hangs

STEP, LONGEST_STEP, SHARE = 0.01, 0.1, 0.05
"""Seconds between two checks, at first and at most; SHARE is their growth per second waited."""


def _pauses(what: str, timeout: float) -> Iterator[float]:
    """Yield the seconds to wait after each check; raise AssertionError after the last check."""
    began = time.monotonic()
    while (passed := time.monotonic() - began) < timeout:
        yield min(STEP + SHARE * passed, LONGEST_STEP)
    yield 0.0
    raise AssertionError(f"still not so after {timeout:.0f} s: {what}")


def wait_until(is_so: Callable[[], object], what: str = "", timeout: float = SOON) -> None:
    """Return soon after a condition holds; raise AssertionError, which names it, at the timeout."""
    for pause in _pauses(what, timeout):
        if is_so():
            return
        time.sleep(pause)


SELECTS = (23, 72, 270)
"""The numbers of select(2) and pselect6(2) on x86-64 and ARM; the fifth argument is the timeout."""


def wait_until_at_rest(server: psutil.Process) -> None:
    """Return once a fork server has ended its imports: its select has no timeout then.

    Its CPU time would not show that: on a busy machine a process may get none for seconds.
    """

    def has_no_timeout() -> bool:
        number, *arguments = Path(f"/proc/{server.pid}/syscall").read_text().split()
        return number.isdigit() and int(number) in SELECTS and int(arguments[4], 16) == 0

    wait_until(has_no_timeout, "the fork server has ended its imports", 2 * SOON)


async def until(is_so: Callable[[], object], what: str = "", timeout: float = SOON) -> None:
    """Wait on an event loop, as `wait_until` does in a thread."""
    for pause in _pauses(what, timeout):
        if is_so():
            return
        await asyncio.sleep(pause)


@contextmanager
def once(is_due: Callable[[], object], do: Callable[[], object], what: str = "") -> Iterator[None]:
    """Call `do` in a thread as soon as `is_due` is true, unless the block has ended by then.

    If the thread fails, the block is interrupted, because the block may wait for `do`.
    """
    over, failed = threading.Event(), list[Exception]()

    def wait_and_do() -> None:
        try:
            wait_until(lambda: over.is_set() or is_due(), what)
            if not over.is_set():
                do()
        except Exception as error:  # noqa: BLE001 (it is raised below)
            failed.append(error)
            if not over.is_set():
                press_stop()

    thread = threading.Thread(target=wait_and_do)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        if failed:
            raise failed[0]


def press_stop() -> None:
    """Press Ctrl-C in this process, from any thread."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
