"""Tests of `nbdist.worker.main`: tasks are done in turn, each once, and their end is said."""

from __future__ import annotations

import asyncio
import pickle
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from nbdist.output.events import Done
from nbdist.wire.frames import FrameCutter, framed, pack
from nbdist.wire.work import CatchUp, Finished, InputReply, Source, Task
from nbdist.worker.main import Tasks
from nbdist.worker.process import Interrupts
from nbdist.world.world import World
from tests.waiting import until

pytestmark = pytest.mark.shared_world(2)


class Kernel:
    """Does what a test says with each task; its marks are counted."""

    def __init__(self, work: Callable[[str], Done]) -> None:
        self._work = work
        self.begun: list[str] = []
        self.marks = 0

    async def run(self, task: Task, interrupts: Interrupts) -> Done:
        interrupts.begin()
        self.begun.append(task.id)
        await asyncio.sleep(0)
        done = self._work(task.source)
        interrupts.end()
        return done

    def place(self) -> int:
        """As a session has it."""
        self.marks += 1
        return self.marks


class Agent:
    """The other end of the socket."""

    def __init__(self, path: str) -> None:
        self.end = socket.socket(socket.AF_UNIX)
        self.end.connect(path)
        self._cutter = FrameCutter()

    async def hear(self, number: int) -> list[Finished]:
        """So many ends of tasks."""
        loop, found = asyncio.get_running_loop(), list[Finished]()
        self.end.settimeout(0)
        async with asyncio.timeout(10):
            while len(found) < number:
                data = await loop.sock_recv(self.end, 1 << 16)
                found += [pickle.loads(frame) for frame in self._cutter.feed(data)]
        return found


Work = Callable[[str], Done]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[..., Kernel]]:
    """Runs a test with an agent, on a loop that serves its tasks."""
    before = signal.getsignal(signal.SIGINT)

    def serve(
        work: Callable[[str], Done], test: Callable[[Agent, Tasks], Awaitable[None]]
    ) -> Kernel:
        kernel: Any = Kernel(work)

        async def main() -> None:
            path = str(tmp_path / "tasks")
            tasks = Tasks(path, kernel, kernel)
            agent = Agent(path)
            try:
                await test(agent, tasks)
            finally:
                tasks.close()
                agent.end.close()

        asyncio.run(main())
        return kernel

    yield serve
    signal.signal(signal.SIGINT, before)


def task(name: str) -> bytes:
    return framed(pack(Task(name, (0,), Source(name))))


def done(_: str) -> Done:
    return Done("ok", 0.5)


def test_in_turn(served: Callable[..., Kernel]) -> None:
    """In whatever pieces they come; each end has its place among the rank's messages."""

    async def test(agent: Agent, tasks: Tasks) -> None:
        stream = b"".join(map(task, "abcd"))
        agent.end.sendall(stream[:-9])
        first = await agent.hear(3)
        assert repr(tasks) == "<Tasks 0 waiting>"
        agent.end.sendall(stream[-9:])
        ends = [*first, *await agent.hear(1)]
        assert ends == [Finished(n, name, Done("ok", 0.5)) for n, name in enumerate("abcd", 1)]

    assert served(done, test).begun == [*"abcd"]


VARIABLE: ContextVar[str] = ContextVar("VARIABLE", default="unset")


def test_one_context_for_all(served: Callable[..., Kernel]) -> None:
    """What a cell sets in it is there for the next."""
    found = []

    def work(source: str) -> Done:
        found.append(VARIABLE.get())
        VARIABLE.set(source)
        return done(source)

    async def test(agent: Agent, _: Tasks) -> None:
        agent.end.sendall(task("a") + task("b"))
        await agent.hear(2)

    served(work, test)
    assert found == ["unset", "a"]


def test_a_second_stop(served: Callable[..., Kernel]) -> None:
    """One that comes while the first is reported ends that task, and no more."""

    def work(source: str) -> Done:
        if source == "a":
            signal.raise_signal(signal.SIGINT)
        return done(source)

    async def test(agent: Agent, tasks: Tasks) -> None:
        agent.end.sendall(task("a"))
        (end,) = await agent.hear(1)
        assert (end.task_id, end.done) == ("a", Done("error", 0.0))
        signal.raise_signal(signal.SIGINT)
        for _ in range(3):  # turns of the loop, in which a task would be read
            await asyncio.sleep(0)
        agent.end.sendall(task("b"))
        assert [each.done.status for each in await agent.hear(1)] == ["ok"]

    served(work, test)


def test_the_agent_closes_its_end(served: Callable[..., Kernel]) -> None:
    """What it has sent is done; nothing more is read, and the loop has nothing to do."""

    async def test(agent: Agent, tasks: Tasks) -> None:
        agent.end.sendall(task("a"))
        agent.end.shutdown(socket.SHUT_WR)
        assert len(await agent.hear(1)) == 1
        watched = asyncio.get_running_loop()._selector.get_map()  # type: ignore[attr-defined]
        await until(lambda: len(watched) == 1, "only the loop's own end is watched")
        assert repr(tasks) == "<Tasks 0 waiting>"

    assert served(done, test).begun == ["a"]


def test_what_somebody_types(served: Callable[..., Kernel]) -> None:
    """It comes by the same socket while the task runs, between tasks that wait their turn."""
    replies: list[InputReply] = []

    async def test(agent: Agent, tasks: Tasks) -> None:
        def ask() -> None:
            replies.append(tasks.ask("> ", secret=False, by_debugger=True))

        agent.end.sendall(task("first"))
        await agent.hear(1)
        asking = [threading.Thread(target=ask) for _ in range(2)]
        for each in asking:
            each.start()
        requests = await agent.hear(2)
        assert {request.number for request in requests} == {2, 3}
        stream = b"".join(framed(pack(InputReply(number, str(number)))) for number in (9, 3, 2))
        agent.end.sendall(stream[:-7])
        agent.end.sendall(stream[-7:] + task("second"))
        await until(lambda: not any(map(threading.Thread.is_alive, asking)))
        await agent.hear(1)

    assert served(done, test).begun == ["first", "second"]
    assert sorted(reply.text or "" for reply in replies) == ["2", "3"]


def test_catching_up(served: Callable[..., Kernel]) -> None:
    """A thread that has shown much goes on when the agent says so, or has ended."""

    async def test(agent: Agent, tasks: Tasks) -> None:
        tasks.catch_up()  # there is no connection yet: nobody could answer
        agent.end.sendall(task("first"))
        await agent.hear(1)
        for end in (framed(pack(InputReply(2))), b""):
            waiting = threading.Thread(target=tasks.catch_up)
            waiting.start()
            (asked,) = await agent.hear(1)
            assert isinstance(asked, CatchUp)
            assert waiting.is_alive()
            agent.end.sendall(end) if end else agent.end.shutdown(socket.SHUT_WR)
            await asyncio.to_thread(waiting.join, 10)
            assert not waiting.is_alive()

    served(done, test)


def test_a_forked_child_that_comes_to_the_end_of_the_cell(world: World) -> None:
    """It ends there: the cell ends once, and the next one runs in the worker itself."""
    forked = "import os\nbefore = os.getpid()\nchild = os.fork()\nif child: os.waitpid(child, 0)"
    for _ in range(3):
        world.execute(forked)
        assert world.gather("os.getpid() == before") == [True, True]
