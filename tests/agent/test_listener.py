"""Tests of `nbdist.agent.listener`: connections are answered, bounded, and ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

from nbdist.agent.listener import Listener
from nbdist.wire.frames import BadFrame
from tests.waiting import until


class Echo(Listener):
    """Says what it is told."""

    async def answer_to(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            if line == b"bad\n":
                raise BadFrame
            if line == b"fault\n":
                raise KeyError(17)
            writer.write(line)
            await writer.drain()


def test_connections(runtime: Path) -> None:
    """Each is answered until it is bad, or we are; none is left, and the loop learns of nothing."""

    async def test() -> None:
        faults: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
        listener = Echo(runtime / "echo.sock", 100)
        await listener.open()
        ends = [await asyncio.open_unix_connection(runtime / "echo.sock") for _ in range(2)]
        for reader, writer in ends:
            writer.write(b"hello\n")
            assert await reader.readline() == b"hello\n"
        assert "2 call" in repr(listener)
        (reader, writer), (other, last) = ends
        writer.write(b"bad\n")
        assert await reader.read() == b""
        await until(lambda: len(listener) == 1)
        last.write(b"still\n")
        assert await other.readline() == b"still\n"
        third, asks = await asyncio.open_unix_connection(runtime / "echo.sock")
        asks.write(b"fault\n")
        assert await third.read() == b""
        asks.close()
        assert faults == []
        await listener.close()
        assert await other.read() == b""
        for _, writer in ends:
            writer.close()

    asyncio.run(test())


def test_where_there_can_be_no_socket(runtime: Path) -> None:
    """The rest of the world goes on."""

    async def test() -> None:
        listener = Echo(runtime / "missing" / "x.sock", 100)
        await listener.open()
        await listener.close()

    asyncio.run(test())
