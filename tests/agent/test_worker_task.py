"""Tests of `nbdist.agent.worker_task`: which task a worker runs, and who answers its requests."""

from __future__ import annotations

from nbdist.agent.worker_task import NO_CELL, CurrentTask, PendingInput
from nbdist.output.events import Done, Failure, InputRequest, ItemsWanted, Typed
from nbdist.wire.control import StepCount
from nbdist.wire.frames import pack
from nbdist.wire.messages import RunTask
from nbdist.wire.work import InputReply, Task

ERROR = Failure("ValueError", "bad", ("bad",), 1)


def run_of(name: str) -> RunTask:
    return RunTask(name, (0,), pack(Task(name, (0,))))


def test_the_end_of_a_task_is_kept() -> None:
    """While a task runs, it is known; later its steps are, or that it has failed."""
    task = CurrentTask()
    task.end(None)  # the worker has exited while it was idle
    assert (task.id, task.unpack(), task.busy_seconds, task.finished) == ("", None, 0.0, ("", None))
    task.begin(run_of("a"))
    assert (task.id, task.unpack(), task.finished) == ("a", Task("a", (0,)), ("", None))
    assert task.busy_seconds > 0
    task.end(Done("ok", 0.1, steps=3))
    assert (task.id, task.unpack()) == ("", None)
    assert task.finished == ("a", StepCount(3, has_succeeded=True))
    for name, done in (("b", Done("error", 0.1, steps=3)), ("c", None)):
        task.begin(run_of(name))
        task.end(done)
        assert task.finished == (name, None)


def test_an_error_is_sent_once() -> None:
    """The error at the end of a task is unsent, unless a message of the task has brought it."""
    task = CurrentTask()
    task.begin(run_of("a"))
    assert task.unsent_failure(Done("ok", 0.1)) is None
    failed = Done("error", 0.1, failure=ERROR, error_number=7)
    assert task.unsent_failure(failed) == ERROR
    task.record_error(7)
    assert task.unsent_failure(failed) is None


def test_a_request_is_answered_once() -> None:
    """Typed lines are shown and passwords not; a second reply to a request is ignored."""
    task, sent, shown = CurrentTask(), list[InputReply](), list[Typed]()
    pending = PendingInput(task, sent.append, shown.append)
    task.begin(run_of("a"))
    replies = [InputReply(1, "ada"), InputReply(2, "key"), InputReply(3, "")]
    wanted = [InputRequest(1, "x? "), InputRequest(2, "y? ", secret=True), ItemsWanted(3)]
    assert all(map(pending.receive, wanted))
    for reply in (*replies, *replies):
        assert pending.waits_for_line == (len(sent) < 2)
        pending.answer(reply)
    assert (sent, shown) == (replies, [Typed("ada"), Typed("")])


def test_a_stopped_task_gets_no_input() -> None:
    """After Stop all requests of the task meet the end of input, and those of the next do not."""
    task, sent, shown = CurrentTask(), list[InputReply](), list[Typed]()
    pending = PendingInput(task, sent.append, shown.append)
    task.begin(run_of("a"))
    assert pending.receive(InputRequest(1, ""))
    pending.refuse()
    assert not pending.receive(InputRequest(2, ""))
    task.end(None)
    assert not pending.receive(InputRequest(3, ""))
    task.begin(run_of("b"))
    assert pending.receive(InputRequest(4, ""))
    task.end(None)
    pending.reject_all()
    ends, lacks = map(InputReply, (1, 2)), (InputReply(n, problem=NO_CELL) for n in (3, 4))
    assert (sent, shown, pending.waits_for_line) == ([*ends, *lacks], [], False)
