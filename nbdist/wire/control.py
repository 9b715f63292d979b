"""Requests to a worker's control thread, which answers them while a task runs, and the answers.

Agents send the requests (`nbdist.agent.worker`), `nbdist.worker.control` answers them.
Requests and answers are pickled frames on a connection of their own.  Users' code runs in the
worker, so the agent unpickles nothing but the classes of `ControlReply` (`answer_from`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from nbdist.wire.frames import object_from
from nbdist.wire.places import Collective, RankPosition, StackFrame
from nbdist.wire.spec import WorldSpec

TYPES = "_jupyter_types_experimental"
"""The key in a reply's metadata under which front ends find completions' types and signatures."""


class Complete(NamedTuple):
    """Ask for the completions at the cursor; `cursor` counts characters of the code."""

    code: str
    cursor: int


class Inspect(NamedTuple):
    """Ask for a description of the name at the cursor; with `detail` 1 also for its source."""

    code: str
    cursor: int
    detail: int = 0


TypingQuestion = Complete | Inspect
"""A request of a front end about a worker's variables, made while the user types."""


class Candidate(NamedTuple):
    """A completion, whose `type` is jedi's word for its object: `function`, `instance`, ..."""

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
        """Read the content of a kernel's reply to a front end."""
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
    """A description of the name at the cursor, by media type; empty for an unknown name."""

    data: Mapping[str, str]

    def __bool__(self) -> bool:
        return bool(self.data)

    def reply(self) -> dict[str, Any]:
        """Return the content of the reply that a kernel sends to a front end."""
        return {"status": "ok", "found": bool(self), "data": {**self.data}, "metadata": {}}


class LocateMainThread(NamedTuple):
    """Ask where the main thread is; answered by `RankPosition`.

    `briefly` asks only for the line and the collective: each system call for other fields may cost
    milliseconds.
    """

    briefly: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """Ask where the main thread is and for the calls of its stack; answered by `Traced`."""


@dataclass(frozen=True, slots=True)
class LastCollective:
    """Ask for the collective that the rank began last; answered by `Collective`, `Ok` for none."""


@dataclass(frozen=True, slots=True)
class ListGroups:
    """Ask for the process groups that the rank belongs to; answered by `HeldGroups`."""


@dataclass(frozen=True, slots=True)
class ListSecrets:
    """Ask for the secrets in the rank's environment variables; answered by a tuple of values."""


@dataclass(frozen=True, slots=True)
class Announce:
    """Publish a message on iopub, by which the agent learns that it is subscribed."""


@dataclass(frozen=True, slots=True)
class Check:
    """Ask which names that nbdist needs torch and IPython lack; answered by a sentence for each."""


class ReleaseTaskValues(NamedTuple):
    """Release the values that this task returned: the notebook has read them."""

    task_id: str


@dataclass(frozen=True, slots=True)
class AbortCollectives:
    """Abort the pending collectives of the rank, so that its main thread no longer waits."""


@dataclass(frozen=True, slots=True)
class EndStoreWait:
    """End the main thread's wait in a TCPStore of user code, if it waits in one."""


MAX_STEPS_APART = 10
"""If the step counts of two ranks differ by more, the ranks do not train one model together.

Ranks that train together are mostly at most one step apart."""


class HoldSteps(NamedTuple):
    """Hold this task at the beginning of its next optimizer step; answered by `StepCount`."""

    task_id: str


class StopAtStep(NamedTuple):
    """Let a held task go on, and raise KeyboardInterrupt at the beginning of this step."""

    task_id: str
    step: int


class ReleaseSteps(NamedTuple):
    """Hold this task no longer; answered by `StepCount`."""

    task_id: str


class Regroup(NamedTuple):
    """Reconnect the world's group and the groups of `members`, which keep their sizes.

    `members` has the ranks of each group besides the world's own, by its name, as all survivors
    together report them.  Then apply the environment variables in `environ`.
    """

    generation: int
    members: Mapping[str, tuple[int, ...]]
    world: WorldSpec
    environ: Mapping[str, str]


class Resize(NamedTuple):
    """Form a world's group of another size, in which the worker has the number `rank`.

    The worker first waits until all `newcomers` have started, and at last applies `environ`.
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
    | ReleaseTaskValues
    | AbortCollectives
    | EndStoreWait
    | StepRequest
    | Regroup
    | Resize
)


@dataclass(frozen=True, slots=True)
class Traced:
    """The place of the main thread and its calls, the innermost first."""

    place: RankPosition
    frames: tuple[StackFrame, ...]


@dataclass(frozen=True, slots=True)
class StepCount:
    """How many optimizer steps a task has begun on a rank, the last one `since` seconds ago.

    `interval` is the time in seconds between the last two beginnings, 0.0 before a second step.
    `has_stopped` is True if the task raised KeyboardInterrupt at the step that `StopAtStep` named.
    `has_succeeded` is True if the task has ended without an error.
    """

    begun: int = 0
    since: float = 0.0
    interval: float = 0.0
    has_stopped: bool = False
    has_succeeded: bool = False


@dataclass(frozen=True, slots=True)
class HeldGroups:
    """The groups of a worker: its rank in the world's group, and the other groups by name.

    `world_size` is 0 if the worker's last attempt to form the world's group failed.
    """

    rank: int
    world_size: int
    members: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Failed:
    """The request failed; if `unfit`, the worker cannot go on, and its agent ends it."""

    error: str
    unfit: bool


@dataclass(frozen=True, slots=True)
class Ok:
    """The request is done, or the object that it asks for does not exist."""


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
    """Unpack a worker's answer; raises BadFrame for anything else."""
    answered: ControlReplyTo = object_from(frame, ControlReplyTo)
    return answered
