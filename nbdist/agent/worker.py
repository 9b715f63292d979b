"""The agent's object for a worker, with the worker's process, kernel, pipes, log and running task.

`nbdist.agent.worker_group` makes a `Worker` for each rank of the machine.  The worker's task and
input are in `nbdist.agent.worker_task`, and the reasons of its exit in `nbdist.agent.worker_death`.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbdist.agent.debugger_relay import DebuggerRelay
from nbdist.agent.kernel_link import KernelClient, user_failure
from nbdist.agent.processes import ProcessSource, WorkerProcess
from nbdist.agent.stacks import StackFile
from nbdist.agent.worker_death import WorkerDeath
from nbdist.agent.worker_output import WorkerLog, WorkerOutput
from nbdist.agent.worker_task import CurrentTask, PendingInput
from nbdist.output.events import Comm, Done, Failure, InputRequest, ItemsWanted, Output, Text
from nbdist.system.limits import Lack, lack_in
from nbdist.system.processes import is_exiting
from nbdist.wire import control
from nbdist.wire.frames import BadFrame
from nbdist.wire.messages import RunTask
from nbdist.wire.places import RankState
from nbdist.wire.spec import LAST_LINE_SAYS, WorkerStart, WorldSpec
from nbdist.wire.work import CatchUp, Finished, InputReply, SigintSent, TaskMessage
from nbdist.words import word_exit

log = logging.getLogger("nbdist.agent")

WORKER_KILL_TIMEOUT = 5.0  # seconds for a killed process to exit
LOST_GRACE = 1.0  # seconds for a worker to exit by itself after its task connection was closed
UNREADABLE = "the agent could not read what it sent"
UNREACHABLE = "it closed the connection to its agent"

UNFIT = "this rank cannot take part in the group, so its process is restarted"

Emit = Callable[[int, str, Output], None]


class Worker:
    """The agent's object for a worker: it starts the worker, and sends it tasks and requests.

    `emit` is called with the rank, the id of the task, and an output, for each output of the
    worker.  If the worker exits before its group is formed, `start` raises an error.  If it exits
    later, the last output is a `Died`.
    """

    def __init__(
        self, start: WorkerStart, source: ProcessSource, log_folder: Path | None, emit: Emit
    ) -> None:
        self.rank = start.rank
        self.start_info, self.source = start, source
        self.process: WorkerProcess | None = None
        self.task = CurrentTask()
        self.death = WorkerDeath()
        self.log = WorkerLog(log_folder, start.world.log_limit)
        self.output = WorkerOutput(start.token, self.log, self._handle_item)
        self.stacks = StackFile(start.stack_file)
        # The latest request for the worker's last collective; `nbdist.agent.inspect` sets it.
        self.last_collective: asyncio.Task[Any] | None = None
        self.debugger: DebuggerRelay | None = None  # set while the user debugs this rank
        self._emit = emit
        self._kernel = KernelClient(start, self._read_message)
        self.input = PendingInput(self.task, self._kernel.send, self.output.emit)
        self._is_stopping = False
        self._kill_timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Worker {self.rank} {self.state} {self.process}>"

    @property
    def pid(self) -> int:
        """The worker's process id; 0 before the process is started."""
        return self.process.pid if self.process else 0

    @property
    def state(self) -> RankState:
        """The worker's state, which `%dist_status` shows.

        It is "starting" until the worker's group is formed or the worker exits.
        """
        if self.process is None or not self.output.ready.is_set():
            return "starting"
        if self.process.exited.done():
            return "dead"
        return "busy" if self.task.id else "idle"

    async def start(self) -> None:
        """Start the worker's process, and wait until the worker's group is formed.

        Raises ChildProcessError if the process cannot be started or connected, or exits before its
        group is formed.  If the reason is known, the error is a `Lack`, whose message says why.
        """
        try:
            self._kernel.write_connection_file()
            process = await self.source.start(self.start_info, *self.output.write_ends)
        finally:
            self.output.close_write_ends()
        self.process = process
        process.exited.add_done_callback(lambda _: self.output.ready.set())
        if self.death.is_killed:  # `kill` was called before the process was started
            process.kill()
        await self.output.ready.wait()
        if process.exited.done():
            lines, code = self.output.last_lines, process.exited.result()
            if lack := lack_in(lines):
                raise Lack(lack)
            if code == LAST_LINE_SAYS and lines:
                raise Lack(lines[-1])
            raise ChildProcessError(f"it {word_exit(code)}")
        process.exited.add_done_callback(self._process_exited)
        self.death.count_oom_kills(self.pid)
        try:
            await self._kernel.connect(self.output.place, self._connection_lost)
        except OSError as error:  # the process has just exited, or is about to
            self.kill()
            raise ChildProcessError(f"it cannot be reached: {error}") from error

    def run(self, run: RunTask) -> None:
        """Send the worker a task; its outputs are emitted, the last of which is `Done` or `Died`.

        If the worker has exited already, its `Died` is emitted for this task, too.
        """
        if self.death.died is not None:
            self._emit(self.rank, run.id, self.death.died)
            return
        self.task.begin(run)
        self.death.count_oom_kills_soon(self.pid)
        self._kernel.send(run.task)

    def send_comm(self, comm: Comm) -> None:
        """Send a page's message to one of the worker's widgets."""
        self._kernel.send(comm)

    async def ask(
        self, request: control.ControlRequest, timeout: float
    ) -> control.ControlReply | None:
        """Send a request to the worker's control thread, and return the answer.

        Returns None if no answer comes within `timeout` seconds.
        """
        if self.process is None:
            return None
        return await self._kernel.ask(request, timeout, self.process.exited)

    async def ask_or_kill(
        self, request: control.ControlRequest, timeout: float
    ) -> control.ControlReply | None:
        """Send a request to the worker's control thread; return the answer, None after a timeout.

        Kills the worker if the answer says that the worker cannot take part in its group any more.
        A new worker can then take its place.
        """
        answer = await self.ask(request, timeout)
        if isinstance(answer, control.Failed) and answer.unfit:
            await self.kill_unfit(answer.error)
        return answer

    async def kill_unfit(self, why: str) -> None:
        """Kill the worker because it cannot take part in its group, and emit `why` as stderr text.

        Waits until the worker has exited, and does nothing if it had exited before.
        """
        if self.process is not None and not self.process.exited.done():
            self.emit_stderr(f"{UNFIT}: {why}\n")
            self.kill()
            await asyncio.wait([self.process.exited], timeout=WORKER_KILL_TIMEOUT)

    @property
    def is_debugged(self) -> bool:
        """Whether the rank stands at a breakpoint, until the user lets it go on."""
        return self.debugger is not None and self.debugger.is_stopped

    def emit_stderr(self, text: str) -> None:
        """Emit and log a text of the agent's as if the worker had written it to stderr."""
        self.output.emit(Text("stderr", text))

    def kill(self, why: str = "") -> None:
        """Kill the worker and its process group.  A `Died` output with the reason `why` follows.

        If `kill` is called several times, the first `why` counts.
        """
        self.death.record_kill(why)
        if self.process is not None:
            self.process.kill()

    def interrupt(self) -> None:
        """Send SIGINT to the worker's process group; the running task gets no more input."""
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)
            self._kernel.send(SigintSent())
        if self.debugger is not None:
            self.debugger.record_interrupt()
        self.input.refuse()

    def renumber(self, rank: int, log_folder: Path | None) -> None:
        """Record that the worker gets another rank, and continue its log in `log_folder`.

        If `log_folder` is None, there are no log files from now on.  The worker's process learns
        its new rank later, from a `Resize` request.
        """
        self.log.move(log_folder, self.rank)
        self.rank = rank

    def set_world(self, world: WorldSpec) -> None:
        """Record the worker's present rank and the world's new spec in `start_info`."""
        self.start_info = replace(self.start_info, rank=self.rank, world=world)

    async def stop(self, grace: float) -> None:
        """End the worker's process, and close everything that belongs to it; no `Died` follows.

        An idle worker has `grace` seconds to exit by itself, in which waits for a processor do not
        count.  A worker that is not idle, or does not exit in time, is killed.
        """
        self._is_stopping = True
        if (process := self.process) is not None:
            process.exited.remove_done_callback(self._process_exited)
            if grace > 0 and self.state == "idle":
                self._kernel.shut_down()
                await process.exit_within(grace)
            process.kill()
            await asyncio.wait([process.exited], timeout=WORKER_KILL_TIMEOUT)
        self.death.cancel_count()
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        self.output.close()
        self._kernel.close()
        self.log.close()
        self.stacks.remove()

    def _process_exited(self, exited: asyncio.Future[int]) -> None:
        """Emit the worker's remaining output, then `Died`."""
        self.output.drain()
        code = exited.result()
        text = self.stacks.crash_text(code, self.task.unpack()) + self.death.oom_text(code)
        if text:
            self.emit_stderr(text)
        self._emit_output(self.death.record_exit(code, self.pid, self.output.last_lines))
        self.task.end(None)
        self.input.reject_all()

    def _connection_lost(self, problem: BadFrame | None) -> None:
        """Kill the worker soon, unless it is exiting, because it can get no further task.

        The connection for tasks was closed, or `problem` says why its data could not be read.
        """
        if self._is_stopping:
            return
        if problem is not None:
            log.warning("rank %d: %s: %s", self.rank, UNREADABLE, problem)
        why, grace = (UNREADABLE, 0.0) if problem else (UNREACHABLE, LOST_GRACE)
        self._kill_timer = asyncio.get_running_loop().call_later(grace, self._kill_if_alive, why)

    def _kill_if_alive(self, why: str) -> None:
        # The connection also closes when the process exits by itself.  Do not kill the process
        # then, so that its exit code says why it has exited.
        if not is_exiting(self.pid):
            self.kill(why)

    def _read_message(self, number: int, output: Output | None) -> None:
        if isinstance(output, Failure):
            self.task.record_error(number)
        self.output.receive(number, output)

    def _handle_item(self, item: Output | TaskMessage) -> None:
        match item:
            case InputRequest() | ItemsWanted():
                if self.input.receive(item):
                    self._emit_output(item)
            case CatchUp(number):
                self._kernel.send(InputReply(number))
            case Finished(task_id=task_id, done=done):
                if task_id == self.task.id:
                    self._end_task(done)
            case _:
                self._emit_output(item)

    def _end_task(self, done: Done) -> None:
        """Emit `done`, the end of the task.

        The task's error has usually been emitted already, from a message of its own; if not, emit
        the error from `done` first.  If the worker cannot take part in its group after the task
        (`done.unfit`), kill the worker; then `Died` is emitted in place of `done`.
        """
        if (failure := self.task.unsent_failure(done)) is not None:
            self._emit_output(user_failure(failure))
        if done.unfit:
            self.kill(done.unfit)  # `Died` follows instead of `Done`
            return
        self._emit_output(done if done.failure is None else replace(done, failure=None))
        self.task.end(done)
        self.input.reject_all()
        self.death.cancel_count()

    def _emit_output(self, output: Output) -> None:
        if self.output.ready.is_set():
            self._emit(self.rank, self.task.id, output)
