"""Tests of `nbdist.agent.window`: who may look, how often, and that nobody can do more."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from nbdist.agent.listener import MOST_CALLING
from nbdist.agent.window import FRESH, Window
from nbdist.wire.door import LOOK, WINDOW, WorldSeen, seen_from
from nbdist.wire.frames import FrameCutter

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: it holds a socket."""
    with TemporaryDirectory(prefix="nbt-w-", dir="/tmp") as found:
        yield Path(found)


class Lab:
    """A window, and what has looked through it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / WINDOW
        self.looks = 0
        self.window = Window(folder, self._look)

    async def _look(self) -> WorldSeen:
        self.looks += 1
        return WorldSeen("here", 1, "", float(self.looks))

    async def connect(self) -> Streams:
        return await asyncio.open_unix_connection(self.path)

    def run(self, test: Callable[[Lab], Awaitable[None]]) -> None:
        async def whole() -> None:
            await self.window.open()
            try:
                async with asyncio.timeout(20):
                    await test(self)
            finally:
                await self.window.close()

        asyncio.run(whole())


async def look(streams: Streams) -> WorldSeen:
    """Ask once."""
    reader, writer = streams
    writer.write(LOOK)
    cutter = FrameCutter()
    while data := await reader.read(65536):
        for frame in cutter.feed(data):
            return seen_from(frame)
    raise ConnectionResetError


async def is_sent_away(streams: Streams) -> bool:
    """Whether the other side ends the connection without an answer."""
    reader, writer = streams
    try:
        return await reader.read() == b""
    except ConnectionResetError:
        return True
    finally:
        writer.close()


def test_all_who_look_see_the_same(folder: Path) -> None:
    """However many do at a time, the workers are asked once; and again later."""

    async def test(lab: Lab) -> None:
        streams = [await lab.connect() for _ in range(5)]
        seen = await asyncio.gather(*map(look, streams))
        assert [each.at for each in seen] == [1.0] * 5
        await asyncio.sleep(FRESH + 0.1)
        assert (await look(streams[0])).at == 2.0
        for _, writer in streams:
            writer.close()

    Lab(folder).run(test)


@pytest.mark.parametrize(
    "said", [b"\n", b"stop\n", LOOK * 3 + b"x\n", b"x" * 100_000, b"\x80\x04N.\n"]
)
def test_what_asks_otherwise_is_sent_away(folder: Path, said: bytes) -> None:
    """Whatever it sends; others go on looking."""

    async def test(lab: Lab) -> None:
        good, (reader, writer) = await lab.connect(), await lab.connect()
        writer.write(said)
        answered = 0
        while data := await reader.read(65536):
            answered += len(data)
        assert (answered > 0) == said.startswith(LOOK)
        writer.close()
        assert (await look(good)).host == "here"
        good[1].close()

    Lab(folder).run(test)


def test_who_comes_when_there_are_many(folder: Path) -> None:
    """Is sent away at once, and has a place when another leaves."""

    async def test(lab: Lab) -> None:
        many = [await lab.connect() for _ in range(MOST_CALLING)]
        await asyncio.gather(*map(look, many))
        assert await is_sent_away(await lab.connect())
        many.pop()[1].close()
        while True:
            try:
                (streams := await lab.connect())[1].write(LOOK)
                await look(streams)
                break
            except ConnectionResetError:
                streams[1].close()
        for _, writer in (*many, streams):
            writer.close()

    Lab(folder).run(test)


@pytest.mark.world
@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to be somebody else")
def test_another_user_sees_nothing(folder: Path) -> None:
    """Not even where the folder has been opened for all."""

    async def test(lab: Lab) -> None:
        for path in (folder, lab.path):
            os.chmod(path, 0o777)
        script = (
            "import os, socket, sys\n"
            "os.setuid(65534)\n"
            "s = socket.socket(socket.AF_UNIX); s.settimeout(10); s.connect(sys.argv[1])\n"
            "try:\n    s.sendall(b'look\\n'); print(s.recv(100))\n"
            "except OSError: print(b'')\n"
        )
        process = await asyncio.create_subprocess_exec(
            *("python3", "-S", "-c", script, str(lab.path)), stdout=asyncio.subprocess.PIPE
        )
        said, _ = await process.communicate()
        assert said.strip() == b"b''"
        assert lab.looks == 0

    Lab(folder).run(test)


def test_where_no_socket_can_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A line in the log, and nothing else."""
    lab = Lab(tmp_path / ("x" * 120))
    lab.run(lambda lab: asyncio.sleep(0))
    assert "cannot be opened" in caplog.text
