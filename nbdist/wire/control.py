"""The agent's requests to a worker's control thread, which answers even while a task runs.

Agents send the requests (`nbdist.agent.worker`), and `nbdist.worker.control` answers them.
Requests and answers are pickled, and have a connection of their own.  Users' code runs in the
worker, so an agent does not trust the answers: `answer_from` makes only plain Python objects, and
objects of the classes in `ControlReply` and in their fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from nbdist.wire.frames import object_from
from nbdist.wire.places import Collective, RankPosition, StackFrame
from nbdist.wire.spec import WorldSpec

TYPES = "_jupyter_types_experimental"
"""The key in a reply's metadata under which front ends expect the types of the completions."""


class Complete(NamedTuple):
    """Ask for completions of `code` at the cursor, which is after `cursor` characters."""

    code: str
    cursor: int


class Inspect(NamedTuple):
    """Ask for a description of the name at the cursor; with `detail` 1 also its source code."""

    code: str
    cursor: int
    detail: int = 0


TypingQuestion = Complete | Inspect
"""A front end's question about the code that a user types, answered from a worker's variables.

`Complete` is answered by `Completions`, and `Inspect` by a `Description`.  While the worker still
answers an earlier question, it answers by `Ok`.
"""


class Candidate(NamedTuple):
    """A completion, with the type of its object such as `function`; "" stands for unknown."""

    text: str
    type: str = ""
    signature: str = ""


@dataclass(frozen=True, slots=True)
class Completions:
    """Completions, each of which replaces the characters of the code from `start` to `end`."""

    candidates: tuple[Candidate, ...]
    start: int
    end: int

    def __bool__(self) -> bool:
        return bool(self.candidates)

    @classmethod
    def read(cls, reply: Mapping[str, Any]) -> Completions:
        """Return the completions in the content of a kernel's reply to a front end."""
        typed = reply["metadata"].get(TYPES) or [{"text": text} for text in reply["matches"]]
        candidates = (
            Candidate(each["text"], each.get("type") or "", each.get("signature") or "")
            for each in typed
        )
        return cls(tuple(candidates), reply["cursor_start"], reply["cursor_end"])

    def reply(self) -> dict[str, Any]:
        """Return the content of the reply that a kernel sends to a front end."""
        place = {"start": self.start, "end": self.end}
        typed = [
            {**place, **each._asdict(), "type": each.type or "<unknown>"}
            for each in self.candidates
        ]
        return {
            "matches": [each.text for each in self.candidates],
            "cursor_start": self.start,
            "cursor_end": self.end,
            "metadata": {TYPES: typed},
            "status": "ok",
        }


@dataclass(frozen=True, slots=True)
class Description:
    """The answer to `Inspect`: a description of the name at the cursor, by media type.

    `data` is empty if the name is unknown.
    """

    data: Mapping[str, str]

    def __bool__(self) -> bool:
        return bool(self.data)

    def reply(self) -> dict[str, Any]:
        """Return the content of the reply that a kernel sends to a front end."""
        return {"status": "ok", "found": bool(self), "data": {**self.data}, "metadata": {}}


class LocateMainThread(NamedTuple):
    """Ask where in the user's code the main thread is; answered by `RankPosition`.

    With `briefly` the worker finds only line, file and collective, because the other fields need
    system calls, and each may cost milliseconds.
    """

    briefly: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """Ask for the place of the main thread and for the calls of its stack; answered by `Traced`."""


@dataclass(frozen=True, slots=True)
class LastCollective:
    """Ask for the collective that the rank began last; answered by a `Collective`.

    Answered by `Ok` if the rank has begun none.
    """


@dataclass(frozen=True, slots=True)
class ListGroups:
    """Ask for the process groups that the rank belongs to; answered by `HeldGroups`."""


@dataclass(frozen=True, slots=True)
class ListSecrets:
    """Ask for the secrets in the rank's environment variables; answered by a tuple of values."""


@dataclass(frozen=True, slots=True)
class Announce:
    """Ask the worker's kernel to publish a message on its iopub socket.

    When the message arrives, the agent knows that its subscription to this socket works.
    """


@dataclass(frozen=True, slots=True)
class Check:
    """Ask which names that nbdist needs are missing in torch or IPython.

    Answered by a tuple with a sentence for each missing name.
    """


class StartDebugger(NamedTuple):
    """Start the rank's debugger (debugpy), which waits for the agent's connection.

    Answered by `Ok` once the worker listens on a Unix socket at the path `debugger_socket`.
    Answered by `Failed` if debugpy is not installed, if user code has started debugpy, or if the
    session of an earlier connection does not end in time.
    """

    debugger_socket: str


class ReleaseTaskValues(NamedTuple):
    """Free the values that this task has returned: they were read, or nobody will read them."""

    task_id: str


@dataclass(frozen=True, slots=True)
class AbortCollectives:
    """Abort the pending collectives of the rank, so that its main thread no longer waits."""


@dataclass(frozen=True, slots=True)
class EndStoreWait:
    """If the main thread waits in a TCPStore of torch that user code has made, end its wait."""


MAX_STEPS_APART = 10
"""Ranks whose step counts differ by more than this do not count as training one model together.

Ranks that train together are mostly at most one step apart."""


class HoldSteps(NamedTuple):
    """Make a task wait at the beginning of its next optimizer step; answered by `StepCount`.

    A task that has begun no step yet does not wait.
    """

    task_id: str


class StopAtStep(NamedTuple):
    """Raise KeyboardInterrupt in a task when its optimizer step `step` begins.

    The task, which `HoldSteps` has made wait at an earlier step, goes on until then.
    """

    task_id: str
    step: int


class ReleaseSteps(NamedTuple):
    """Cancel `HoldSteps` and `StopAtStep`, so that the task goes on past every step.

    Answered by a `StepCount`, whose `has_stopped` is True if `StopAtStep` had already stopped the
    task.
    """

    task_id: str


class Regroup(NamedTuple):
    """Connect the world's group and the groups in `members` again, with the same ranks as before.

    `members` has the other groups that survivors belong to: the ranks of each group, by the group's
    name.  The worker ignores groups without its own rank.  Once the groups are connected, the
    worker adopts the environment variables in `environ`, except CUDA_VISIBLE_DEVICES.
    """

    generation: int
    members: Mapping[str, tuple[int, ...]]
    world: WorldSpec
    environ: Mapping[str, str]


class Resize(NamedTuple):
    """Form a group of another size for the world, in which the worker becomes this `rank`.

    The worker first waits until the new workers, with the ranks `newcomers`, have come to the
    store.  Once the group is formed, the worker adopts the environment variables in `environ`,
    except CUDA_VISIBLE_DEVICES.
    """

    generation: int
    rank: int
    world: WorldSpec
    newcomers: tuple[int, ...]
    environ: Mapping[str, str]


ControlQuery = (
    LocateMainThread
    | Trace
    | LastCollective
    | ListGroups
    | ListSecrets
    | Announce
    | Check
    | TypingQuestion
)
StepRequest = HoldSteps | StopAtStep | ReleaseSteps
ControlRequest = (
    ControlQuery
    | StartDebugger
    | ReleaseTaskValues
    | AbortCollectives
    | EndStoreWait
    | StepRequest
    | Regroup
    | Resize
)


@dataclass(frozen=True, slots=True)
class Traced:
    """The place of the main thread, and the calls of its stack, the innermost first."""

    place: RankPosition
    frames: tuple[StackFrame, ...]


@dataclass(frozen=True, slots=True)
class StepCount:
    """How many optimizer steps a task has begun on a rank.

    In an answer to `HoldSteps`, `begun` is 0 for a task that has failed.  If this answers
    `HoldSteps` for a running task, `since` is the number of seconds since the last step began, and
    `interval` the number of seconds between the beginnings of the last two steps.  `has_stopped` is
    True if `StopAtStep` has interrupted the task, and `has_succeeded` is True if the task has ended
    without an error.
    """

    begun: int = 0
    since: float = 0.0
    interval: float = 0.0
    has_stopped: bool = False
    has_succeeded: bool = False


@dataclass(frozen=True, slots=True)
class HeldGroups:
    """The groups of a worker: its rank in the world, and the ranks of its other groups by name.

    `world_size` is 0 if the worker's last attempt to form the world's group failed.
    """

    rank: int
    world_size: int
    members: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer to a request that failed; `error` says why.

    If `unfit` is True, the cause seems to be in this worker itself, so that only a new process
    helps.  It is False for other causes: for example, the error may come from other ranks or the
    connections to them, or the debugger cannot start.
    """

    error: str
    unfit: bool


@dataclass(frozen=True, slots=True)
class Ok:
    """The answer to a request that has succeeded without a value to return."""


InspectReply = Completions | Description
ControlReply = (
    RankPosition
    | Traced
    | Collective
    | StepCount
    | HeldGroups
    | tuple[str, ...]
    | Failed
    | Ok
    | InspectReply
)


class ControlReplyTo(NamedTuple):
    """Worker to agent: the answer to the request with this number."""

    number: int
    answer: ControlReply


def answer_from(frame: bytes) -> ControlReplyTo:
    """Return a worker's answer from its frame; raises BadFrame if the frame is no such answer."""
    answered: ControlReplyTo = object_from(frame, ControlReplyTo)
    return answered
