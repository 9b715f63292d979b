"""Tests of `nbdist.agent.listener`: which queries are answered, and which clients wait.

Also the store's socket: operations of workers, and bytes that are no operation.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from nbdist.agent import listener
from nbdist.agent.listener import MAX_QUERY_CONNECTIONS, Listener, StoreWindow
from nbdist.wire import queries
from nbdist.wire.frames import FrameCutter, framed
from nbdist.wire.log_files import LogTail
from nbdist.wire.messages import GetSecrets, GetStacks, OfEachRank, RankSecrets
from nbdist.wire.places import RankPosition, Stack
from nbdist.wire.status import WorkerStatus
from nbdist.wire.store import (
    Add,
    Append,
    Count,
    Get,
    HostedStore,
    Operation,
    Set,
    StoreRefused,
    StoreReply,
    Wait,
    answer_from,
    to_frame,
)
from tests.waiting import SOON, until

ASKS = """
import os, socket, sys
os.setuid(65534)
s = socket.socket(socket.AF_UNIX); s.settimeout(10); s.connect(sys.argv[1])
try:
    s.sendall(sys.argv[2].encode()); print(s.recv(100))
except OSError: print(b'')
"""

INFO = queries.WorldInfo("1.0", "vm", "default", "exp", 2, "busy", "x = 1", 1.5, 0, 2.5, guard=7)
ATTACH = queries.Attach("1.0", 5, "notebook-5.sock")
RANK = WorkerStatus(0, 1, "here", "idle", 0.0, 0, "cpu")

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Lab:
    """A listener with a fake world that counts queries, and the connections of clients."""

    def __init__(self, runtime: Path, *, has_door: bool = True) -> None:
        self.path = runtime / queries.QUERY_SOCKET
        self.looks = 0
        self.gone: list[int] = []
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.admits = asyncio.Event()
        self.admits.set()
        self.rows: tuple[WorkerStatus, ...] = ()
        self.faults: list[object] = []
        self.tasks, self.ranks = queries.Inspection(), (0, 1)
        self.read: list[object] = []
        self.listener = Listener(runtime, self._look, self if has_door else None, self._read)
        self._ends: list[asyncio.StreamWriter] = []

    def describe(self) -> queries.WorldInfo:
        return INFO

    async def attach(self, wanted: queries.Attach) -> queries.Accepted | queries.AttachRefused:
        if wanted.pid == 17:
            raise KeyError(17)
        await self.admits.wait()
        return queries.Accepted(1, 2) if wanted.version == "1.0" else queries.AttachRefused("no")

    def attach_connection_closed(self, pid: int) -> None:
        self.gone.append(pid)

    async def _look(self, info: queries.WorldInfo) -> queries.WorldInfo:
        self.looks += 1
        await self.is_open.wait()
        return replace(info, at=float(self.looks), ranks=self.rows)

    async def _read(self, request: OfEachRank) -> tuple[Any, ...]:
        self.read.append(request)
        if isinstance(request, GetStacks):
            return tuple(Stack(rank, 1, "idle", RankPosition()) for rank in request.ranks)
        if isinstance(request, GetSecrets):
            return tuple(RankSecrets(rank, ("of all", str(rank))) for rank in request.ranks)
        return tuple(LogTail(rank, "stdout", "f", ("a" * 999,)) for rank in request.ranks)

    async def connect(self, said: queries.QueryMessage | bytes = b"") -> Streams:
        """Open another connection, and send a query or raw bytes."""
        reader, writer = await asyncio.open_unix_connection(self.path, limit=1 << 24)
        self._ends.append(writer)
        writer.write(said if isinstance(said, bytes) else queries.to_line(said))
        return reader, writer

    async def ask(self, said: queries.QueryMessage | bytes) -> queries.QueryMessage | None:
        """Return the answer to a query on a new connection, or None if the connection ends."""
        reader, _ = await self.connect(said)
        line = b""
        with suppress(ConnectionResetError):
            line = await reader.readline()
        return queries.from_line(line) if line else None

    async def open(self) -> None:
        handler = lambda _, fault: self.faults.append(fault)  # noqa: E731
        asyncio.get_running_loop().set_exception_handler(handler)
        await self.listener.open()

    async def close(self) -> None:
        await self.listener.close()
        for end in self._ends:
            end.close()
        assert self.faults == []


@pytest.fixture
def lab(request: pytest.FixtureRequest, runtime: Path, runner: asyncio.Runner) -> Iterator[Lab]:
    """A listener whose world a notebook can attach to, unless the test's parameter is False."""
    lab = Lab(runtime, has_door=getattr(request, "param", True))
    runner.run(lab.open())
    yield lab
    runner.run(lab.close())


async def test_assistants_get_stacks_logs_and_secrets(lab: Lab) -> None:
    """Queries give stacks and secrets of the named ranks, or of all, and logs of limited length.

    An assistant's server asks for secrets, which are the values that it must hide in texts.
    """
    found = await lab.ask(queries.InspectRanks("stacks", (1,)))
    assert isinstance(found, queries.Inspection)
    assert [each.rank for each in found.stacks] == [1]
    found = await lab.ask(queries.InspectRanks("logs", most=10**9))
    assert isinstance(found, queries.Inspection)
    assert found.logs == tuple(LogTail(rank, "stdout", "f", ("a" * 400,)) for rank in (0, 1))
    assert await lab.ask(queries.InspectRanks("logs", tuple(range(10_000)), 10**9))
    assert await lab.ask(queries.InspectRanks("tasks")) == queries.Inspection()
    found = await lab.ask(queries.InspectRanks("secrets"))
    assert isinstance(found, queries.Inspection)
    assert sorted(found.secrets) == ["0", "1", "of all"]
    one, *logs, secrets = lab.read
    assert secrets == GetSecrets((0, 1))
    assert one == GetStacks((1,))
    assert [(len(each[0]), each[2]) for each in logs] == [(2, 1000), (256, 15)]  # type: ignore[index]


async def test_a_notebook_has_the_world_until_it_disconnects(lab: Lab) -> None:
    """An accepted notebook has the world until it disconnects; a refused notebook never had it."""
    reader, writer = await lab.connect(ATTACH)
    assert queries.from_line(await reader.readline()) == queries.Accepted(1, 2)
    assert await lab.ask(replace(ATTACH, version="2.0", pid=6)) == queries.AttachRefused("no")
    await until(lambda: "1 connections" in repr(lab.listener))
    assert lab.gone == []
    writer.close()
    await until(lambda: lab.gone == [5])


async def test_a_notebook_that_leaves_early_has_no_world(lab: Lab) -> None:
    """A notebook that disconnects before it is accepted does not keep the world."""
    lab.admits.clear()
    _, writer = await lab.connect(ATTACH)
    await until(lambda: "1 connections" in repr(lab.listener))
    writer.close()
    lab.admits.set()
    await until(lambda: lab.gone == [5])


@pytest.mark.parametrize(
    "said",
    [
        *(b"\n", b"hello\n", b"\x80\x04N.\n", b"[" * 50_000 + b"\n", b"x" * (1 << 17) + b"\n"),
        *(queries.AttachRefused("me"), replace(ATTACH, pid=17)),
    ],
    ids=["nothing", "text", "pickle", "deep", "long", "an answer", "a fault of ours"],
)
async def test_bad_queries_harm_no_others(lab: Lab, said: queries.QueryMessage | bytes) -> None:
    """Bad bytes, or an error in an answer, end their connection; the next query is answered."""
    assert await lab.ask(said) is None
    assert await lab.ask(queries.Describe()) == INFO
    assert "0 connections" in repr(lab.listener)


async def test_silent_clients_and_slow_queries_block_no_others(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silent clients and slow queries block no other client; the oldest silent ones are closed."""
    monkeypatch.setattr(listener, "LINE_TIMEOUT", SOON)
    lab.is_open.clear()
    looking = [
        asyncio.create_task(lab.ask(queries.DescribeRanks())) for _ in range(MAX_QUERY_CONNECTIONS)
    ]
    await until(lambda: f"{MAX_QUERY_CONNECTIONS} connections" in repr(lab.listener))
    silent = [await lab.connect() for _ in range(20 * MAX_QUERY_CONNECTIONS)]
    assert await silent[0][0].read() == b""
    assert f"{2 * MAX_QUERY_CONNECTIONS} connections" in repr(lab.listener)
    assert await lab.ask(queries.DescribeRanks()) is None
    assert await lab.ask(queries.Describe()) == INFO
    assert await lab.ask(ATTACH) == queries.Accepted(1, 2)
    lab.is_open.set()
    seen = [replace(each, at=1.0) for each in await asyncio.gather(*looking)]
    assert seen == [replace(INFO, at=1.0)] * MAX_QUERY_CONNECTIONS
    silent[-1][1].write(queries.to_line(queries.Describe()))
    assert queries.from_line(await silent[-1][0].readline()) == INFO


async def test_a_long_answer_arrives_whole(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long answer arrives whole; a client that does not read the answer is disconnected."""
    for length in range(200_000, 800_000, 60_000):
        lab.rows = (replace(RANK, last_line="x" * length),)
        assert await lab.ask(queries.DescribeRanks()) == replace(
            INFO, at=float(lab.looks), ranks=lab.rows
        )
    monkeypatch.setattr(listener, "LINE_TIMEOUT", 0.2)
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.connect(str(lab.path))
        deaf.sendall(queries.to_line(queries.DescribeRanks()))
        await until(lambda: "1 connections" in repr(lab.listener))
        await until(lambda: "0 connections" in repr(lab.listener))


@pytest.mark.parametrize("lab", [False], indirect=True)
async def test_a_part_of_a_world_accepts_no_notebook(lab: Lab) -> None:
    """A part of a world answers queries, and no notebook can attach to it."""
    for question in (queries.Describe(), queries.DescribeRanks()):
        info = await lab.ask(question)
        assert (info.name, info.workers) == ("", 0)
    assert await lab.ask(ATTACH) is None


@pytest.mark.world
@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to be somebody else")
async def test_another_user_gets_no_answer(lab: Lab) -> None:
    """Another user gets no answer, even if the folder and the socket are open to everybody."""
    for path in (lab.path.parent, lab.path):
        os.chmod(path, 0o777)
    process = await asyncio.create_subprocess_exec(
        *(
            "python3",
            "-S",
            "-c",
            ASKS,
            str(lab.path),
            queries.to_line(queries.DescribeRanks()).decode(),
        ),
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await process.communicate()
    assert (said.strip(), lab.looks) == (b"b''", 0)


async def test_a_missing_socket_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the socket cannot be opened, the log has a line, and the agent goes on."""
    lab = Lab(tmp_path / ("x" * 120))
    await lab.open()
    await lab.close()
    assert "cannot be opened" in caplog.text


# --- the store's socket -------------------------------------------------------------------


class Asking:
    """The connection of a worker to the store's socket."""

    opened: ClassVar[list[Asking]] = []

    @classmethod
    async def at(cls, window: StoreWindow) -> Asking:
        asking = cls()
        asking.reader, asking.writer = await asyncio.open_unix_connection(window.path)
        cls.opened.append(asking)
        return asking

    async def ask(self, operation: Operation) -> StoreReply:
        self.writer.write(to_frame(operation))
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
    async def ask(self, operation: Operation) -> StoreReply:
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


async def test_a_worker_that_waits_blocks_no_other(window: StoreWindow, store: HostedStore) -> None:
    """While a worker waits, others are answered; the wait ends if the worker disconnects."""
    assert stat.S_IMODE(window.path.stat().st_mode) == 0o600
    one, other = await Asking.at(window), await Asking.at(window)
    waiting = asyncio.create_task(one.ask(Get(("key",), 10.0)))
    assert await other.ask(Add("count", 2)) == 2
    assert await other.ask(Set({"key": b"value"})) is None
    assert await waiting == (b"value",)
    assert repr(window).endswith("store.sock, 2 connections>")
    one.writer.write(to_frame(Wait(("other key",), 10.0)))
    await until(lambda: "1 wait" in repr(store))
    one.writer.close()
    await until(lambda: "0 wait" in repr(store))


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
async def test_bad_operations_harm_no_others(garbage: bytes, window: StoreWindow) -> None:
    """Bytes that are no operation end their connection, and other connections go on."""
    other, one = await Asking.at(window), await Asking.at(window)
    await other.ask(Set({"key": b"value"}))
    one.writer.write(garbage)
    assert await one.is_ended()
    assert await other.ask(Get(("key",), 1.0)) == (b"value",)
    assert repr(window).endswith(" 1 connections>")


async def test_a_removed_socket_is_created_again(window: StoreWindow) -> None:
    """`open` creates the socket again if it was removed; connected workers go on."""
    one = await Asking.at(window)
    assert await one.ask(Add("count", 1)) == 1
    window.path.unlink()
    await window.open()
    other = await Asking.at(window)
    assert [await each.ask(Add("count", 1)) for each in (one, other)] == [2, 3]
    before = window.path.stat().st_ino
    await window.open()
    assert window.path.stat().st_ino == before


@pytest.mark.parametrize("store", [LostStore], indirect=True)
async def test_a_lost_store_ends_the_asking_connection(window: StoreWindow) -> None:
    """If the store is lost, the connection of the worker that asks ends."""
    one = await Asking.at(window)
    one.writer.write(to_frame(Count()))
    assert await one.is_ended()


async def test_values_and_connections_of_a_store_are_limited(
    monkeypatch: pytest.MonkeyPatch, window: StoreWindow
) -> None:
    """Values above the limit are refused; a connection above the limit ends, others go on."""
    monkeypatch.setattr(listener, "MAX_STORE_BYTES", 1 << 20)
    monkeypatch.setattr(listener, "MAX_STORE_CONNECTIONS", 1)
    one = await Asking.at(window)
    await one.ask(Set({"key": bytes(600_000)}))
    await one.ask(Append("key", bytes(600_000)))
    assert await one.ask(Get(("key",), 1.0)) == StoreRefused("these values have more than 1 MiB")
    assert await (await Asking.at(window)).is_ended()
    assert await one.ask(Count()) == 1
