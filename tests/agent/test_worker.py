"""Tests of `nbdist.agent.worker`: the state of a worker, its outputs, and its end."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist.agent.inspect import locate, status_without_asking
from nbdist.agent.worker import UNREACHABLE, Worker
from nbdist.agent.worker_task import NO_CELL
from nbdist.output.events import Died, Done, InputRequest, Output, Text, Typed
from nbdist.wire import control
from nbdist.wire.frames import pack
from nbdist.wire.messages import RunTask
from nbdist.wire.work import CellCode as SourceText
from nbdist.wire.work import InputReply, Task
from tests.agent.sources import Source, worker_start
from tests.faults.stops import spinning
from tests.waiting import SOON, until

pytestmark = pytest.mark.world

GRACE = 30.0


class Watched:
    """A worker, and all outputs that it has passed on."""

    def __init__(self, bench: Source, rank: int) -> None:
        self.shown: list[tuple[str, Output]] = []
        start, logs = worker_start(bench.runtime, rank), bench.runtime / f"logs{rank}"
        self.worker = Worker(start, bench.source, logs, self._take)

    def _take(self, rank: int, task_id: str, output: Output) -> None:
        assert rank == self.worker.rank
        self.shown.append((task_id, output))

    def begin(self, source: str, name: str = "a") -> None:
        ranks = (self.worker.rank,)
        packed = pack(Task(name, ranks, SourceText(source), execution_count=5))
        self.worker.run(RunTask(name, ranks, packed))

    async def ends(self, name: str = "a") -> list[Output]:
        """Return all outputs of a task, once the task has ended."""

        def found() -> list[Output]:
            return [output for task_id, output in self.shown if task_id == name]

        await until(lambda: any(isinstance(output, Done | Died) for output in found()))
        return found()

    def asked(self) -> list[InputRequest]:
        return [each for _, each in self.shown if isinstance(each, InputRequest)]

    async def dies(self) -> Died:
        """Return the death of the worker, once it is known."""
        await until(lambda: any(isinstance(output, Died) for _, output in self.shown))
        return next(output for _, output in self.shown if isinstance(output, Died))


RANKS = itertools.count()


@pytest.fixture
def runner(bench: Source) -> asyncio.Runner:
    return bench.runner


@pytest.fixture
def watched(bench: Source, runner: asyncio.Runner) -> Iterator[Watched]:
    """A worker that is ready, and is stopped after the test."""

    async def start() -> Watched:
        watched = Watched(bench, next(RANKS))
        await watched.worker.start()
        return watched

    watched = runner.run(start())
    yield watched
    runner.run(watched.worker.stop(0.0))


def text_of(outputs: list[Output], stream: str = "stdout") -> str:
    return "".join(o.text for o in outputs if isinstance(o, Text) and o.stream == stream)


# --- tasks, failures and prompts ----------------------------------------------------------


async def test_each_task_ends_after_all_its_text(watched: Watched) -> None:
    """The state of a worker is known at any time; each task ends with `Done` or with `Died`.

    All text of a task comes before its end, and `Died` has the last lines.
    """
    worker = watched.worker
    assert (worker.state, worker.task.unpack(), worker.task.busy_seconds) == ("idle", None, 0.0)
    watched.begin("print('hello')\nx = 5")
    assert (worker.state, worker.task.unpack().source) == ("busy", "print('hello')\nx = 5")
    assert status_without_asking(worker).busy_seconds > 0
    *before, done = await watched.ends()
    assert text_of(before) == "hello\n"
    assert (done.status, done.bound) == ("ok", {"x"})
    assert repr(worker) == f"<Worker {worker.rank} idle {worker.process!r}>"
    assert status_without_asking(worker).pid == worker.pid
    numbers = "".join(f"{number}\n" for number in range(50))
    watched.begin(f"import os\nprint({numbers!r}, end='')\nos._exit(3)", "b")
    *before, died = await watched.ends("b")
    assert (died.exit_code, died.pid, died.why) == (3, worker.pid, "")
    assert text_of(before) == numbers
    assert [*died.last_lines] == [str(number) for number in range(30, 50)]
    assert (worker.state, worker.task.unpack()) == ("dead", None)


async def test_a_worker_begins_without_a_process(bench: Source, runner: asyncio.Runner) -> None:
    """A worker without a process is starting, answers nothing, and can be stopped."""
    worker = Watched(bench, next(RANKS)).worker
    assert (worker.state, worker.pid) == ("starting", 0)
    assert status_without_asking(worker).state == "starting"
    assert await worker.ask(control.Check(), SOON) is None
    worker.interrupt()
    worker.kill()
    worker.output.close_write_ends()  # as a start does
    await worker.stop(GRACE)


async def test_failures_are_shown_once(watched: Watched) -> None:
    """A failure is shown once, even if a handler of the user hides it from the kernel's output."""
    drawn = "def draw(*_, **__): pass\nget_ipython().set_custom_exc((KeyError,), draw)"
    watched.begin(f"{drawn}\n1 / 0")
    failure, done = await watched.ends()
    assert (failure.name, done.status, done.failure) == ("ZeroDivisionError", "error", None)
    watched.begin("{}['x']", "b")
    failure, done = await watched.ends("b")
    assert (failure.name, failure.message) == ("KeyError", "'x'")


async def test_an_interrupt_is_for_the_task_before_it(watched: Watched) -> None:
    """An interrupt ends the task that was sent before it, and never the task sent after it."""
    deeds = [lambda: watched.begin("x = 1", name), watched.worker.interrupt]
    for number in range(120):  # with a signal to any thread, 1 in 30 hit the next task
        name, status = str(number), ("error", "ok")[number % 2]
        os.kill(watched.worker.pid, signal.SIGSTOP)
        for do in deeds:
            do()
        os.kill(watched.worker.pid, signal.SIGCONT)
        *_, done = await watched.ends(name)
        assert done.status == status
        deeds.reverse()


async def test_a_prompt_comes_after_earlier_text(watched: Watched) -> None:
    """A prompt is passed on in order with text; typed text is in the log, but no password."""
    worker = watched.worker
    watched.begin("print('before')\nx = input('x? ')\nimport getpass\ny = getpass.getpass()")
    await until(watched.asked)
    *said, last = [output for _, output in watched.shown]
    assert last == watched.asked()[0]
    assert text_of(said) == "before\n"
    assert worker.input.waits_for_line
    assert (await locate(worker)).asks
    worker.input.answer(InputReply(last.number, "ada"))
    await until(lambda: len(watched.asked()) == 2)
    for text in ("secret", "again"):  # no prompt is left for the second text
        worker.input.answer(InputReply(watched.asked()[1].number, text))
    outputs = await watched.ends()
    assert [output.text for output in outputs if isinstance(output, Typed)] == ["ada", ""]
    assert [request.secret for request in watched.asked()] == [False, True]
    text = (worker.log.folder / "stdout.log").read_text()
    assert text == "before\nx? ada\nPassword: \n"


async def test_a_task_gets_no_input_after_stop(watched: Watched) -> None:
    """After Stop a task meets the end of all input; a thread without a task cannot ask for any."""
    catches = (
        "import threading; outlives = threading.Event()\n"
        "def beside():\n try: input()\n except EOFError: print('beside')\n"
        "other = threading.Thread(target=beside); other.start()\n"
        "said = []\nfor _ in range(2):\n"
        " try: input()\n except BaseException as error: said.append(type(error).__name__)\n"
        "other.join()\n"
        "def late():\n outlives.wait()\n try: input()\n except Exception as error: print(error)\n"
        "threading.Thread(target=late).start()\nprint(said)"
    )
    watched.begin(catches)
    await until(lambda: len(watched.asked()) == 2)
    watched.worker.interrupt()
    said = text_of(await watched.ends())
    assert "beside\n" in said
    assert "['KeyboardInterrupt', 'EOFError']\n" in said
    watched.begin("outlives.set()", "b")
    await watched.ends("b")
    await until(lambda: NO_CELL in text_of([output for _, output in watched.shown]))


# --- deaths -------------------------------------------------------------------------------


async def test_a_death_between_tasks_belongs_to_none(watched: Watched) -> None:
    """A death between tasks belongs to no task; a task that is sent later ends with that death."""
    watched.worker.kill("it is in the way")
    died = await watched.dies()
    assert (died.exit_code, died.why) == (-signal.SIGKILL, "it is in the way")
    assert watched.shown == [("", died)]
    watched.begin("1")
    assert await watched.ends() == [died]
    assert await watched.worker.ask(control.Check(), SOON) is None
    assert (await locate(watched.worker)).line == 0


async def test_last_words_come_before_a_death(watched: Watched) -> None:
    """Text that a worker wrote before its death comes first, even if the death is known earlier."""
    process = watched.worker.process
    pipe = os.open(f"/proc/{process.pid}/fd/1", os.O_WRONLY)
    os.write(pipe, b"last words\n")
    os.close(pipe)
    process.kill()
    process.set_exited(-signal.SIGKILL)
    died = await watched.dies()
    assert watched.shown == [("", Text("stdout", "last words\n")), ("", died)]


async def test_a_worker_without_a_connection_is_ended(watched: Watched) -> None:
    """A worker that cannot be given tasks any more is ended, with the reason."""
    watched.begin(
        "import gc\nfrom nbdist.worker.main import Tasks\n"
        "(tasks,) = [each for each in gc.get_objects() if type(each) is Tasks]\n"
        "tasks._agent.shutdown(2)\nimport time; time.sleep(600)"
    )
    assert (await watched.dies()).why == UNREACHABLE


# --- starts and stops ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("busy", "grace", "handler"),
    [
        (False, GRACE, "os.mknod"),
        (False, 0.0, "time.sleep"),
        (True, GRACE, "time.sleep"),
        (False, 0.5, "time.sleep"),
    ],
)
async def test_an_idle_worker_may_run_exit_handlers(
    bench: Source, tmp_path: Path, watched: Watched, *, busy: bool, grace: float, handler: str
) -> None:
    """Within its grace an idle worker runs exit handlers, a busy one not; no file is left."""
    worker, end = watched.worker, tmp_path / "end"
    given = "600" if handler == "time.sleep" else repr(str(end))
    watched.begin(f"import atexit, os, time\n_ = atexit.register({handler}, {given})")
    await watched.ends()
    if busy:
        watched.begin("time.sleep(600)", "b")
    assert [*bench.runtime.glob(f"{worker.rank}[.-]*")]
    async with asyncio.timeout(GRACE / 2):  # a busy worker gets no grace
        await worker.stop(grace)
    assert worker.process.exited.done()
    assert end.exists() == (handler == "os.mknod")
    assert not [*bench.runtime.glob(f"{worker.rank}[.-]*")]
    assert not any(isinstance(output, Died) for _, output in watched.shown)


async def test_time_of_other_programs_costs_no_grace(tmp_path: Path, watched: Watched) -> None:
    """Seconds in which other programs have the processors do not count as a worker's grace."""
    end = tmp_path / "end"
    source = f"""
import atexit, os, time
@atexit.register
def last():
    start = time.process_time()
    while time.process_time() < start + 0.3:
        pass
    os.mknod({str(end)!r})
"""
    cores = len(os.sched_getaffinity(0))
    watched.begin(source)
    await watched.ends()
    with spinning(3 * cores):
        await watched.worker.stop(0.5)
    assert end.exists()
