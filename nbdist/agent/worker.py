"""One worker as its agent knows it: process, kernel, pipes, log, and what it is doing."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbdist.agent.kernel_link import KernelClient, TaskConnection, as_shown
from nbdist.agent.processes import ProcessSource, WorkerProcess
from nbdist.agent.stacks import StackFile
from nbdist.agent.worker_output import WorkerLog, WorkerOutput
from nbdist.output.events import Comm, Died, Done, Failure, InputRequest, Output, Text, Typed
from nbdist.system.limits import Lack, OomKills, lack_in
from nbdist.system.processes import cpu_seconds, is_exiting, is_stopped
from nbdist.wire import control
from nbdist.wire.frames import BadFrame
from nbdist.wire.messages import Run
from nbdist.wire.spec import LAST_LINE_SAYS, WorkerStart, WorldSpec
from nbdist.wire.views import Place, RankState, WorkerStatus
from nbdist.wire.work import CatchUp, Finished, InputReply, Said, SigintSent, Task, task_from
from nbdist.words import word_exit

log = logging.getLogger("nbdist.agent")

KILL_TIMEOUT = 5.0
LOCATE_TIMEOUT = 0.5
LOST_GRACE = 1.0  # seconds for a worker to end by itself whose tasks' connection has ended
UNREADABLE = "the agent could not read what it sent"
UNREACHABLE = "it closed the connection to its agent"

NO_CELL = "no cell is running that could read input"

UNFIT = "this rank cannot take part in the group, so its process is restarted"
COUNT_AFTER = 0.05  # seconds into a cell: short ones do without, it takes 0.4 ms for each rank
TOO_MUCH = re.compile(r"gloo/\S*pair\.cc:\d+\] op\.preamble\.length <= op\.nbytes")
"""What gloo writes as it ends the process of a rank that receives more than its tensor holds."""

Emit = Callable[[int, str, Output], None]


class Worker:
    """A worker and everything that belongs to it; `emit` takes what it shows, in order."""

    def __init__(
        self, start: WorkerStart, source: ProcessSource, log_folder: Path | None, emit: Emit
    ) -> None:
        self.rank = start.rank
        self.given, self.source = start, source
        self.process: WorkerProcess | None = None
        self.task_id = ""  # of the task that it does
        self._packed = b""
        # Id and optimizer steps of the last task; the count is None unless the task ended well.
        self.finished: tuple[str, control.StepCount | None] = ("", None)
        self.log = WorkerLog(log_folder, start.world.log_limit)
        self.output = WorkerOutput(start.token, self.log, self._take)
        self.stacks = StackFile(start.stack_file)
        self.last_collective: asyncio.Task[Any] | None = None  # while it is being asked for
        self.asks: dict[int, InputRequest] = {}  # what it waits to be typed
        self._emit = emit
        self._errors_sent: set[int] = set()  # the numbers of the cell's error messages
        self._stopped_task = ""
        self._busy_since = 0.0
        self._oom_kills: OomKills | None = None
        self._counting: asyncio.TimerHandle | None = None
        self.is_killed = False
        """Whether its agent has ended it, though its process may still be there."""
        self._is_ending = False
        self._why = ""
        self._died: Died | None = None
        self._kernel = KernelClient(start, self._read_message)
        self._losing: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Worker {self.rank} {self.state} {self.process}>"

    @property
    def pid(self) -> int:
        """The worker's process, 0 before it has one."""
        return self.process.pid if self.process else 0

    @property
    def state(self) -> RankState:
        """What `%dist_status` shows."""
        if self.process is None or not self.output.ready.is_set():
            return "starting"
        if self.process.exited.done():
            return "dead"
        return "busy" if self.task_id else "idle"

    async def start(self) -> None:
        """Start it and wait until its group is formed; ChildProcessError if it ends before."""
        try:
            self._kernel.write_connection_file()
            process = await self.source.start(self.given, *self.output.write_ends)
        finally:
            self.output.close_write_ends()
        self.process = process
        process.exited.add_done_callback(lambda _: self.output.ready.set())
        if self.is_killed:  # before it had a process
            process.kill()
        await self.output.ready.wait()
        if process.exited.done():
            lines, code = self.output.last_lines, process.exited.result()
            if lack := lack_in(lines):
                raise Lack(lack)
            if code == LAST_LINE_SAYS and lines:
                raise Lack(lines[-1])
            raise ChildProcessError(f"it {word_exit(code)}")
        process.exited.add_done_callback(self._ended)
        self._count_kills()
        try:
            await self._kernel.connect(TaskConnection(self.output.place, self._lose))
        except OSError as error:  # its process has ended in this moment, or is about to
            self.kill()
            raise ChildProcessError(f"it cannot be reached: {error}") from error

    @property
    def task(self) -> Task | None:
        """The task that it does: unpacked when it is read."""
        return task_from(self._packed) if self.task_id else None

    def run(self, run: Run) -> None:
        """Pass on the task as it came; outputs follow, then `Done`, or `Died`."""
        if self._died is not None:
            self._emit(self.rank, run.id, self._died)
            return
        self.task_id, self._packed = run.id, run.task
        self._busy_since = time.monotonic()
        loop = asyncio.get_running_loop()
        self._counting = loop.call_later(COUNT_AFTER, self._count_kills)
        self._kernel.send(run.task)

    def enter(self, reply: InputReply) -> None:
        """Pass on what was typed for it, if it still waits for that."""
        if (request := self.asks.pop(reply.number, None)) is None:
            return
        self._kernel.send(reply)
        if reply.text is not None:
            self.output.pass_on(Typed("" if request.secret else reply.text))

    def send_comm(self, comm: Comm) -> None:
        """Pass on what a page says to one of its widgets."""
        self._kernel.send_comm(comm)

    async def ask(self, request: control.Request, timeout: float) -> control.Answer | None:
        """Return the answer of its control thread; None if it gives none in time, or ends."""
        if self.process is None:
            return None
        return await self._kernel.ask(request, timeout, self.process.exited)

    async def ask_or_end(self, request: control.Request, timeout: float) -> control.Answer | None:
        """Ask; end it where it answers that only another process could do that."""
        answer = await self.ask(request, timeout)
        if isinstance(answer, control.Failed) and answer.unfit:
            await self.end_unfit(answer.error)
        return answer

    async def end_unfit(self, why: str) -> None:
        """End the process, which can take no part in the group, and say so."""
        if self.process is not None and not self.process.exited.done():
            self.say(f"{UNFIT}: {why}\n")
            self.kill()
            await asyncio.wait([self.process.exited], timeout=KILL_TIMEOUT)

    async def locate(self) -> Place:
        """Ask where it is."""
        seen = await self.ask(control.Locate(), LOCATE_TIMEOUT)
        if not isinstance(seen, Place):
            seen = Place(holds_gil=True, is_stopped=is_stopped(self.pid))
        return replace(seen, asks=bool(self.asks))

    def say(self, text: str) -> None:
        """Show something as its stderr."""
        self.output.pass_on(Text("stderr", text))

    def kill(self, why: str = "") -> None:
        """End the process; `Died` follows, and says why."""
        self.is_killed, self._why = True, self._why or why
        if self.process is not None:
            self.process.kill()

    def interrupt(self) -> None:
        """Send SIGINT to it and what it started; its task can ask for no more input."""
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)
            self._kernel.send(SigintSent())
        self.refuse_input()

    def refuse_input(self) -> None:
        """End each wait for input of its task, now and later: the task is to end."""
        self._stopped_task = self.task_id
        # Of the main thread it has been given up by then; another would wait on.
        for number in [*self.asks]:
            self.enter(InputReply(number))

    def status(self) -> WorkerStatus:
        """Return what is known of it without asking; `nbdist.agent.inspect` finds out the rest."""
        return WorkerStatus(
            rank=self.rank,
            pid=self.pid,
            host=socket.gethostname(),
            state=self.state,
            busy_seconds=time.monotonic() - self._busy_since if self.task_id else 0.0,
            memory=0,
            device=self.given.device,
            cpu_seconds=cpu_seconds(self.pid),
            last_line=self.output.last_line,
        )

    def renumber(self, rank: int, log_folder: Path | None) -> None:
        """Become this rank, and write there."""
        self.log.move(log_folder, self.rank)
        self.rank = rank

    def sit(self, world: WorldSpec) -> None:
        """Take its slot in a world that has others, or more or fewer of them."""
        self.given = replace(self.given, rank=self.rank, world=world)

    async def stop(self, grace: float) -> None:
        """End the worker: politely for `grace` own seconds, then by SIGKILL; free all."""
        self._is_ending = True
        if (process := self.process) is not None:
            process.exited.remove_done_callback(self._ended)
            if grace > 0 and self.state == "idle":
                self._kernel.shut_down()
                await process.exit_within(grace)
            process.kill()
            await asyncio.wait([process.exited], timeout=KILL_TIMEOUT)
        for timer in (self._counting, self._losing):
            if timer is not None:
                timer.cancel()
        self.output.close()
        self._kernel.close()
        self.log.close()
        self.stacks.remove()

    def _count_kills(self) -> None:
        """Note how often the kernel has killed so far, to compare with after a death."""
        self._oom_kills = OomKills(self.pid)

    def _ended(self, exited: asyncio.Future[int]) -> None:
        """Pass on all that it said, then that it died."""
        self.output.drain()
        code = exited.result()
        found = self.stacks.crash_text(code, self.task)
        if self._oom_kills is not None and not self.is_killed:
            found += self._oom_kills.text(code)
        if found:
            self.say(found)
        lines = self.output.last_lines
        too_much = code == -signal.SIGABRT and any(map(TOO_MUCH.search, lines))
        self._died = Died(
            code, time.time_ns(), self.pid, lines, self._why, received_too_much=too_much
        )
        self._show(self._died)
        self._forget_task()

    def _lose(self, problem: BadFrame | None) -> None:
        """End it, which can be given no more tasks, unless it is ending anyway."""
        if self._is_ending:
            return
        if problem is not None:
            log.warning("rank %d: %s: %s", self.rank, UNREADABLE, problem)
        why, grace = (UNREADABLE, 0.0) if problem else (UNREACHABLE, LOST_GRACE)
        self._losing = asyncio.get_running_loop().call_later(grace, self._end_for, why)

    def _end_for(self, why: str) -> None:
        # A connection also ends with its process, whose end the agent may notice later.
        if not is_exiting(self.pid):
            self.kill(why)

    def _read_message(self, number: int, output: Output | None) -> None:
        if isinstance(output, Failure):
            self._errors_sent.add(number)
        self.output.receive(number, output)

    def _take(self, item: Output | Said) -> None:
        match item:
            case InputRequest():
                self._take_request(item)
            case CatchUp(number):
                self._kernel.send(InputReply(number))
            case Finished(task_id=task_id, done=done):
                if task_id == self.task_id:
                    self._end_task(done)
            case _:
                self._show(item)

    def _take_request(self, request: InputRequest) -> None:
        """Pass it on; after Stop, or without a task, it ends as at the end of a file."""
        self.asks[request.number] = request
        if not self.task_id:
            self.enter(InputReply(request.number, problem=NO_CELL))
        elif self.task_id == self._stopped_task:
            self.enter(InputReply(request.number))
        else:
            self._show(request)

    def _end_task(self, done: Done) -> None:
        """Note its end, and its error where no message brought that."""
        if done.failure is not None and done.error_number not in self._errors_sent:
            self._show(as_shown(done.failure))
        if done.unfit:
            self.kill(done.unfit)  # `Died` follows, in the place of `Done`
            return
        self._errors_sent.clear()
        count = control.StepCount(done.steps) if done.status == "ok" else None
        self.finished = (self.task_id, count)
        self._show(replace(done, failure=None))
        self._forget_task()
        if self._counting is not None:
            self._counting.cancel()

    def _forget_task(self) -> None:
        for number in [*self.asks]:  # of a thread that lives on
            self.enter(InputReply(number, problem=NO_CELL))
        self.task_id, self._packed = "", b""

    def _show(self, output: Output) -> None:
        if self.output.ready.is_set():
            self._emit(self.rank, self.task_id, output)
