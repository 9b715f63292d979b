"""Further messages between the head of a world on several machines and the agents of its machines.

The head sends its agents the messages of `nbdist.wire.messages`, as a notebook sends them to the
agent of a single machine.  The messages here are about what several machines must agree on.  For a
world on a single machine, the agent makes and answers the requests to form a group itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar, get_args, get_origin

from nbdist.output.events import Output
from nbdist.values.payload import SegmentRef
from nbdist.wire.control import HeldGroups, StepCount
from nbdist.wire.frames import BadFrame, fits, pack, unpack
from nbdist.wire.messages import AgentReply, AgentRequest, Down, StartFailure, Up
from nbdist.wire.places import RankPosition
from nbdist.wire.spec import Versions, WorldSpec
from nbdist.wire.store import Operation
from nbdist.wire.transfer import Drop, Fetch, SegmentPiece

# --- forming the world's group ----------------------------------------------------------------


Groups = Mapping[str, tuple[int, ...]]
"""The ranks of each group besides the world's own, by the name of the group."""


class LiveRanks(NamedTuple):
    """The answer to `GetHeld`: the live ranks of a machine, each with its groups.

    The groups of a rank that did not answer are None.  If the machine itself did not answer,
    `problem` says why, and its ranks may still be alive; otherwise `problem` is "".
    """

    ranks: Mapping[int, HeldGroups | None]
    problem: str = ""


class Formed(NamedTuple):
    """The answer to `StartPart` and `Form`: whether the ranks of a machine have formed the group.

    `pids` and `logs` have the process ids and log folders of the machine's workers, by rank.
    `alive` are the machine's live ranks.  `problem` says why the ranks did not form the group, or
    is "".  `missing` has a sentence for each name that nbdist needs and that torch or IPython
    lacks; it is empty in the answer to `Form`.
    """

    pids: Mapping[int, int]
    logs: Mapping[int, str]
    alive: tuple[int, ...]
    problem: str = ""
    missing: tuple[str, ...] = ()


# --- nodes that join ------------------------------------------------------------------------------


class NodeFacts(NamedTuple):
    """A machine that has joined a world, as its agent describes it."""

    name: str
    number: int  # the node's number, by which nodes are ordered; -1 if the launcher gave none
    # The address from which the agent reached the head; other machines connect to this address.
    address: str
    port: int  # a port that the agent has reserved, and on which nothing listens
    cores: int
    gpus: tuple[str, ...]  # the GPUs that the agent sees, named as in CUDA_VISIBLE_DEVICES
    python: str
    versions: Versions

    @property
    def torch(self) -> str:
        """The version of torch on that machine, "" if it has none."""
        return self.versions.get("torch", "")


class NodeHello(NamedTuple):
    """Agent to head: the first message, sent once; it describes the agent's machine."""

    version: str
    pid: int
    facts: NodeFacts


# --- what is asked of an agent ------------------------------------------------------------------


PART_TIMEOUT = 5.0  # seconds for an answer to a request that has no `timeout` of its own
RANKS_END_TIMEOUT = 20.0  # seconds to end ranks, in addition to `EndRanks.grace`

R = TypeVar("R")


class PartRequest(Generic[R]):
    """A request to the agent of one machine of a world; answered by an object of the type `R`.

    If the head has lost the machine, or has waited for `timeout` seconds, the head uses the result
    of `lost_answer` in place of an answer.
    """

    __slots__ = ()

    @property
    def timeout(self) -> float:
        """The seconds after which the head no longer waits for the answer."""
        return PART_TIMEOUT

    def lost_answer(self, why: str) -> R:
        """Return what the head uses in place of an answer if the machine is lost or too slow.

        `why` says in words what has happened.  The machine's workers may still be alive.
        """
        return None  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class GetClock(PartRequest[int]):
    """Ask for the time on the machine; answered in nanoseconds since 1970."""


class ProbeTarget(NamedTuple):
    """A port of another machine, to test whether that machine can be reached.

    Nothing listens on the port.  A refused connection shows that the machine can be reached.
    """

    name: str
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class Reach(PartRequest[str]):
    """Ask whether the machine can reach the targets.

    Answered by a text that names a target out of reach and the reason; "" if all can be reached.
    """

    targets: tuple[ProbeTarget, ...]
    timeout = 10.0


@dataclass(frozen=True, slots=True)
class LocateRanks(PartRequest[Mapping[int, RankPosition]]):
    """Ask for the places of `ranks`; answered by the places of those ranks that are alive."""

    ranks: tuple[int, ...]
    timeout = 10.0

    def lost_answer(self, why: str) -> Mapping[int, RankPosition]:
        return {}


@dataclass(frozen=True, slots=True)
class HoldRanks(PartRequest[Mapping[int, StepCount | None]]):
    """Hold ranks at the beginning of their next optimizer step; answered by step counts, by rank.

    The answer also has the machine's ranks that have finished the same task.  It has None for a
    rank that has failed or died, waits for input, stands at a breakpoint, or does not answer.
    """

    ranks: tuple[int, ...]

    def lost_answer(self, why: str) -> Mapping[int, StepCount | None]:
        return dict.fromkeys(self.ranks)


@dataclass(frozen=True, slots=True)
class StartPart(PartRequest[Formed | StartFailure]):
    """Start the workers of `ranks` on the machine.

    If a worker cannot start, or if a `CallOff` comes in time, the agent ends all workers that it
    has started for this request.
    """

    spec: WorldSpec
    ranks: tuple[int, ...]
    attempt: int
    timeout = 190.0

    def lost_answer(self, why: str) -> StartFailure:
        return StartFailure(self.ranks[0], "", "the agent", why, ())


@dataclass(frozen=True, slots=True)
class GetHeld(PartRequest[LiveRanks]):
    """Ask which ranks of the machine are alive, and to which groups the live ranks belong."""

    timeout = 35.0

    def lost_answer(self, why: str) -> LiveRanks:
        return LiveRanks({}, why)


@dataclass(frozen=True, slots=True)
class Prepare(PartRequest[str]):
    """Prepare the start of ranks; answered by the reason why they cannot be started, or "".

    The agent makes its runtime folder again if the folder was removed.  If workers are forked, the
    agent starts the fork server and waits until the fork server has imported torch.
    """

    spec: WorldSpec
    ranks: tuple[int, ...]
    timeout = 160.0

    def lost_answer(self, why: str) -> str:
        return why


@dataclass(frozen=True, slots=True)
class Form(PartRequest[Formed]):
    """Form the world's group again, together with all other machines.

    `generation` counts the attempts to form the world's group.  The agent starts those of its ranks
    that are in `missing`; its other ranks form their groups again.
    """

    spec: WorldSpec
    ranks: tuple[int, ...]  # all ranks of the machine
    attempt: int  # counts the starts of the world
    generation: int
    sized_in: int  # the generation in which the world's group was last made anew
    missing: tuple[int, ...]  # the ranks to start, on any machine
    # The groups to reconnect besides the world's own.  None if no group is reconnected and the
    # world's group is made again, for example because it gets another size.
    groups: Groups | None
    timeout = 60.0

    def lost_answer(self, why: str) -> Formed:
        return Formed({}, {}, (), why)


@dataclass(frozen=True, slots=True)
class CallOff(PartRequest[None]):
    """Call off a `StartPart` or `Form` that is in progress, so that its ranks wait no longer.

    `generation` is the number of an attempt to form the world's group.  An agent that has begun
    another attempt does nothing.
    """

    generation: int


@dataclass(frozen=True, slots=True)
class EndRanks(PartRequest[None]):
    """End the workers of `ranks`: idle workers have `grace` seconds to exit, others are killed.

    `drops` is True if no rank of the world stays: the agent then discards all pending outputs.
    """

    ranks: tuple[int, ...]
    grace: float
    drops: bool = False

    @property
    def timeout(self) -> float:
        return self.grace + RANKS_END_TIMEOUT


@dataclass(frozen=True, slots=True)
class Renumber(PartRequest[None]):
    """Give ranks the new numbers in `became`, by old number.

    The agent changes its own tables; the workers get their new numbers with the next `Form`.
    """

    became: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class CopySegments(PartRequest[str]):
    """Copy segments of shared memory from the head's machine to the agent's machine.

    The agent sends a `Fetch` for each piece.  Answered by the reason if the machine has too little
    shared memory, and by "" in all other cases, even if a segment was not copied.  The timeout is
    long because a network may be slow.
    """

    refs: tuple[SegmentRef, ...]
    timeout = 86_400.0

    def lost_answer(self, why: str) -> str:
        return ""


class InterruptAt(NamedTuple):
    """Head to agent: interrupt the tasks of these ranks when the optimizer step `step` begins.

    If `step` is 0, interrupt them at once.  Ranks that do not reach the step within `seconds` are
    interrupted wherever they are.
    """

    ranks: tuple[int, ...]
    step: int = 0
    seconds: float = 0.0


class Observed(NamedTuple):
    """Agent to head: a rank has finished, failed, died or asked for input in a task.

    The head needs this at once, to supervise the task, whereas the output itself may have to wait
    in the agent until the notebook has acknowledged earlier outputs.  `output` is a copy of that
    output without its large fields.
    """

    rank: int
    task_id: str
    output: Output


NodeDown = Down | InterruptAt | AgentRequest[Any] | AgentReply | Fetch | SegmentPiece | Drop
NodeUp = Up | NodeHello | AgentRequest[Operation] | Fetch | SegmentPiece | Observed
"""Messages from an agent to the head; an `AgentRequest` has an operation on the head's store."""


def node_frames(message: NodeDown | NodeUp) -> list[bytes | memoryview]:
    """Return a message as a list of one frame; for a `SegmentPiece` add its data as a second frame.

    The data is not copied.
    """
    if isinstance(message, SegmentPiece):
        return [pack(message._replace(data=b"")), message.data]
    return [pack(message)]


def node_message_from(*frames: bytes | memoryview) -> Any:
    """Return the message from the frames of `node_frames`; raises BadFrame for other frames."""
    if not 1 <= len(frames) <= 2:
        raise BadFrame(f"a message of {len(frames)} frames")
    frame, *data = frames
    try:
        message = unpack(frame)
    except Exception as error:  # garbage can make unpickling raise anything
        raise BadFrame(f"{type(error).__name__}: {error}"[:200]) from error
    if not isinstance(message, NODE_MESSAGE_TYPES) or (
        data and not isinstance(message, SegmentPiece)
    ):
        raise BadFrame(f"a {type(message).__name__} is no message in {len(frames)} frames")
    if isinstance(message, NodeHello) and not fits(message, NodeHello):
        raise BadFrame("a field of a NodeHello has another type")
    return message._replace(data=data[0]) if data else message


NODE_MESSAGE_TYPES = tuple(
    {get_origin(each) or each for each in get_args(NodeDown) + get_args(NodeUp)}
)
"""The classes of all messages between a head and its agents."""
