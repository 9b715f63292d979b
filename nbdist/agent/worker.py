"""One worker as its agent knows it: process, kernel, pipes, log, and its running task.

Runs in the agent; `nbdist.agent.worker_group` makes a `Worker` for each rank of the machine.
"""

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

from nbdist.agent.kernel_link import KernelClient, as_shown
from nbdist.agent.processes import ProcessSource, WorkerProcess
from nbdist.agent.stacks import StackFile
from nbdist.agent.worker_output import WorkerLog, WorkerOutput
from nbdist.output.events import Comm, Died, Done, Failure, InputRequest, Output, Text, Typed
from nbdist.system.limits import Lack, OomKills, lack_in
from nbdist.system.processes import cpu_seconds, is_exiting, is_stopped
from nbdist.wire import control
from nbdist.wire.frames import BadFrame
from nbdist.wire.messages import Run
from nbdist.wire.places import Place, RankState
from nbdist.wire.spec import LAST_LINE_SAYS, WorkerStart, WorldSpec
from nbdist.wire.status import WorkerStatus
from nbdist.wire.work import CatchUp, Finished, InputReply, Said, SigintSent, Task, task_from
from nbdist.words import word_exit

log = logging.getLogger("nbdist.agent")

KILL_TIMEOUT = 5.0  # seconds for a killed process to exit
LOCATE_TIMEOUT = 0.5  # seconds for a worker to say where it is; else it counts as holding the GIL
LOST_GRACE = 1.0  # seconds for a worker to exit by itself after its task connection was closed
UNREADABLE = "the agent could not read what it sent"
UNREACHABLE = "it closed the connection to its agent"

NO_CELL = "no cell is running that could read input"

UNFIT = "this rank cannot take part in the group, so its process is restarted"
COUNT_AFTER = 0.05
"""Seconds into a task until OOM kills are counted, which takes 0.4 ms for each rank."""
TOO_MUCH = re.compile(r"gloo/\S*pair\.cc:\d+\] op\.preamble\.length <= op\.nbytes")
"""The line that gloo writes when it aborts a rank that received more than its tensor holds."""

Emit = Callable[[int, str, Output], None]


class Worker:
    """A worker process and all that belongs to it; `emit` gets its outputs, in order."""

    def __init__(
        self, start: WorkerStart, source: ProcessSource, log_folder: Path | None, emit: Emit
    ) -> None:
        self.rank = start.rank
        self.given, self.source = start, source
        self.process: WorkerProcess | None = None
        self.task_id = ""  # of the running task
        self._packed = b""  # the running task
        # Id and optimizer steps of the last task that has ended; the count is None if it failed.
        self.finished: tuple[str, control.StepCount | None] = ("", None)
        self.log = WorkerLog(log_folder, start.world.log_limit)
        self.output = WorkerOutput(start.token, self.log, self._take)
        self.stacks = StackFile(start.stack_file)
        self.last_collective: asyncio.Task[Any] | None = None  # the last query, see `inspect`
        self.asks: dict[int, InputRequest] = {}  # unanswered input requests, by number
        self._emit = emit
        self._errors_sent: set[int] = set()  # the numbers of the task's error messages
        self._stopped_task = ""  # the task that gets no more input, because Stop was pressed
        self._busy_since = 0.0
        self._oom_kills: OomKills | None = None
        self._counting: asyncio.TimerHandle | None = None
        self.is_killed = False
        """Whether the agent has killed the worker, though its process may still exist."""
        self._is_ending = False
        self._why = ""
        self._died: Died | None = None
        self._kernel = KernelClient(start, self._read_message)
        self._losing: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Worker {self.rank} {self.state} {self.process}>"

    @property
    def pid(self) -> int:
        """The worker's process id, 0 before it has a process."""
        return self.process.pid if self.process else 0

    @property
    def state(self) -> RankState:
        """What `%dist_status` shows; "starting" until the worker's group is formed."""
        if self.process is None or not self.output.ready.is_set():
            return "starting"
        if self.process.exited.done():
            return "dead"
        return "busy" if self.task_id else "idle"

    async def start(self) -> None:
        """Start the worker and wait until its group is formed.

        Raises ChildProcessError if the worker exits before, cannot be started or not be reached.
        """
        try:
            self._kernel.write_connection_file()
            process = await self.source.start(self.given, *self.output.write_ends)
        finally:
            self.output.close_write_ends()
        self.process = process
        process.exited.add_done_callback(lambda _: self.output.ready.set())
        if self.is_killed:  # `kill` was called before there was a process
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
            await self._kernel.connect(self.output.place, self._lose)
        except OSError as error:  # the process has just exited, or is about to
            self.kill()
            raise ChildProcessError(f"it cannot be reached: {error}") from error

    @property
    def task(self) -> Task | None:
        """The running task, unpacked again at each call; None while idle."""
        return task_from(self._packed) if self.task_id else None

    def run(self, run: Run) -> None:
        """Send a task, still packed, to the worker; outputs follow, then `Done` or `Died`.

        If the worker has exited, `Died` is emitted again.
        """
        if self._died is not None:
            self._emit(self.rank, run.id, self._died)
            return
        self.task_id, self._packed = run.id, run.task
        self._busy_since = time.monotonic()
        loop = asyncio.get_running_loop()
        self._counting = loop.call_later(COUNT_AFTER, self._count_kills)
        self._kernel.send(run.task)

    def enter(self, reply: InputReply) -> None:
        """Send a typed reply to the worker, if its input request is still unanswered."""
        if (request := self.asks.pop(reply.number, None)) is None:
            return
        self._kernel.send(reply)
        if reply.text is not None:
            self.output.pass_on(Typed("" if request.secret else reply.text))

    def send_comm(self, comm: Comm) -> None:
        """Send a page's message to one of the worker's widgets."""
        self._kernel.send(comm)

    async def ask(self, request: control.Request, timeout: float) -> control.Answer | None:
        """Return the answer of the worker's control thread; None if there is none in time."""
        if self.process is None:
            return None
        return await self._kernel.ask(request, timeout, self.process.exited)

    async def ask_or_end(self, request: control.Request, timeout: float) -> control.Answer | None:
        """Ask the worker; kill it if it answers that only a new process could do this."""
        answer = await self.ask(request, timeout)
        if isinstance(answer, control.Failed) and answer.unfit:
            await self.end_unfit(answer.error)
        return answer

    async def end_unfit(self, why: str) -> None:
        """Kill the worker, which cannot take part in the group; its stderr says why."""
        if self.process is not None and not self.process.exited.done():
            self.say(f"{UNFIT}: {why}\n")
            self.kill()
            await asyncio.wait([self.process.exited], timeout=KILL_TIMEOUT)

    async def locate(self) -> Place:
        """Ask the worker where it is; without an answer it counts as holding the GIL."""
        seen = await self.ask(control.Locate(), LOCATE_TIMEOUT)
        if not isinstance(seen, Place):
            seen = Place(holds_gil=True, is_stopped=is_stopped(self.pid))
        return replace(seen, asks=bool(self.asks))

    def say(self, text: str) -> None:
        """Emit and log a text as the worker's stderr."""
        self.output.pass_on(Text("stderr", text))

    def kill(self, why: str = "") -> None:
        """Kill the worker and what it started; `Died` follows with the first `why`."""
        self.is_killed, self._why = True, self._why or why
        if self.process is not None:
            self.process.kill()

    def interrupt(self) -> None:
        """Send SIGINT to the worker and what it started; its task gets no more input."""
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)
            self._kernel.send(SigintSent())
        self.refuse_input()

    def refuse_input(self) -> None:
        """Let each `input` of the running task raise EOFError, now and later.

        Called when the task was stopped, by SIGINT or at an optimizer step.
        """
        self._stopped_task = self.task_id
        # KeyboardInterrupt ends an `input` of the main thread; in another thread it would wait on.
        for number in [*self.asks]:
            self.enter(InputReply(number))

    def status(self) -> WorkerStatus:
        """Return what is known without asking the worker; `nbdist.agent.inspect` adds the rest."""
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
        """Give the worker another rank and log folder; it learns of its rank by `Resize`."""
        self.log.move(log_folder, self.rank)
        self.rank = rank

    def sit(self, world: WorldSpec) -> None:
        """Record the world's present spec, which may have another size or other slots."""
        self.given = replace(self.given, rank=self.rank, world=world)

    async def stop(self, grace: float) -> None:
        """Stop the worker and release everything that belongs to it; no `Died` follows.

        An idle worker may exit by itself: it has `grace` seconds of its own time
        (`WorkerProcess.exit_within`) before it is killed.  Any other worker is killed at once.
        """
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
        """Record the number of OOM kills so far, to tell after a death whether it was one."""
        self._oom_kills = OomKills(self.pid)

    def _ended(self, exited: asyncio.Future[int]) -> None:
        """Emit the worker's remaining output, then `Died`."""
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
        if self.task_id:
            self.finished = (self.task_id, None)
        self._forget_task()

    def _lose(self, problem: BadFrame | None) -> None:
        """Kill the worker, which can get no more tasks, unless it is exiting already."""
        if self._is_ending:
            return
        if problem is not None:
            log.warning("rank %d: %s: %s", self.rank, UNREADABLE, problem)
        why, grace = (UNREADABLE, 0.0) if problem else (UNREACHABLE, LOST_GRACE)
        self._losing = asyncio.get_running_loop().call_later(grace, self._end_for, why)

    def _end_for(self, why: str) -> None:
        # The connection also closes when the process exits; then its own exit code says why.
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
        """Emit an input request.

        After Stop it is answered by the end of input, and without a running task by a refusal.
        """
        self.asks[request.number] = request
        if not self.task_id:
            self.enter(InputReply(request.number, problem=NO_CELL))
        elif self.task_id == self._stopped_task:
            self.enter(InputReply(request.number))
        else:
            self._show(request)

    def _end_task(self, done: Done) -> None:
        """Emit the end of the task, and its error if no message with the traceback came.

        A worker that its task has made unfit is killed instead, and `Died` ends the task.
        """
        if done.failure is not None and done.error_number not in self._errors_sent:
            self._show(as_shown(done.failure))
        if done.unfit:
            self.kill(done.unfit)  # `Died` follows instead of `Done`
            return
        self._errors_sent.clear()
        count = control.StepCount(done.steps, has_succeeded=True)
        self.finished = (self.task_id, count if done.status == "ok" else None)
        self._show(replace(done, failure=None))
        self._forget_task()
        if self._counting is not None:
            self._counting.cancel()

    def _forget_task(self) -> None:
        for number in [*self.asks]:  # by threads that outlive the task
            self.enter(InputReply(number, problem=NO_CELL))
        self.task_id, self._packed = "", b""

    def _show(self, output: Output) -> None:
        if self.output.ready.is_set():
            self._emit(self.rank, self.task_id, output)
