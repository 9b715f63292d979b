"""What an agent asks of a worker's control thread, whatever its task does, and the answers.

They are pickles in messages on the kernel's control channel.  The agent makes of a worker's bytes
nothing but these answers, since users' code runs there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nbdist.wire.frames import BadFrame, object_from
from nbdist.wire.spec import WorldSpec
from nbdist.wire.views import Collective, Place, StackFrame

TYPES = "_jupyter_types_experimental"
"""Where a reply to a front end says of what kind each completion is, and its signature."""


class Complete(NamedTuple):
    """What can stand at the cursor?  `cursor` counts characters of the code."""

    code: str
    cursor: int


class Inspect(NamedTuple):
    """What is at the cursor?  `detail` 1 asks for the source too, as `x??` does."""

    code: str
    cursor: int
    detail: int = 0


Question = Complete | Inspect
"""What a front end asks of a worker's variables while the user types."""


class Candidate(NamedTuple):
    """What could stand there, and of what kind that is: `function`, `instance`, ..."""

    text: str
    type: str = ""
    signature: str = ""


@dataclass(frozen=True, slots=True)
class Completions:
    """Each of these can stand in place of the characters from `start` to `end`."""

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
        """Write the content of a kernel's reply to a front end."""
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
    """Text by media type; empty where there is no such name."""

    data: Mapping[str, str]

    def __bool__(self) -> bool:
        return bool(self.data)

    def reply(self) -> dict[str, Any]:
        """Write the content of a kernel's reply to a front end."""
        return {"status": "ok", "found": bool(self), "data": {**self.data}, "metadata": {}}


REQUEST, REPLY = "nbdist_request", "nbdist_reply"
"""The kinds of these messages."""


class Locate(NamedTuple):
    """Where is the main thread?  Answered by `Place`, `briefly` with what people read of it."""

    briefly: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """Through which calls did it come there?  Answered by `Traced`."""


@dataclass(frozen=True, slots=True)
class LastCollective:
    """Which collective was begun last?  Answered by `Collective`, or `Ok` for none."""


@dataclass(frozen=True, slots=True)
class ListGroups:
    """Which groups are there?  Answered by `HeldGroups`."""


@dataclass(frozen=True, slots=True)
class ListSecrets:
    """Which values of its environment are secrets?  Answered by these values."""


@dataclass(frozen=True, slots=True)
class Check:
    """What do torch and IPython lack?  Answered by a sentence for each thing."""


class ReleaseValues(NamedTuple):
    """Keep no longer what this task brought back: it has been read."""

    task_id: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort whatever collective the main thread waits in."""


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
    """Reconnect the world's group and these, as this generation; then take this `environ`."""

    generation: int
    members: Mapping[str, tuple[int, ...]]
    world: WorldSpec
    environ: Mapping[str, str]


class Resize(NamedTuple):
    """Join a group of another size as this rank, with these newcomers; `environ` follows."""

    generation: int
    rank: int
    world: WorldSpec
    newcomers: tuple[int, ...]
    environ: Mapping[str, str]


Look = Locate | Trace | LastCollective | ListGroups | ListSecrets | Check | Question
StepRequest = HoldSteps | StopAtStep | ReleaseSteps
Request = Look | ReleaseValues | Abort | StepRequest | Regroup | Resize


@dataclass(frozen=True, slots=True)
class Traced:
    """The calls from the innermost out, and where they have led."""

    place: Place
    frames: tuple[StackFrame, ...]


@dataclass(frozen=True, slots=True)
class StepCount:
    """How many optimizer steps a task has begun on a rank, the last one `since` seconds ago.

    `interval` is the time in seconds between the last two beginnings, 0.0 before a second step.
    `has_stopped` is True if the task raised KeyboardInterrupt at the step that `StopAtStep` named.
    """

    begun: int = 0
    since: float = 0.0
    interval: float = 0.0
    has_stopped: bool = False


@dataclass(frozen=True, slots=True)
class HeldGroups:
    """Which rank it is of how many of the world's group, 0 for none; those of others by name."""

    rank: int
    world_size: int
    members: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Failed:
    """It could not be done; `unfit` where only another process could do it."""

    error: str
    unfit: bool


@dataclass(frozen=True, slots=True)
class Ok:
    """It is done, or there is none of what was asked for."""


Said = Completions | Description
Answer = Place | Traced | Collective | StepCount | HeldGroups | tuple[str, ...] | Failed | Ok | Said


def answer_from(buffers: Sequence[bytes | memoryview]) -> Answer:
    """Return what a worker has answered; raises BadFrame."""
    if not buffers:
        raise BadFrame("it is empty")
    answer: Answer = object_from(bytes(buffers[0]), Answer)
    return answer
