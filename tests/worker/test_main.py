"""Tests of `nbdist.worker.main`: a worker begins, runs tasks in turn, and ends."""

from __future__ import annotations

import asyncio
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nbdist.output.events import Comm, Done
from nbdist.wire.frames import FrameCutter, framed, pack
from nbdist.wire.work import CatchUp, CellCode, Finished, InputReply, SigintSent, Task
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


JOIN = (
    "dist.init_process_group('gloo', init_method='file://{path}', rank=rank, world_size=world_size)"
)
FIRST = "dist.init_process_group('gloo')"
UNWATCHED = "in this group are neither shown nor released"


@pytest.mark.parametrize("backend", ["gloo", "none"])
def test_exit_handlers_run_without_group(new_world: NewWorld, tmp_path: Path, backend: str) -> None:
    """Exit handlers run when a worker has no group any more, and C code's files are flushed.

    Groups that user code has formed have ended too. Only the first such group gets a line which
    says that nbdist does not watch it.
    """
    with new_world(2, backend=backend) as world:
        world.execute(f"folder = {str(tmp_path)!r}\n{LAST}")
        if backend == "none":
            # With the environment's address rank 1 could still reach the first group's store.
            elsewhere = JOIN.format(path=tmp_path / "meet")
            cells = f"{FIRST}; dist.barrier(); dist.destroy_process_group()", elsewhere
            for cell, said in zip(cells, (1, 0), strict=True):
                result = world.execute(cell)
                assert [text.count(UNWATCHED) for text in result.stdout.values()] == [said, said]
        world.execute("dist.all_reduce(torch.ones(1))")
    for rank in range(2):
        assert (tmp_path / f"{rank}.txt").read_text() == "in a group: False"
        assert (tmp_path / f"{rank}.c").read_text() == "not flushed"


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
    """Return the first random values of each rank, from every source."""
    assert not world.execute(DRAW).errors
    assert not any(world.gather("torch_was_ready_for_gpus"))
    return world.gather("drawn")


def assert_all_different(drawn: list[dict[str, object]]) -> None:
    """Assert that no value occurs in two draws."""
    for source in drawn[0]:
        values = [str(each[source]) for each in drawn]
        assert len(set(values)) == len(values), (source, values)


def test_each_worker_draws_its_own_random_values(new_world: NewWorld) -> None:
    """No two workers draw the same value, also after a restart, a replacement and scaling."""
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
    """A world whose fork server has finished the imports that it makes while it is idle."""
    with new_world(2) as world:
        deadline, typing = time.monotonic() + SOON, 2.5
        while not all(_has_all_for_training(world)):
            assert time.monotonic() < deadline
            time.sleep(typing)  # nothing is imported while workers start
            typing *= 2
            world.restart()
        yield world


def test_a_first_training_step_needs_no_imports(warm: World) -> None:
    """A worker from an idle fork server has imported everything that a first training step uses."""
    assert not warm.execute(STEP).errors
    assert warm.gather("new") == [[], []]


def test_new_workers_follow_variables_that_were_set_later(
    warm: World, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Forked workers use the present TMPDIR, and the present variables that torch reads on import.

    The workers still draw different random numbers.
    """
    own, cache = (str(tmp_path_factory.mktemp(name)) for name in ("own", "cache"))
    drawn = draws(warm)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    warm.restart()
    warm.execute("from torch._dynamo import config; disabled = config.disable")
    assert warm.gather("disabled") == [True, True]
    monkeypatch.delenv("TORCH_COMPILE_DISABLE")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", cache)
    monkeypatch.setenv("TMPDIR", own)
    warm.restart()
    assert all(_has_all_for_training(warm))
    assert_all_different(drawn + draws(warm))
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


OK = Done("ok", 0.5)
VARIABLE: ContextVar[str] = ContextVar("VARIABLE", default="unset")


class Kernel:
    """A stand-in for the kernel, which calls `work` for each task and counts marks."""

    def __init__(self) -> None:
        self.work: Callable[[str], object] = str
        self.begun: list[str] = []
        self.marks = self.stops = 0

    def stop(self) -> None:
        self.stops += 1

    def handle_comm(self, comm: Comm) -> None:
        self.begun.append(comm.id)

    async def run(self, task: Task, interrupts: Interrupts) -> Done:
        interrupts.begin()
        self.begun.append(task.id)
        await asyncio.sleep(0)
        self.work(task.source)
        interrupts.end()
        return OK

    def mark_place(self) -> int:
        self.marks += 1
        return self.marks


class Agent:
    """The agent's end of the socket, with the worker's end and its kernel."""

    def __init__(self, path: str) -> None:
        self.kernel: Any = Kernel()
        self.requests: list[socket.socket] = []
        self.tasks = Tasks(path, self.kernel, self.kernel, self)  # type: ignore[arg-type]
        self.end = socket.socket(socket.AF_UNIX)
        self.end.connect(path)
        self.end.settimeout(0)
        self._cutter = FrameCutter()

    def serve(self, connection: socket.socket) -> None:
        """Record a connection that the control thread would get."""
        self.requests.append(connection)

    async def hear(self, number: int) -> list[Any]:
        """Receive this number of messages from the worker."""
        loop, found = asyncio.get_running_loop(), list[Any]()
        while len(found) < number:
            data = await loop.sock_recv(self.end, 1 << 16)
            found += [pickle.loads(frame) for frame in self._cutter.feed(data)]
        return found


@pytest.fixture
def agent(tmp_path: Path, runner: asyncio.Runner) -> Iterator[Agent]:
    async def made() -> Agent:
        agent = Agent(str(tmp_path / "tasks"))
        agent.tasks.catch_up()  # returns at once: the worker has not accepted the connection
        return agent

    before = signal.getsignal(signal.SIGINT)
    agent = runner.run(made())
    yield agent
    agent.tasks.close()
    agent.end.close()
    signal.signal(signal.SIGINT, before)


def task(name: str) -> bytes:
    return framed(pack(Task(name, (0,), CellCode(name))))


async def test_a_second_stop_ends_only_its_task(agent: Agent) -> None:
    """A KeyboardInterrupt that leaves the kernel ends the task; a SIGINT after that ends none."""
    agent.kernel.work = lambda source: source == "a" and signal.raise_signal(signal.SIGINT)
    agent.end.sendall(task("a"))
    (end,) = await agent.hear(1)
    assert (end.task_id, replace(end.done, failure=None)) == ("a", Done("error", 0.0))
    assert end.done.failure.name == "KeyboardInterrupt"
    signal.raise_signal(signal.SIGINT)
    for _ in range(3):  # turns of the loop, in which a task would be read
        await asyncio.sleep(0)
    agent.end.sendall(task("b"))
    assert [each.done.status for each in await agent.hear(1)] == ["ok"]


async def test_tasks_run_in_turn_in_one_context(agent: Agent) -> None:
    """Tasks run in turn and in one `contextvars` context until the agent closes its end.

    It makes no difference whether tasks arrive together or in pieces.
    """
    found = []

    def work(source: str) -> None:
        found.append(VARIABLE.get())
        VARIABLE.set(source)

    agent.kernel.work = work
    stream = b"".join(map(task, "abcd"))
    agent.end.sendall(stream[:-9])
    ends = await agent.hear(3)
    agent.end.sendall(stream[-9:])
    agent.end.shutdown(socket.SHUT_WR)
    ends += await agent.hear(1)
    assert ends == [Finished(n, name, OK) for n, name in enumerate("abcd", 1)]
    watched = asyncio.get_running_loop()._selector.get_map()  # type: ignore[attr-defined]
    await until(lambda: len(watched) == 2, "only the loop's own end and the listener are watched")
    assert agent.kernel.stops == 1
    assert agent.kernel.begun == [*"abcd"]
    assert found == ["unset", *"abc"]


def said(name: str) -> bytes:
    return framed(pack(Comm("comm_msg", name, {}, {})))


async def test_messages_of_widgets_are_handled_in_turn(agent: Agent) -> None:
    """Messages of widgets are handled before a task that is sent later, and while a task awaits."""
    agent.end.sendall(said("moved") + task("a") + said("moved again") + task("b"))
    await agent.hear(2)
    assert agent.kernel.begun == ["moved", "a", "moved again", "b"]
    agent.end.sendall(said("idle"))
    await until(lambda: agent.kernel.begun[4:] == ["idle"], "heard while no task runs")
    run, go_on = agent.kernel.run, asyncio.Event()

    async def waits(*given: Any) -> Done:
        await go_on.wait()
        return await run(*given)

    agent.kernel.run = waits
    agent.end.sendall(task("c") + said("meanwhile") + task("d") + said("later"))
    await until(lambda: agent.kernel.begun[5:] == ["meanwhile"], "heard while a task waits")
    go_on.set()
    await agent.hear(2)
    await until(lambda: agent.kernel.begun[6:] == ["c", "d", "later"], "in turn")


async def test_a_stop_between_tasks_ends_no_later_task(agent: Agent) -> None:
    """A SIGINT that arrives with a widget's message between tasks does not end the next task."""
    agent.end.sendall(task("a"))
    await agent.hear(1)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        signal.raise_signal(signal.SIGINT)  # stays pending until the worker reads `SigintSent`
        agent.end.sendall(said("moved") + framed(pack(SigintSent())))
        await until(lambda: agent.kernel.begun[1:] == ["moved"], "heard")
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    agent.end.sendall(task("b"))
    assert [each.done.status for each in await agent.hear(1)] == ["ok"]


async def test_each_connection_after_the_first_is_for_requests(agent: Agent) -> None:
    """The first connection is for tasks; the control thread gets the second connection."""
    agent.end.sendall(task("a"))
    await agent.hear(1)
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(agent.end.getpeername())
        await until(lambda: len(agent.requests) == 1, "the control thread has got it")
        agent.requests[0].close()


async def test_replies_reach_the_threads_that_asked(agent: Agent) -> None:
    """Replies come by the socket for tasks, and each thread that asked gets its own reply."""
    replies: list[InputReply] = []

    def ask() -> None:
        replies.append(agent.tasks.ask("> ", secret=False, by_debugger=True))

    agent.end.sendall(task("first"))
    await agent.hear(1)
    asking = [threading.Thread(target=ask) for _ in range(2)]
    for each in asking:
        each.start()
    assert {request.number for request in await agent.hear(2)} == {2, 3}
    stream = b"".join(framed(pack(InputReply(number, str(number)))) for number in (9, 3, 2))
    agent.end.sendall(stream[:-7])
    agent.end.sendall(stream[-7:] + task("second"))
    await until(lambda: not any(map(threading.Thread.is_alive, asking)))
    await agent.hear(1)
    assert agent.kernel.begun == ["first", "second"]
    assert sorted(reply.text or "" for reply in replies) == ["2", "3"]


async def test_messages_of_several_threads_arrive_whole(agent: Agent) -> None:
    """Each message arrives whole, however large: the agent drops a worker whose messages mix."""
    agent.end.sendall(task("first"))
    await agent.hear(1)
    prompts = [letter * 8_000_000 for letter in "abcd"]
    place, all_are_here = agent.kernel.mark_place, threading.Barrier(len(prompts))

    def place_with_others() -> int:
        all_are_here.wait(SOON)
        return int(place())

    def ask(prompt: str) -> None:
        agent.tasks.ask(prompt, secret=False, by_debugger=False)

    agent.kernel.mark_place = place_with_others
    asking = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for each in asking:
        each.start()
    asked = await agent.hear(len(prompts))
    assert sorted(each.prompt for each in asked) == prompts
    agent.end.sendall(b"".join(framed(pack(InputReply(each.number, ""))) for each in asked))
    await until(lambda: not any(map(threading.Thread.is_alive, asking)))


async def test_a_thread_waits_until_the_agent_has_caught_up(agent: Agent) -> None:
    """`catch_up` waits until the agent replies or closes its end."""
    agent.end.sendall(task("first"))
    await agent.hear(1)
    for end in (framed(pack(InputReply(2))), b""):
        waiting = threading.Thread(target=agent.tasks.catch_up)
        waiting.start()
        (asked,) = await agent.hear(1)
        assert isinstance(asked, CatchUp)
        assert waiting.is_alive()
        agent.end.sendall(end) if end else agent.end.shutdown(socket.SHUT_WR)
        await asyncio.to_thread(waiting.join, 10)
        assert not waiting.is_alive()


def test_a_forked_child_exits_at_the_cells_end(world: World) -> None:
    """A child that a cell forks exits at the cell's end; the worker gives the result, and goes on.

    The cell waits for the child, so that the child gets to the end before the worker.
    """
    forked = "import os\nbefore = os.getpid()\nchild = os.fork()\nif child: os.waitpid(child, 0)"
    for _ in range(3):
        assert list(world.execute(forked, fetch=("os.getpid() == before",))) == [True, True]
        assert world.gather("os.getpid() == before") == [True, True]
