"""Tests of `nbdist.agent.store_window`: what its workers ask, and what is no question."""

from __future__ import annotations

import asyncio
import os
import pickle
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import ClassVar

import pytest

from nbdist.agent import store_window
from nbdist.agent.store_window import AskStore, StoreWindow
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
from tests.waiting import SOON, until

Test = Callable[[StoreWindow], Awaitable[None]]


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


def with_window(runtime: Path, test: Test, ask: AskStore | None = None) -> None:
    async def main() -> None:
        window = StoreWindow(runtime, ask or HostedStore().ask)
        await window.open()
        try:
            async with asyncio.timeout(SOON):
                await test(window)
        finally:
            for asking in Asking.opened:
                asking.writer.close()
            Asking.opened.clear()
            await window.close()
        assert not window.path.exists()
        assert repr(window).endswith(" 0 connections>")

    asyncio.run(main())


def test_operations_of_several(runtime: Path) -> None:
    """One waits while others ask; only this user can open the socket."""

    async def test(window: StoreWindow) -> None:
        assert stat.S_IMODE(window.path.stat().st_mode) == 0o600
        one, other = await Asking.at(window), await Asking.at(window)
        waiting = asyncio.create_task(one.ask(Get(("key",), 10.0)))
        assert await other.ask(Add("count", 2)) == 2
        assert await other.ask(Set({"key": b"value"})) is None
        assert await waiting == (b"value",)
        assert repr(window).endswith("store.sock, 2 connections>")

    with_window(runtime, test)


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
def test_what_is_no_operation(runtime: Path, garbage: bytes) -> None:
    """It ends its connection; another one goes on."""

    async def test(window: StoreWindow) -> None:
        other, one = await Asking.at(window), await Asking.at(window)
        await other.ask(Set({"key": b"value"}))
        one.writer.write(garbage)
        assert await one.is_ended()
        assert await other.ask(Get(("key",), 1.0)) == (b"value",)
        assert repr(window).endswith(" 1 connections>")

    with_window(runtime, test)


def test_a_socket_that_was_removed(runtime: Path) -> None:
    """It is there again once it is opened again; who was connected goes on."""

    async def test(window: StoreWindow) -> None:
        one = await Asking.at(window)
        assert await one.ask(Add("count", 1)) == 1
        window.path.unlink()
        await window.open()
        other = await Asking.at(window)
        assert [await each.ask(Add("count", 1)) for each in (one, other)] == [2, 3]
        before = window.path.stat().st_ino
        await window.open()
        assert window.path.stat().st_ino == before

    with_window(runtime, test)


def test_one_that_goes_while_it_waits(runtime: Path) -> None:
    """Nobody waits for it any more."""
    store = HostedStore()

    async def test(window: StoreWindow) -> None:
        one = await Asking.at(window)
        one.writer.write(to_frame(Wait(("key",), 10.0)))
        await until(lambda: "1 wait" in repr(store))
        one.writer.close()
        await until(lambda: "0 wait" in repr(store))
        assert repr(window).endswith(" 0 connections>")

    with_window(runtime, test, store.ask)


def test_a_store_that_is_lost(runtime: Path) -> None:
    """The connection ends by which it was asked."""

    async def ask(_: Operation) -> Answer:
        raise ConnectionError("the head has gone")

    async def test(window: StoreWindow) -> None:
        one = await Asking.at(window)
        one.writer.write(to_frame(Count()))
        assert await one.is_ended()

    with_window(runtime, test, ask)


def test_values_that_are_too_large(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said, since the one who asks could not read them."""
    monkeypatch.setattr(store_window, "MOST_BYTES", 1 << 20)

    async def test(window: StoreWindow) -> None:
        one = await Asking.at(window)
        await one.ask(Set({"key": bytes(600_000)}))
        await one.ask(Append("key", bytes(600_000)))
        assert await one.ask(Get(("key",), 1.0)) == Refused("these values have more than 1 MiB")

    with_window(runtime, test)


def test_more_than_there_is_room_for(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are sent away; those that were there go on."""
    monkeypatch.setattr(store_window, "MOST_ASKING", 1)

    async def test(window: StoreWindow) -> None:
        one = await Asking.at(window)
        assert await one.ask(Count()) == 0
        assert await (await Asking.at(window)).is_ended()
        assert await one.ask(Count()) == 0

    with_window(runtime, test)
