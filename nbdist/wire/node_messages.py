"""What crosses between the head of a world and its agents besides what any agent is told.

An agent takes the head for its notebook: `nbdist.wire.messages`.  What there is more is what
several machines have to agree on: `nbdist.agent.forming` asks, `nbdist.agent.worker_group` answers,
in one process where all workers are on one machine, else over a link.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar, get_args, get_origin

from nbdist.topology import Slots
from nbdist.values.payload import SegmentRef
from nbdist.wire.control import HeldGroups, StepCount
from nbdist.wire.frames import BadFrame, fits, pack, unpack
from nbdist.wire.messages import Answer, Ask, Down, StartFailure, Up, WorldStarted
from nbdist.wire.spec import Versions, WorldSpec
from nbdist.wire.store import Operation
from nbdist.wire.transfer import Drop, Fetch, Piece
from nbdist.wire.views import Place

# --- forming the world's group ----------------------------------------------------------------


Groups = Mapping[str, tuple[int, ...]]
"""The ranks of each group besides the world's own, by its name."""

Processes = Mapping[int, tuple[int, int]]
"""By rank: the number of its node, and of its process there."""


class Held(NamedTuple):
    """Which ranks of a part live, and the groups that each holds; None where it did not say."""

    ranks: Mapping[int, HeldGroups | None]


class Formed(NamedTuple):
    """What a part has after a `Form`: process, log folder and life of each of its ranks.

    `problem` says what kept them from forming the group, "" for nothing.
    """

    pids: Mapping[int, int]
    logs: Mapping[int, str]
    alive: tuple[int, ...]
    problem: str = ""


def processes(pids: Mapping[int, int], slots: Slots) -> Processes:
    """Say which process each rank is: on several machines two can have one number."""
    return {rank: (slots[rank].node if slots else 0, pid) for rank, pid in pids.items()}


# --- nodes that join ------------------------------------------------------------------------------


class NodeFacts(NamedTuple):
    """A machine that has come into a world, as its agent sees it.

    `number` orders the nodes where what has started the agent knows one, else -1; `address` is
    that by which it has reached the head, and others can reach it; on `port` nothing listens,
    and nothing else will; `gpus` are named as CUDA_VISIBLE_DEVICES names them.
    """

    name: str
    number: int
    address: str
    port: int
    cores: int
    gpus: tuple[str, ...]
    python: str
    versions: Versions

    @property
    def torch(self) -> str:
        """The version of torch there, "" for none."""
        return self.versions.get("torch", "")


class NodeHello(NamedTuple):
    """Agent to head, once, first."""

    version: str
    pid: int
    facts: NodeFacts


# --- what is asked of an agent ------------------------------------------------------------------


R = TypeVar("R")


class PartRequest(Generic[R]):
    """What is asked of a machine of a world; answered within `timeout` seconds by an `R`."""

    __slots__ = ()

    @property
    def timeout(self) -> float:
        """Longer than an agent takes."""
        return 5.0

    def lost(self, why: str) -> R:
        """Return the answer of a machine that is lost: no worker lives there."""
        return None  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class GetClock(PartRequest[int]):
    """Answered by the time there, in nanoseconds since 1970."""


class Target(NamedTuple):
    """A port of another machine, on which nothing listens, but which answers all the same."""

    name: str
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class Reach(PartRequest[str]):
    """Can these be reached from there?  Answered by which one cannot and why, "" for none."""

    targets: tuple[Target, ...]
    timeout = 10.0


@dataclass(frozen=True, slots=True)
class LocateRanks(PartRequest[Mapping[int, Place]]):
    """Where are these ranks, as far as they are alive?"""

    ranks: tuple[int, ...]
    timeout = 10.0

    def lost(self, why: str) -> Mapping[int, Place]:
        return {}


@dataclass(frozen=True, slots=True)
class HoldRanks(PartRequest[Mapping[int, StepCount | None]]):
    """Hold ranks at the beginning of their next optimizer step; return their counts by rank.

    Ranks of the machine that have finished the same task are in the answer too.
    """

    ranks: tuple[int, ...]

    def lost(self, why: str) -> Mapping[int, StepCount | None]:
        return {}


@dataclass(frozen=True, slots=True)
class StartPart(PartRequest[WorldStarted | StartFailure]):
    """Start these ranks; when one fails, or it is called off, end the others of them."""

    spec: WorldSpec
    ranks: tuple[int, ...]
    attempt: int
    timeout = 190.0

    def lost(self, why: str) -> StartFailure:
        return StartFailure(self.ranks[0], "", "the agent", why, ())


@dataclass(frozen=True, slots=True)
class GetHeld(PartRequest[Held]):
    """Which ranks live, and what groups do they hold?"""

    timeout = 35.0

    def lost(self, why: str) -> Held:
        return Held({})


@dataclass(frozen=True, slots=True)
class Prepare(PartRequest[str]):
    """Make ready what starts these ranks; answered by what keeps it from that, else ""."""

    spec: WorldSpec
    ranks: tuple[int, ...]
    timeout = 120.0

    def lost(self, why: str) -> str:
        return why


@dataclass(frozen=True, slots=True)
class Form(PartRequest[Formed]):
    """Form the next generation of the group: `ranks` are the part's own.

    `missing` are the ranks that are started anew, of all parts.  `groups` are made whole
    together with the world's own; None where that one is of another size, since `sized_in`,
    and none made from it can stay.  `attempt` counts the starts of the world.
    """

    spec: WorldSpec
    ranks: tuple[int, ...]
    attempt: int
    generation: int
    sized_in: int
    missing: tuple[int, ...]
    groups: Groups | None
    timeout = 60.0

    def lost(self, why: str) -> Formed:
        return Formed({}, {}, (), why)


@dataclass(frozen=True, slots=True)
class CallOff(PartRequest[None]):
    """Stop ranks from waiting for this generation; at once, whatever else is under way."""

    generation: int


@dataclass(frozen=True, slots=True)
class EndRanks(PartRequest[None]):
    """End these ranks: politely for `grace` seconds, then by force.

    With `drops` nothing more is sent of what they have said: no rank of the world stays.
    """

    ranks: tuple[int, ...]
    grace: float
    drops: bool = False

    @property
    def timeout(self) -> float:
        return self.grace + 20.0


@dataclass(frozen=True, slots=True)
class Renumber(PartRequest[None]):
    """Call each of these ranks by another number, of which itself learns with the next `Form`."""

    became: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Bring(PartRequest[str]):
    """Have these segments there: `Fetch` them.  Answered by why there is no room, "" for nothing.

    It takes as long as the line does; an agent that says nothing any more counts as lost before.
    """

    refs: tuple[SegmentRef, ...]
    timeout = 86_400.0

    def lost(self, why: str) -> str:
        return ""


class InterruptAt(NamedTuple):
    """Head to agent: stop the tasks of these ranks at the beginning of a step; 0 means at once.

    Ranks that do not reach the step within `seconds` are interrupted wherever they are.
    """

    ranks: tuple[int, ...]
    step: int = 0
    seconds: float = 0.0


NodeDown = Down | InterruptAt | Ask[Any] | Answer | Fetch | Piece | Drop
NodeUp = Up | NodeHello | Ask[Operation] | Fetch | Piece
"""The ranks of all nodes meet in the head's store."""


def node_frames(message: NodeDown | NodeUp) -> list[bytes | memoryview]:
    """Pack the message; the bytes of a `Piece` are a frame of their own, which is not copied."""
    if isinstance(message, Piece):
        return [pack(message._replace(data=b"")), message.data]
    return [pack(message)]


def node_message_from(*frames: bytes | memoryview) -> Any:
    """Unpack what `node_frames` has packed; raises BadFrame for anything else."""
    if not 1 <= len(frames) <= 2:
        raise BadFrame(f"a message of {len(frames)} frames")
    frame, *data = frames
    try:
        message = unpack(frame)
    except Exception as error:  # garbage can make unpickling raise anything
        raise BadFrame(f"{type(error).__name__}: {error}"[:200]) from error
    if not isinstance(message, KINDS) or (data and not isinstance(message, Piece)):
        raise BadFrame(f"a {type(message).__name__} is no message in {len(frames)} frames")
    if isinstance(message, NodeHello) and not fits(message, NodeHello):
        raise BadFrame("a field of a NodeHello has another type")
    return message._replace(data=data[0]) if data else message


KINDS = tuple({get_origin(each) or each for each in get_args(NodeDown) + get_args(NodeUp)})
"""The classes of all messages between a head and its agents."""
