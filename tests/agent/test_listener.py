"""Tests of `nbdist.agent.listener`: connections are answered, bounded, and ended.

Who is answered at the door, and when a notebook has let go; who may look through the window, how
often, and that nobody can do more.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from nbdist.agent.listener import FRESH, MOST_CALLING, Door, Listener, Window
from nbdist.wire.door import (
    DOOR,
    LOOK,
    WINDOW,
    Admitted,
    Attach,
    Held,
    Refused,
    Said,
    Who,
    WorldSeen,
    from_line,
    seen_from,
    to_line,
)
from nbdist.wire.frames import BadFrame, FrameCutter
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


HELD = Held("1.0", "vm", "default", "exp", 2, "busy", "x = 1", 1.5, 0, 2.5, detach=True, guard=7)


class DoorLab:
    """A door, and what has come through it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / DOOR
        self.gone: list[int] = []
        self.door = Door(folder, lambda: HELD, self._admit, self.gone.append)

    async def _admit(self, wanted: Attach) -> Admitted | Refused:
        return Admitted(1, 2) if wanted.version == "1.0" else Refused("no")

    async def ask(self, said: bytes) -> tuple[Said | None, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(self.path)
        writer.write(said)
        async with asyncio.timeout(20):
            line = await reader.readline()
        return (from_line(line) if line else None), writer

    def run(self, test: Callable[[], Awaitable[None]]) -> None:
        async def whole() -> None:
            await self.door.open()
            try:
                await test()
            finally:
                await self.door.close()

        asyncio.run(whole())


def test_who(runtime: Path) -> None:
    """Anybody of this user may ask whose it is."""
    lab = DoorLab(runtime)

    async def test() -> None:
        answer, writer = await lab.ask(to_line(Who()))
        assert answer == HELD
        writer.close()

    lab.run(test)
    assert lab.gone == []


def test_a_notebook_that_is_admitted(runtime: Path) -> None:
    """Has the world until its connection ends; one that is refused never had it."""
    lab = DoorLab(runtime)

    async def test() -> None:
        answer, writer = await lab.ask(to_line(Attach("1.0", 5, "notebook-5.sock")))
        assert answer == Admitted(1, 2)
        refused, other = await lab.ask(to_line(Attach("2.0", 6, "notebook-6.sock")))
        assert refused == Refused("no")
        other.close()
        assert "1 ask" in repr(lab.door)
        assert lab.gone == []
        writer.close()
        await until(lambda: lab.gone == [5])

    lab.run(test)
    assert lab.gone == [5]


@pytest.mark.parametrize("said", [b"hello\n", to_line(Refused("me")), b"x" * (1 << 17) + b"\n"])
def test_what_is_no_question(runtime: Path, said: bytes) -> None:
    """Ends the connection, and the next one is answered."""
    lab = DoorLab(runtime)

    async def test() -> None:
        try:
            answer, writer = await lab.ask(said)
        except OSError:
            pass
        else:
            assert answer is None
            writer.close()
        answer, writer = await lab.ask(to_line(Who()))
        assert answer == HELD
        writer.close()

    lab.run(test)


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: it holds a socket."""
    with TemporaryDirectory(prefix="nbt-w-", dir="/tmp") as found:
        yield Path(found)


class WindowLab:
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

    def run(self, test: Callable[[WindowLab], Awaitable[None]]) -> None:
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

    async def test(lab: WindowLab) -> None:
        streams = [await lab.connect() for _ in range(5)]
        seen = await asyncio.gather(*map(look, streams))
        assert [each.at for each in seen] == [1.0] * 5
        await asyncio.sleep(FRESH + 0.1)
        assert (await look(streams[0])).at == 2.0
        for _, writer in streams:
            writer.close()

    WindowLab(folder).run(test)


@pytest.mark.parametrize(
    "said", [b"\n", b"stop\n", LOOK * 3 + b"x\n", b"x" * 100_000, b"\x80\x04N.\n"]
)
def test_what_asks_otherwise_is_sent_away(folder: Path, said: bytes) -> None:
    """Whatever it sends; others go on looking."""

    async def test(lab: WindowLab) -> None:
        good, (reader, writer) = await lab.connect(), await lab.connect()
        writer.write(said)
        answered = 0
        while data := await reader.read(65536):
            answered += len(data)
        assert (answered > 0) == said.startswith(LOOK)
        writer.close()
        assert (await look(good)).host == "here"
        good[1].close()

    WindowLab(folder).run(test)


def test_who_comes_when_there_are_many(folder: Path) -> None:
    """Is sent away at once, and has a place when another leaves."""

    async def test(lab: WindowLab) -> None:
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

    WindowLab(folder).run(test)


@pytest.mark.world
@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to be somebody else")
def test_another_user_sees_nothing(folder: Path) -> None:
    """Not even where the folder has been opened for all."""

    async def test(lab: WindowLab) -> None:
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

    WindowLab(folder).run(test)


def test_where_no_socket_can_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A line in the log, and nothing else."""
    lab = WindowLab(tmp_path / ("x" * 120))
    lab.run(lambda lab: asyncio.sleep(0))
    assert "cannot be opened" in caplog.text
