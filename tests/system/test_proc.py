"""Tests of `nbdist.system.processes`: state, time and memory of real processes, also ended ones."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nbdist.agent.inspect import MemoryGauge
from nbdist.system.processes import (
    OwnTime,
    ignores,
    is_exiting,
    is_stopped,
    schedule,
    thread_state,
)
from tests.faults.stops import spinning
from tests.waiting import wait_until

pytestmark = pytest.mark.world

SPINS = "while True: sum(range(100_000))"
BIG = 200 << 20


@contextmanager
def python(code: str) -> Iterator[int]:
    """A process that has run the code and waits."""
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}; print('ready', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
        process.kill()


def test_signals() -> None:
    """What a process does with a signal is known without asking it."""
    code = "import signal; signal.signal(signal.SIGUSR1, print)"
    with python(f"{code}; signal.signal(signal.SIGUSR2, signal.SIG_IGN)") as pid:
        assert not ignores(pid, signal.SIGUSR1)
        assert ignores(pid, signal.SIGUSR2)
    assert not ignores(pid, signal.SIGUSR2)


def test_exiting() -> None:
    """A process that was killed is exiting as soon as its files are closed, and once it is gone."""
    with python("0") as pid:
        assert not is_exiting(pid)
    assert is_exiting(pid)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.kill()
        assert process.stdout is not None
        assert process.stdout.read() == b""
        assert is_exiting(process.pid)  # nothing has waited for it yet


def test_states() -> None:
    """One that waits sleeps; SIGSTOP stops it; then it ends."""
    with python("0") as pid:
        wait_until(lambda: thread_state(pid) == "S")
        assert not is_stopped(pid)
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: is_stopped(pid))
    assert thread_state(pid) == "X"


def test_time_without_a_processor_is_not_its_own() -> None:
    """A process that shares the cores with many has had its share of the time, no more."""
    cores = len(os.sched_getaffinity(0))
    with spinning(3 * cores):
        started = time.monotonic()
        process = subprocess.Popen([sys.executable, "-c", SPINS])
        try:
            own = OwnTime(process.pid)
            while (ran := schedule(process.pid, process.pid).ran) < 0.2:
                time.sleep(0.05)
            seconds, passed = own.seconds(), time.monotonic() - started
        finally:
            process.kill()
            process.wait()
    sys.stdout.write(f"{ran:.2f} s run, {seconds:.2f} s its own of {passed:.2f} s\n")
    assert ran / 2 < seconds < passed / 2


@pytest.fixture
def big() -> Iterator[int]:
    """A process that uses 200 MiB of its own."""
    with python(f"x = b'x' * {BIG}") as pid:
        yield pid


def test_memory_of_processes(big: int) -> None:
    """Bytes in use; nothing of a process that has ended."""
    found = asyncio.run(MemoryGauge().read([os.getpid(), big, 2**22 + 1], 10.0))
    assert found[big] > BIG
    assert found[os.getpid()] > 1 << 20
    assert found[2**22 + 1] == 0


def test_no_time(big: int) -> None:
    """Without time to count pages it is what is known without counting, or was found before."""

    async def twice() -> tuple[int, int, int]:
        gauge = MemoryGauge()
        at_once = await gauge.read([big], -1.0)
        counted = await gauge.read([big], 10.0)
        again = await gauge.read([big], -1.0)
        return at_once[big], counted[big], again[big]

    at_once, counted, again = asyncio.run(twice())
    assert at_once > BIG
    assert counted > at_once  # a share of libraries' pages too
    assert again == counted
