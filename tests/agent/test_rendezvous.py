"""Tests of `nbdist.agent.rendezvous`: a port that is held, and waits that deaths call off."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from nbdist.agent.processes import Spawner, WorkerProcess
from nbdist.agent.rendezvous import CallOff, HeldPort
from nbdist.agent.worker import Worker
from nbdist.wire.work import mark
from tests.agent.sources import TOKEN, Source, run, worker_start
from tests.waiting import SOON, until


@pytest.mark.parametrize(
    ("address", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)]
)
def test_a_held_port_is_for_user_code(address: str, family: socket.AddressFamily) -> None:
    """No other program is given it; one that says SO_REUSEADDR can listen there, twice too."""
    if address not in {each.address for on in psutil.net_if_addrs().values() for each in on}:
        pytest.skip(f"this machine has no {address}")
    port = HeldPort(address)
    try:
        with socket.socket(family) as other, pytest.raises(OSError, match="in use"):
            other.bind((address, port.number))
        for _ in range(2):
            with socket.create_server((address, port.number), family=family):
                pass
        assert repr(port) == f"<HeldPort {port.number}>"
    finally:
        port.close()


@pytest.mark.world
def test_a_worker_that_lived_dies(runtime: Path) -> None:
    """Those that wait are told by the file; a death after all have met is nothing to it."""

    async def test(source: Source) -> None:
        with subprocess.Popen(["sleep", "1000"], start_new_session=True) as child:  # noqa: ASYNC220
            process = WorkerProcess(child.pid)
            source.children.expect(child.pid, process.set_exited)
            with CallOff(runtime / "over", [process.exited]) as call_off:
                assert repr(call_off) == "<CallOff over open>"
                process.kill()
                await until((runtime / "over").exists)
            assert repr(call_off) == "<CallOff over called off>"
            child.returncode = await process.exited
        late = asyncio.get_running_loop().create_future()
        with CallOff(runtime / "late", [late]):
            pass
        late.set_result(-9)
        await asyncio.sleep(0)
        assert not (runtime / "late").exists()

    run("spawn", runtime, test)


READY = f"""#!{sys.executable}
print({mark(TOKEN, "ready").decode()!r}, flush=True)
"""


@pytest.mark.world
@pytest.mark.parametrize(
    ("python", "timeout", "why"),
    [
        ("/bin/false", SOON, "rank 0 could not start: it exited with code 1"),
        (sys.executable, 0.0, "rank 0 could not start: not in time"),
        ("./ready", SOON, "rank 0 could not start: it cannot be reached: "),
    ],
)
def test_a_worker_that_cannot_start(runtime: Path, python: str, timeout: float, why: str) -> None:
    """It is killed where it has a process, it is said why, and the others are told."""
    (runtime / "ready").write_text(READY + "import time; time.sleep(1000)")
    (runtime / "ready").chmod(0o700)

    async def test(source: Source) -> None:
        start = worker_start(runtime)
        command = str(runtime / python)
        start = replace(start, world=replace(start.world, python=command))
        worker = Worker(start, None, lambda *_: None)
        with CallOff(runtime / "over", []) as call_off:
            found = await call_off.start(worker, Spawner(source.children), timeout)
        assert found.startswith(why)
        assert (runtime / "over").exists()
        await worker.stop(0.0)
        assert worker.state == "dead"

    run("spawn", runtime, test)
