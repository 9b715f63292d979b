"""Waits for facts of which no event tells, with a bound; and what is done once they are so."""

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
    import psutil  # not where tests/matrix makes its environments


def _busy() -> int:
    """How many want a processor for each that there is: as an average, and in this moment."""
    last_minute, _, _, tasks, _ = Path("/proc/loadavg").read_text().split()
    now = int(tasks.partition("/")[0])
    return max(1, round(max(float(last_minute), now) / (os.cpu_count() or 1)))


SOON = int(os.environ.setdefault("TESTS_SOON", str(60 * _busy())))
"""Seconds in which all comes that comes at all: more where other programs have the processors.
The same in all processes of a run, since cases of tests are named by it."""

os.environ.setdefault("PYTEST_TIMEOUT", str(10 * SOON))  # for a test that hangs

STEP, LONGEST_STEP, SHARE = 0.01, 0.1, 0.05
"""Seconds between two looks, at first and at most, and how much later than it is so it is seen."""


def _pauses(what: str, timeout: float) -> Iterator[float]:
    """Yield the seconds after each look; fail, saying what is not so, after the last."""
    began = time.monotonic()
    while (passed := time.monotonic() - began) < timeout:
        yield min(STEP + SHARE * passed, LONGEST_STEP)
    yield 0.0
    raise AssertionError(f"still not so after {timeout:.0f} s: {what}")


def wait_until(is_so: Callable[[], object], what: str = "", timeout: float = SOON) -> None:
    """Return soon after it is so; fail, saying what is not so, when it does not become so."""
    for pause in _pauses(what, timeout):
        if is_so():
            return
        time.sleep(pause)


SELECTS = (23, 72, 270)
"""The numbers of select(2) and pselect6(2) on x86-64 and ARM; the fifth argument is the timeout."""


def wait_until_at_rest(server: psutil.Process) -> None:
    """Return once a fork server has nothing to import any more: it waits without a timeout.

    Its CPU time does not say so: on a busy machine it may have none for seconds.
    """

    def has_no_timeout() -> bool:
        number, *arguments = Path(f"/proc/{server.pid}/syscall").read_text().split()
        return number.isdigit() and int(number) in SELECTS and int(arguments[4], 16) == 0

    wait_until(has_no_timeout, "the fork server has ended its imports", 2 * SOON)


async def until(is_so: Callable[[], object], what: str = "", timeout: float = SOON) -> None:
    """The same on an event loop."""
    for pause in _pauses(what, timeout):
        if is_so():
            return
        await asyncio.sleep(pause)


@contextmanager
def once(is_due: Callable[[], object], do: Callable[[], object], what: str = "") -> Iterator[None]:
    """Do something in a thread as soon as it is due, unless what runs here has ended by then.

    Where that fails, what runs here is interrupted: it may wait for it.
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
