"""Tests of `nbdist.agent.listener`: who is answered, when ranks are asked, who waits."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from nbdist.agent import listener
from nbdist.agent.listener import FRESH, MOST_CALLING, Listener
from nbdist.wire import views
from tests.waiting import SOON, until

INFO = views.WorldInfo("1.0", "vm", "default", "exp", 2, "busy", "x = 1", 1.5, 0, 2.5, guard=7)
ATTACH = views.Attach("1.0", 5, "notebook-5.sock")
RANK = views.WorkerStatus(0, 1, "here", "idle", 0.0, 0, "cpu")

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Lab:
    """A listener, what it was asked, and the connections to it."""

    def __init__(self, runtime: Path) -> None:
        self.path = runtime / views.DOOR
        self.looks = 0
        self.gone: list[int] = []
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.ranks: tuple[views.WorkerStatus, ...] = ()
        self.listener = Listener(runtime, self._look, self)
        self._ends: list[asyncio.StreamWriter] = []

    def describe(self) -> views.WorldInfo:
        return INFO

    async def admit(self, wanted: views.Attach) -> views.Accepted | views.Refused:
        if wanted.pid == 17:
            raise KeyError(17)
        return views.Accepted(1, 2) if wanted.version == "1.0" else views.Refused("no")

    def let_go_by(self, pid: int) -> None:
        self.gone.append(pid)

    async def _look(self, info: views.WorldInfo) -> views.WorldInfo:
        self.looks += 1
        await self.is_open.wait()
        return replace(info, at=float(self.looks), ranks=self.ranks)

    async def connect(self, said: views.Said | bytes = b"") -> Streams:
        """One more, that asks this."""
        reader, writer = await asyncio.open_unix_connection(self.path, limit=1 << 24)
        self._ends.append(writer)
        writer.write(said if isinstance(said, bytes) else views.to_line(said))
        return reader, writer

    async def ask(self, said: views.Said | bytes) -> views.Said | None:
        """The answer, None where there is none."""
        reader, _ = await self.connect(said)
        line = b""
        with suppress(ConnectionResetError):
            line = await reader.readline()
        return views.from_line(line) if line else None

    def run(self, test: Callable[[], Awaitable[None]]) -> None:
        async def whole() -> None:
            faults: list[object] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
            await self.listener.open()
            try:
                async with asyncio.timeout(SOON):
                    await test()
            finally:
                await self.listener.close()
                for end in self._ends:
                    end.close()
            assert faults == []

        asyncio.run(whole())


@pytest.fixture
def lab(runtime: Path) -> Lab:
    return Lab(runtime)


def test_all_who_look_see_the_same(lab: Lab) -> None:
    """However many do at a time, the ranks are asked once; and again later; never for the rest."""

    async def test() -> None:
        seen = await asyncio.gather(*(lab.ask(views.Look()) for _ in range(5)))
        assert seen == [replace(INFO, at=1.0)] * 5
        await asyncio.sleep(FRESH + 0.1)
        assert await lab.ask(views.Look()) == replace(INFO, at=2.0)
        assert await lab.ask(views.Describe()) == INFO
        assert lab.looks == 2

    lab.run(test)
    assert lab.gone == []


def test_a_notebook_that_is_accepted(lab: Lab) -> None:
    """Has the world until its connection ends; one that is refused never had it."""

    async def test() -> None:
        reader, writer = await lab.connect(ATTACH)
        assert views.from_line(await reader.readline()) == views.Accepted(1, 2)
        assert await lab.ask(replace(ATTACH, version="2.0", pid=6)) == views.Refused("no")
        await until(lambda: "1 call" in repr(lab.listener))
        assert lab.gone == []
        writer.close()
        await until(lambda: lab.gone == [5])

    lab.run(test)


@pytest.mark.parametrize(
    "said",
    [
        *(b"\n", b"hello\n", b"\x80\x04N.\n", b"[" * 50_000 + b"\n", b"x" * (1 << 17) + b"\n"),
        *(views.Refused("me"), replace(ATTACH, pid=17)),
    ],
    ids=["nothing", "text", "pickle", "deep", "long", "an answer", "a fault of ours"],
)
def test_what_is_no_question(lab: Lab, said: views.Said | bytes) -> None:
    """Ends the connection, and nothing else: the loop learns of nothing, the next is answered."""

    async def test() -> None:
        assert await lab.ask(said) is None
        assert await lab.ask(views.Describe()) == INFO
        assert "0 call" in repr(lab.listener)

    lab.run(test)


def test_no_kind_takes_the_place_of_another(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the silent, of which the first go, nor those who look at ranks that do not answer."""
    monkeypatch.setattr(listener, "LINE_TIMEOUT", SOON)

    async def test() -> None:
        lab.is_open.clear()
        looking = [asyncio.create_task(lab.ask(views.Look())) for _ in range(MOST_CALLING)]
        await until(lambda: f"{MOST_CALLING} call" in repr(lab.listener))
        silent = [await lab.connect() for _ in range(20 * MOST_CALLING)]
        assert await silent[0][0].read() == b""
        assert f"{2 * MOST_CALLING} call" in repr(lab.listener)
        assert await lab.ask(views.Look()) is None
        assert await lab.ask(views.Describe()) == INFO
        assert await lab.ask(ATTACH) == views.Accepted(1, 2)
        lab.is_open.set()
        assert await asyncio.gather(*looking) == [replace(INFO, at=1.0)] * MOST_CALLING
        silent[-1][1].write(views.to_line(views.Describe()))
        assert views.from_line(await silent[-1][0].readline()) == INFO

    lab.run(test)


def test_a_long_answer(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comes whole; what does not take it in is not waited for."""
    monkeypatch.setattr(listener, "FRESH", -1.0)

    async def test() -> None:
        for length in range(200_000, 800_000, 12_000):
            lab.ranks = (replace(RANK, last_line="x" * length),)
            info = await lab.ask(views.Look())
            assert isinstance(info, views.WorldInfo)
            assert info.ranks == lab.ranks
        monkeypatch.setattr(listener, "LINE_TIMEOUT", 0.2)
        with socket.socket(socket.AF_UNIX) as deaf:
            deaf.connect(str(lab.path))
            deaf.sendall(views.to_line(views.Look()))
            await until(lambda: "1 call" in repr(lab.listener))
            await until(lambda: "0 call" in repr(lab.listener))

    lab.run(test)


def test_a_part_of_a_world(runtime: Path) -> None:
    """It can be looked at and not be had."""
    lab = Lab(runtime)
    lab.listener = Listener(runtime, lab._look, None)

    async def test() -> None:
        for question in (views.Describe(), views.Look()):
            info = await lab.ask(question)
            assert isinstance(info, views.WorldInfo)
            assert (info.name, info.workers) == ("", 0)
        assert await lab.ask(ATTACH) is None

    lab.run(test)


@pytest.mark.world
@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to be somebody else")
def test_another_user_sees_nothing(lab: Lab) -> None:
    """Not even where the folder has been opened for all."""

    async def test() -> None:
        for path in (lab.path.parent, lab.path):
            os.chmod(path, 0o777)
        script = (
            "import os, socket, sys\n"
            "os.setuid(65534)\n"
            "s = socket.socket(socket.AF_UNIX); s.settimeout(10); s.connect(sys.argv[1])\n"
            "try:\n    s.sendall(sys.argv[2].encode()); print(s.recv(100))\n"
            "except OSError: print(b'')\n"
        )
        process = await asyncio.create_subprocess_exec(
            *("python3", "-S", "-c", script, str(lab.path), views.to_line(views.Look()).decode()),
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await process.communicate()
        assert said.strip() == b"b''"
        assert lab.looks == 0

    lab.run(test)


def test_where_no_socket_can_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A line in the log, and nothing else."""
    Lab(tmp_path / ("x" * 120)).run(lambda: asyncio.sleep(0))
    assert "cannot be opened" in caplog.text
