"""Tests of `nbdist.worker.main`: how a worker begins and ends, and tasks in turn between."""

from __future__ import annotations

import asyncio
import pickle
import signal
import socket
import threading
import time
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
from tests.waiting import SOON, until
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world(2)

LAST = """
import atexit, ctypes
from pathlib import Path

libc = ctypes.CDLL(None)
libc.fopen.restype, libc.fputs.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_void_p)

def last():
    Path(f"{folder}/{rank}.txt").write_text(f"in a group: {dist.is_initialized()}")
    libc.fputs(b"not flushed", libc.fopen(f"{folder}/{rank}.c".encode(), b"w"))

_ = atexit.register(last)
"""


@pytest.mark.parametrize("backend", ["gloo", "none"])
def test_exit_handlers_run(new_world: NewWorld, tmp_path: Path, backend: str) -> None:
    """After the group has been left, also one that user code has made; C code's output too."""
    with new_world(2, backend=backend) as world:
        world.execute(f"folder = {str(tmp_path)!r}\n{LAST}")
        if backend == "none":
            world.execute("dist.init_process_group('gloo')")
        world.execute("dist.all_reduce(torch.ones(1))")
    for rank in range(2):
        assert (tmp_path / f"{rank}.txt").read_text() == "in a group: False"
        assert (tmp_path / f"{rank}.c").read_text() == "not flushed"


def test_nobody_sits_at_a_terminal(new_world: NewWorld) -> None:
    """Libraries that look for a prompt find none, and nobody is told how to leave."""
    with new_world(1) as world:
        world.execute("import sys, warnings")
        assert world.gather("[hasattr(sys, name) for name in ('ps1', 'ps2')]") == [[False, False]]
        running = world.submit(world.task("warnings.warn('To exit: use quit', stacklevel=1)"))
        world.session.wait(running)
        assert running.transcript[0].line_count == 0


TYPING_SECONDS = 2.5

DRAW = """
import multiprocessing.process, os, random, tempfile
import numpy

drawn = {
    "seed": torch.initial_seed(),
    "torch": torch.randn(3).tolist(),
    "random": random.random(),
    "numpy": numpy.random.rand(),
    "name": next(tempfile._get_candidate_names()),
    "key": multiprocessing.process.current_process().authkey.hex(),
}
torch_was_ready_for_gpus = torch.cuda.is_initialized()
"""


def draws(world: World) -> list[dict[str, object]]:
    """What each rank draws first, from every source of chance."""
    assert not world.execute(DRAW).errors
    assert not any(world.gather("torch_was_ready_for_gpus"))
    return world.gather("drawn")


def assert_all_different(drawn: list[dict[str, object]]) -> None:
    """No two draws have anything in common."""
    for source in drawn[0]:
        values = [str(each[source]) for each in drawn]
        assert len(set(values)) == len(values), (source, values)


def test_chance_is_every_workers_own(new_world: NewWorld) -> None:
    """No rank repeats what another draws, nor one after a restart, replaced, or added."""
    with new_world(2, fork=False) as spawned:
        assert_all_different(draws(spawned))
    with new_world(2) as world:
        drawn = draws(world)
        world.restart()
        drawn += draws(world)
        world.replace([1])
        drawn.append(draws(world)[1])
        world.scale(3)
        drawn.append(draws(world)[2])
    assert_all_different(drawn)


@pytest.fixture(scope="module")
def warm(new_world: NewWorld) -> Iterator[World]:
    """A world whose fork server has imported all that it does while it is idle."""
    with new_world(2) as world:
        deadline, typing = time.monotonic() + SOON, TYPING_SECONDS
        while not all(_has_all_for_training(world)):
            assert time.monotonic() < deadline
            time.sleep(typing)  # nothing is imported while workers start
            typing *= 2
            world.restart()
        yield world


def test_first_step_needs_no_imports(warm: World) -> None:
    """A restart some time later brings what a training imports."""
    assert not warm.execute(STEP).errors
    assert warm.gather("new") == [[], []]


def test_chance_when_all_is_imported(warm: World) -> None:
    """What was imported meanwhile, numpy's generator for one, draws differently everywhere."""
    warm.restart()
    drawn = draws(warm)
    warm.restart()
    assert_all_different(drawn + draws(warm))


def test_variables_of_torch_that_are_set_later(
    warm: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch reads on import counts, also when it has been imported long ago."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    warm.restart()
    warm.execute("from torch._dynamo import config; disabled = config.disable")
    assert warm.gather("disabled") == [True, True]


def test_folders_that_are_set_later(
    warm: World, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """TMPDIR counts, and torch's cache, which does not keep workers from being forked."""
    own, cache = (str(tmp_path_factory.mktemp(name)) for name in ("own", "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", cache)
    monkeypatch.setenv("TMPDIR", own)
    warm.restart()
    assert all(_has_all_for_training(warm))
    warm.execute("import tempfile")
    warm.execute("from torch._inductor.runtime.cache_dir_utils import cache_dir")
    assert warm.gather("cache_dir(), tempfile.gettempdir()") == [(cache, own)] * 2


def _has_all_for_training(world: World) -> list[bool]:
    world.execute("import sys; has_all = 'torch.utils.serialization' in sys.modules")
    return world.gather("has_all")


STEP = """
import sys
before = set(sys.modules)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

def step(wrap):
    model = wrap(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()

step(DistributedDataParallel)
step(fully_shard)
new = sorted(set(sys.modules) - before)
"""


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
