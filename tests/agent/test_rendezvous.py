"""Tests of how ranks meet: a port that is held, and waits that deaths call off.

And the store's socket: what workers ask there, and what is no question.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from nbdist.agent.listener import StoreWindow
from nbdist.agent.processes import Spawner, WorkerProcess
from nbdist.agent.worker import Worker
from nbdist.agent.worker_group import CallOff, HeldPort
from nbdist.wire.frames import FrameCutter, framed
from nbdist.wire.store import (
    Add,
    Answer,
    Append,
    Count,
    Get,
    HostedStore,
    Operation,
    Refused,
    Set,
    Wait,
    answer_from,
    to_frame,
)
from nbdist.wire.work import mark
from tests.agent.sources import TOKEN, Source, worker_start
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
    finally:
        port.close()


@pytest.mark.world
async def test_a_worker_that_lived_dies(runtime: Path, source: Source) -> None:
    """Those that wait are told by the file; a death after all have met is nothing to it."""
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as child:  # noqa: ASYNC220
        process = WorkerProcess(child.pid)
        source.children.expect(child.pid, process.set_exited)
        with CallOff(runtime / "over", [process.exited]):
            process.kill()
            await until((runtime / "over").exists)
        child.returncode = await process.exited
    late = asyncio.get_running_loop().create_future()
    with CallOff(runtime / "late", [late]):
        pass
    late.set_result(-9)
    await asyncio.sleep(0)
    assert not (runtime / "late").exists()


READY = f"""#!{sys.executable}
print({mark(TOKEN, "ready").decode()!r}, flush=True)
import time; time.sleep(1000)
"""


def worker_of(runtime: Path, program: str) -> Worker:
    """A worker that runs this program, or that at this path."""
    path = Path(program)
    if program.startswith("#!"):
        path = runtime / "program"
        path.write_text(program)
        path.chmod(0o700)
    start = worker_start(runtime)
    start = replace(start, world=replace(start.world, python=str(path)))
    return Worker(start, None, lambda *_: None)


@pytest.mark.world
@pytest.mark.parametrize(
    ("program", "timeout", "why"),
    [
        ("/bin/false", SOON, "rank 0 could not start: it exited with code 1"),
        (sys.executable, 0.0, "rank 0 could not start: not in time"),
        (READY, SOON, "rank 0 could not start: it cannot be reached: "),
    ],
)
async def test_a_worker_that_cannot_start(
    runtime: Path, program: str, timeout: float, why: str, source: Source
) -> None:
    """It is killed where it has a process, it is said why, and the others are told."""
    worker = worker_of(runtime, program)
    with CallOff(runtime / "over", []) as call_off:
        found = await call_off.start(worker, Spawner(source.children), timeout)
    assert found.startswith(why)
    assert (runtime / "over").exists()
    await worker.stop(0.0)
    assert worker.state == "dead"


@pytest.mark.world
async def test_a_start_that_is_called_off(runtime: Path, source: Source) -> None:
    """It says nothing: what called it off does."""
    worker = worker_of(runtime, f"#!{sys.executable}\nimport time; time.sleep(1000)")
    dies = asyncio.get_running_loop().create_future()
    with CallOff(runtime / "over", [dies]) as call_off:
        dies.set_result(-9)
        assert await call_off.start(worker, Spawner(source.children), SOON) == ""
    await worker.stop(0.0)


class Asking:
    """A worker's connection."""

    opened: ClassVar[list[Asking]] = []

    @classmethod
    async def at(cls, window: StoreWindow) -> Asking:
        asking = cls()
        asking.reader, asking.writer = await asyncio.open_unix_connection(window.path)
        cls.opened.append(asking)
        return asking

    async def ask(self, operation: Operation) -> Answer:
        self.writer.write(to_frame(operation))
        return await self.answer()

    async def answer(self) -> Answer:
        cutter = FrameCutter()
        while data := await self.reader.read(1 << 16):
            for frame in cutter.feed(data):
                return answer_from(frame)
        raise ConnectionError

    async def is_ended(self) -> bool:
        try:
            return await self.reader.read() == b""
        except ConnectionResetError:
            return True


class LostStore(HostedStore):
    async def ask(self, operation: Operation) -> Answer:
        raise ConnectionError("the head has gone")


@pytest.fixture
def store(request: pytest.FixtureRequest) -> HostedStore:
    return getattr(request, "param", HostedStore)()


@pytest.fixture
def window(runtime: Path, runner: asyncio.Runner, store: HostedStore) -> Iterator[StoreWindow]:
    window = StoreWindow(runtime, store.ask)

    async def close() -> None:
        for asking in Asking.opened:
            asking.writer.close()
        Asking.opened.clear()
        await window.close()

    runner.run(window.open())
    yield window
    runner.run(close())
    assert not window.path.exists()
    assert repr(window).endswith(" 0 connections>")


async def test_operations_of_several(window: StoreWindow) -> None:
    """One waits while others ask; only this user can open the socket."""
    assert stat.S_IMODE(window.path.stat().st_mode) == 0o600
    one, other = await Asking.at(window), await Asking.at(window)
    waiting = asyncio.create_task(one.ask(Get(("key",), 10.0)))
    assert await other.ask(Add("count", 2)) == 2
    assert await other.ask(Set({"key": b"value"})) is None
    assert await waiting == (b"value",)
    assert repr(window).endswith("store.sock, 2 connections>")


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        framed(b"garbage"),
        framed(pickle.dumps(os.getcwd)),
        framed(pickle.dumps(Wait((), 1e9))),
        to_frame(Count()) * 2,
        b"\xff" * 8,
    ],
    ids=["HTTP", "garbage", "function", "endless wait", "two at once", "length"],
)
async def test_what_is_no_operation(garbage: bytes, window: StoreWindow) -> None:
    """It ends its connection; another one goes on."""
    other, one = await Asking.at(window), await Asking.at(window)
    await other.ask(Set({"key": b"value"}))
    one.writer.write(garbage)
    assert await one.is_ended()
    assert await other.ask(Get(("key",), 1.0)) == (b"value",)
    assert repr(window).endswith(" 1 connections>")


async def test_a_socket_that_was_removed(window: StoreWindow) -> None:
    """It is there again once it is opened again; who was connected goes on."""
    one = await Asking.at(window)
    assert await one.ask(Add("count", 1)) == 1
    window.path.unlink()
    await window.open()
    other = await Asking.at(window)
    assert [await each.ask(Add("count", 1)) for each in (one, other)] == [2, 3]
    before = window.path.stat().st_ino
    await window.open()
    assert window.path.stat().st_ino == before


async def test_one_that_goes_while_it_waits(window: StoreWindow, store: HostedStore) -> None:
    """Nobody waits for it any more."""
    one = await Asking.at(window)
    one.writer.write(to_frame(Wait(("key",), 10.0)))
    await until(lambda: "1 wait" in repr(store))
    one.writer.close()
    await until(lambda: "0 wait" in repr(store))
    assert repr(window).endswith(" 0 connections>")


@pytest.mark.parametrize("store", [LostStore], indirect=True)
async def test_a_store_that_is_lost(window: StoreWindow) -> None:
    """The connection ends by which it was asked."""
    one = await Asking.at(window)
    one.writer.write(to_frame(Count()))
    assert await one.is_ended()


async def test_values_that_are_too_large(
    monkeypatch: pytest.MonkeyPatch, window: StoreWindow
) -> None:
    """It is said, since the one who asks could not read them."""
    monkeypatch.setattr("nbdist.agent.listener.MOST_BYTES", 1 << 20)
    one = await Asking.at(window)
    await one.ask(Set({"key": bytes(600_000)}))
    await one.ask(Append("key", bytes(600_000)))
    assert await one.ask(Get(("key",), 1.0)) == Refused("these values have more than 1 MiB")


async def test_more_than_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch, window: StoreWindow
) -> None:
    """They are sent away; those that were there go on."""
    monkeypatch.setattr("nbdist.agent.listener.MOST_ASKING", 1)
    one = await Asking.at(window)
    assert await one.ask(Count()) == 0
    assert await (await Asking.at(window)).is_ended()
    assert await one.ask(Count()) == 0
