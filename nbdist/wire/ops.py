"""What ops of a worker return: `nbdist.worker.ops` makes these, the notebook reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

from nbdist.system.limits import MemoryLimit
from nbdist.values.payload import Payload
from nbdist.values.states import Parts
from nbdist.wire.frames import NOTHING
from nbdist.words import count


class Cleaned(NamedTuple):
    """A worker's bytes before and after it released what is not needed; `memory` is PSS.

    `on_gpu` is what tensors take of its GPU, `held_on_gpu` also what torch keeps; 0 without one.
    """

    memory: tuple[int, int]
    on_gpu: tuple[int, int] = (0, 0)
    held_on_gpu: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Held:
    """Memory that a name leads to: of a tensor or array, all that a view is of, or of `count`."""

    name: str
    size: int
    shape: tuple[int, ...] = ()
    dtype: str = ""
    device: str = "cpu"
    count: int = 1

    @property
    def kind(self) -> str:
        """What it is: `(1024, 64) float32`, `24 tensors`."""
        several = count(self.count, "tensor") if self.count > 1 else ""
        return " ".join(filter(None, [several, str(self.shape or ""), self.dtype]))


class Peak(NamedTuple):
    """The most bytes used at a time; `is_bound` where it may have been before the last cell."""

    size: int
    is_bound: bool = False


class GpuMemory(NamedTuple):
    """Bytes of the rank's GPU: of all processes, then of this rank's tensors, and its peak."""

    device: str
    used: int
    total: int
    tensors: int
    peak: Peak


class Memory(NamedTuple):
    """What a rank's memory is used for, in bytes; not `is_whole` where there was no time for all.

    `limit` is what leaves least: the machine's, its control group's or `ulimit -v`.  `held` are
    the largest tensors and arrays that names lead to, `kept` those of the last traceback and `Out`
    alone; `tensors` and `kept_size` are all of them.
    """

    pss: int
    peak: Peak
    limit: MemoryLimit | None
    gpu: GpuMemory | None
    held: tuple[Held, ...]
    tensors: int
    kept: tuple[Held, ...]
    kept_size: int
    is_whole: bool = True


class Met(NamedTuple):
    """A collective that a rank began: that of this `number` of its `group`; `size` is bytes."""

    group: str
    number: int
    name: str
    at_ns: int
    size: int


class RankTimes(NamedTuple):
    """A rank's last cell in nanoseconds of the clock: its waits for others, and what it began.

    `waits` are those of Python code, `waited_ns` in all; what C++ code waits for (a DDP module's
    backward) is in `met` alone, if `is_recorded` by Flight Recorder.  If not `is_whole`, the last.
    """

    began_ns: int
    ended_ns: int
    waits: tuple[tuple[int, int], ...]
    waited_ns: int
    met: tuple[Met, ...]
    is_recorded: bool = True
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class TracePart:
    """A rank's first events of a profile, JSON with commas between, compressed; or a `problem`."""

    events: bytes = b""
    size: int = 0
    count: int = 0
    dropped: int = 0
    problem: str = ""


class Spread(NamedTuple):
    """A part of a value that is spread over these ranks, and what it is: shape and placements."""

    ranks: tuple[int, ...]
    what: str


Changed = Mapping[int, Parts]
"""By an object's key, which of its parts a rank has changed since they were sent to it."""


def type_text(value: object) -> str:
    """Return the name of a value's type; of a module its own name: `module numpy`."""
    if isinstance(value, ModuleType):
        return f"module {value.__name__}"
    return type(value).__qualname__


@dataclass(frozen=True, slots=True)
class Replaced:
    """What a rank has under a name that the notebook has assigned again.

    `kind` is its type; it `is_changed` if the rank has bound or changed it since it was sent.
    `others` are variables of the rank that hold it, or parts of it.
    """

    kind: str
    is_changed: bool
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Inspected:
    """A rank's answer to what it has changed: objects by key, and what it has under names.

    The objects of `gone` have ended on the rank.
    """

    changed: Changed = field(default_factory=dict)
    names: Mapping[str, Replaced] = field(default_factory=dict)
    gone: tuple[int, ...] = ()


class Brought(NamedTuple):
    """A rank's values of some expressions; with parts `spread` over ranks nothing is packed yet.

    The expression `of` has no value: the name `missing` is, or there is another `problem`.
    """

    of: str = ""
    packed: Payload | None = None
    missing: str = ""
    problem: str = ""
    spread: tuple[Spread, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor, array or plain value within a value: `kind` is its type, dtype and shape.

    `digest` is "" where contents cannot be compared; a short value is the `text`; `size` is bytes.
    """

    kind: str
    digest: str
    text: str = ""
    size: int = 0
    count: int = 1


class Looked(NamedTuple):
    """A rank's value in parts, by their paths; or the name that it lacks, or another problem."""

    parts: Mapping[str, Part] = NOTHING
    missing: str = ""
    problem: str = ""


class Distance(NamedTuple):
    """How far two tensors are apart, in `differing` elements; of `odd` ones one has NaN or inf."""

    most: float
    differing: int
    odd: int = 0


class Input(NamedTuple):
    """What a watched module's forward got in a step of training: a digest, and its shapes."""

    step: int
    digest: int
    shapes: str


class Facts(NamedTuple):
    """What can differ on a rank before its parts do, after a step.

    `generators` are digests of random states, `ran` the modules whose forward ran in this step;
    `collectives` counts those of gloo that the rank has begun.
    """

    step: int
    generators: Mapping[str, str]
    ran: frozenset[str]
    collectives: int


class Watched(NamedTuple):
    """What a rank has noted of what is watched: `parts` by expression and path.

    They are of the step `found`, the first after which ranks differ, before it or in its buffers;
    0 where they are of the end, after all `steps`.  `facts` and `inputs` are the last ones until
    then.  `times` is the number of comparisons, `sharded` that of parts left out; `refused` has the
    reasons by expression.  `names` are those of parameters, by the start of a path in an optimizer.
    """

    steps: int
    times: int
    found: int
    parts: Mapping[str, Mapping[str, Part]]
    sharded: int = 0
    facts: tuple[Facts, ...] = ()
    inputs: tuple[Input, ...] = ()
    refused: Mapping[str, str] = NOTHING
    names: Mapping[str, str] = NOTHING
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Mesh:
    """A device mesh in a snapshot: its ranks, the last dimension changing fastest."""

    device: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    names: tuple[str, ...] | None = None

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Mesh:
        """Read it as it is in a manifest."""
        names = found["names"] and tuple(found["names"])
        return cls(found["device"], tuple(found["shape"]), tuple(found["ranks"]), names)

    def fitted(self, before: int, after: int) -> Mesh | None:
        """Return the same in a world of another size: its first dimension has another length.

        None for a mesh of some ranks only, or where the ranks do not divide.
        """
        if before == after:
            return self
        inner = math.prod(self.shape[1:])
        if self.ranks != tuple(range(before)) or after % inner:
            return None
        shape = after // inner, *self.shape[1:]
        return Mesh(self.device, shape, tuple(range(after)), self.names)

    def __str__(self) -> str:
        return f"a mesh of {' x '.join(map(str, self.shape))} ranks"


class Written(NamedTuple):
    """A rank's file of a snapshot, or a `problem`; restoring it needs the `meshes`.

    It has `names`, and also what they need (`also`); `left_out` says what it lacks, and why;
    `versions` are those of the process that wrote it.
    """

    problem: str = ""
    names: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    left_out: Mapping[str, str] = NOTHING
    size: int = 0
    digest: str = ""
    versions: Mapping[str, str] = NOTHING
    meshes: tuple[Mesh, ...] = ()


class Loaded(NamedTuple):
    """A rank has read its file, unless there is one of these, for the user.

    `distrust` is because another user could have written it.
    """

    problem: str = ""
    damage: str = ""
    distrust: str = ""
