"""The agent's record of the task that a worker runs, and of the input for which the worker asks.

Runs in the agent; `nbdist.agent.worker.Worker` makes one object of each class for its worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from nbdist.output.events import Done, Failure, InputRequest, ItemsWanted, Typed
from nbdist.wire.control import StepCount
from nbdist.wire.messages import RunTask
from nbdist.wire.work import InputReply, Task, task_from

NO_CELL = "no cell is running that could read input"


class CurrentTask:
    """The task that a worker runs, and how the worker's last task ended; does no I/O.

    `Worker` records the task's start, errors and end.  The code that stops and inspects ranks reads
    the task.
    """

    def __init__(self) -> None:
        self.id = ""  # "" while no task runs
        # The id of the last task that has ended, and its optimizer steps, or None if it failed.
        self.finished: tuple[str, StepCount | None] = ("", None)
        self._packed = b""  # the running task, pickled
        self._began_at = 0.0  # monotonic time
        self._errors_sent: set[int] = set()  # the numbers of the messages with the task's errors

    def __repr__(self) -> str:
        return f"<CurrentTask {self.id!r} after {self.finished}>"

    def unpack(self) -> Task | None:
        """Return the running task, which is unpacked at each call; None if no task runs."""
        return task_from(self._packed) if self.id else None

    @property
    def busy_seconds(self) -> float:
        """The seconds since the start of the task; 0 if no task runs."""
        return time.monotonic() - self._began_at if self.id else 0.0

    def begin(self, run: RunTask) -> None:
        """Record that the worker is sent a task."""
        self.id, self._packed = run.id, run.task
        self._began_at = time.monotonic()

    def record_error(self, number: int) -> None:
        """Record that the message with this number has brought an error of the worker."""
        self._errors_sent.add(number)

    def unsent_failure(self, done: Done) -> Failure | None:
        """Return the error in `done`, the end of the task, if no message has brought the error.

        Returns None if the task ended without an error.
        """
        return None if done.error_number in self._errors_sent else done.failure

    def end(self, done: Done | None) -> None:
        """Record that the task has ended with `done`, or with the worker's exit if that is None.

        Does nothing if no task runs.
        """
        if not self.id:
            return
        count = None
        if done is not None and done.status == "ok":
            count = StepCount(done.steps, has_succeeded=True)
        self.finished = (self.id, count)
        self.id, self._packed = "", b""
        self._errors_sent.clear()


class PendingInput:
    """A worker's unanswered requests for typed lines, and for items of `World.map`.

    `task` is the worker's current task.  `send` sends the worker a reply.  `emit` adds a line that
    the user has typed to the worker's output.
    """

    def __init__(
        self,
        task: CurrentTask,
        send: Callable[[InputReply], None],
        emit: Callable[[Typed], None],
    ) -> None:
        self._task = task
        self._send = send
        self._emit = emit
        self._requests: dict[int, InputRequest | ItemsWanted] = {}  # by number
        self._stopped_task = ""  # the id of the task that gets no more input

    def __repr__(self) -> str:
        return f"<PendingInput {sorted(self._requests)} of {self._task}>"

    @property
    def waits_for_line(self) -> bool:
        """Whether the worker waits for a line that the user has yet to type."""
        return any(isinstance(each, InputRequest) for each in self._requests.values())

    def receive(self, request: InputRequest | ItemsWanted) -> bool:
        """Record a request of the running task, and return True: the caller must emit the request.

        Returns False if the worker has got its reply already.  If Stop has interrupted the task,
        the reply is the end of input.  If no task is running, it has `NO_CELL` as `problem`.
        """
        if self._task.id and self._task.id != self._stopped_task:
            self._requests[request.number] = request
            return True
        self._send(InputReply(request.number, problem="" if self._task.id else NO_CELL))
        return False

    def answer(self, reply: InputReply) -> None:
        """Send the worker the reply to its request; ignore a reply to an answered request."""
        if (request := self._requests.pop(reply.number, None)) is None:
            return
        self._send(reply)
        if reply.text is not None and isinstance(request, InputRequest):
            self._emit(Typed("" if request.secret else reply.text))

    def refuse(self) -> None:
        """Make each `input` of the running task raise EOFError, now and later.

        The agent calls this method when Stop has interrupted the task.
        """
        self._stopped_task = self._task.id
        # KeyboardInterrupt ends an `input` only in the main thread, so answer those of all threads.
        for number in [*self._requests]:
            self.answer(InputReply(number))

    def reject_all(self) -> None:
        """Answer all requests with `NO_CELL` as `problem`, because the task has ended.

        The requests are those of threads that still run.
        """
        for number in [*self._requests]:
            self.answer(InputReply(number, problem=NO_CELL))
