"""Tests of `nbdist.node.memory`: figures of real processes, in time."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from nbdist.node.memory import MemoryGauge

BIG = 200 << 20


@pytest.fixture
def big() -> Iterator[int]:
    """A process that uses 200 MiB of its own."""
    code = f"x = b'x' * {BIG}; print('ready', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
        process.kill()


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
