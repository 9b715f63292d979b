"""The values that ops return: made by `nbdist.worker.ops` and `nbdist.tools` for the notebook."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

from nbdist.system.limits import MemoryLimit
from nbdist.values.payload import Payload
from nbdist.values.states import ChangedParts
from nbdist.wire.frames import NO_VALUES
from nbdist.words import count


class Cleaned(NamedTuple):
    """A worker's bytes before and after it released unused memory.

    `memory` is PSS, `on_gpu` the memory of tensors, and `held_on_gpu` all memory that torch has
    reserved, its cache included.  Without a GPU the last two are 0.
    """

    memory: tuple[int, int]
    on_gpu: tuple[int, int] = (0, 0)
    held_on_gpu: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class NameMemory:
    """Memory to which a name leads: of one tensor or other large value, or of `count` tensors.

    `size` counts the bytes of whole storages, also if a tensor is a view of a part.
    """

    name: str
    size: int
    shape: tuple[int, ...] = ()
    dtype: str = ""
    device: str = "cpu"
    count: int = 1

    @property
    def kind(self) -> str:
        """A description of the object: `(1024, 64) float32`, `24 tensors`."""
        several = count(self.count, "tensor") if self.count > 1 else ""
        return " ".join(filter(None, [several, str(self.shape or ""), self.dtype]))


class Peak(NamedTuple):
    """The most bytes in use at a time; `is_bound` is True if the last cell may have used fewer.

    In that case `size` was perhaps reached before the last cell began.
    """

    size: int
    is_bound: bool = False


class GpuMemory(NamedTuple):
    """Memory of the rank's GPU in bytes.

    `used` is of all processes, `tensors` of this rank's tensors, and `peak` the most of the latter.
    """

    device: str
    used: int
    total: int
    tensors: int
    peak: Peak


class Memory(NamedTuple):
    """The use of a rank's memory, in bytes."""

    pss: int
    peak: Peak
    # The limit with the least free memory: the machine's, its control group's or `ulimit -v`.
    limit: MemoryLimit | None
    gpu: GpuMemory | None
    held: tuple[NameMemory, ...]  # the largest tensors and arrays in variables
    tensors: int  # bytes of all tensors and arrays in variables, in `held` or not
    kept: tuple[NameMemory, ...]  # the largest that only the last traceback or `Out` holds
    kept_size: int  # bytes of all that only they hold
    is_whole: bool = True  # False if not everything was searched


class Met(NamedTuple):
    """A collective of `size` bytes that a rank has begun, with its `number` in its `group`."""

    group: str
    number: int
    name: str
    at_ns: int
    size: int


class RankTimes(NamedTuple):
    """A rank's last cell: when it ran, waited for other ranks and began collectives.

    Times are in nanoseconds since 1970.
    """

    began_ns: int  # 0 if no cell has run
    ended_ns: int
    # Waits in Python code.  Waits in C++ code, as in a DDP module's backward, show in `met` alone.
    waits: tuple[tuple[int, int], ...]
    waited_ns: int  # the sum of all waits in Python code
    met: tuple[Met, ...]
    is_recorded: bool = True  # False if torch's Flight Recorder does not record gloo
    is_whole: bool = True  # False if `waits` or `met` may lack entries: there were too many


@dataclass(frozen=True, slots=True)
class TracePart:
    """A rank's part of a profile, or the `problem` that prevents it.

    `events` has the first `count` events as compressed JSON, separated by commas.  `size` is the
    number of bytes before compression, and `dropped` that of the events that are left out.
    """

    events: bytes = b""
    size: int = 0
    count: int = 0
    dropped: int = 0
    problem: str = ""


class Spread(NamedTuple):
    """A DTensor inside a value: each of these ranks has only a part of the tensor.

    `what` describes the tensor: shape, dtype and placements.
    """

    ranks: tuple[int, ...]
    what: str


Changed = Mapping[int, ChangedParts]
"""By an object's key: the parts that a rank has changed since the notebook sent the object."""


def type_text(value: object) -> str:
    """Return the name of a value's type; for a module a text such as `module numpy`."""
    if isinstance(value, ModuleType):
        return f"module {value.__name__}"
    return type(value).__qualname__


@dataclass(frozen=True, slots=True)
class Replaced:
    """A rank's value of a variable that the notebook has assigned again.

    `kind` is the value's type.  `is_changed` is True if the rank has bound the variable, or changed
    the value since the notebook sent the value.  `others` are variables of the rank that lead
    to the value too, or to a parameter in the value.
    """

    kind: str
    is_changed: bool
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Inspected:
    """The changes of a rank to objects, and its values of names, about which the notebook asked.

    `gone` has the keys of objects that no longer exist on the rank.
    """

    changed: Changed = field(default_factory=dict)
    names: Mapping[str, Replaced] = field(default_factory=dict)
    gone: tuple[int, ...] = ()


class Brought(NamedTuple):
    """A rank's values of some expressions, `packed` together.

    If the value of an expression (`of`) cannot be sent, nothing is packed: `missing` is an
    undefined name in the expression, or `problem` another reason.  If DTensors in the values are
    `spread` over ranks, nothing is packed either: the ranks must first put their parts together.
    """

    of: str = ""
    packed: Payload | None = None
    missing: str = ""
    problem: str = ""
    spread: tuple[Spread, ...] = ()


@dataclass(frozen=True, slots=True)
class ValueDigest:
    """A tensor, array or plain value inside a value, for comparing ranks.

    `kind` has the type, or dtype and shape; `text` shows a plain value, or its beginning; `size`
    has bytes, 0 if unknown.  `digest` is "" if the contents cannot be compared.
    """

    kind: str
    digest: str
    text: str = ""
    size: int = 0
    count: int = 1


class Looked(NamedTuple):
    """The parts of a rank's value by path; or the name that is `missing`, or another `problem`."""

    parts: Mapping[str, ValueDigest] = NO_VALUES
    missing: str = ""
    problem: str = ""


class Distance(NamedTuple):
    """How two tensors differ: in `differing` elements, which are at most `most` apart.

    For `odd` of these elements the distance is NaN or infinite; `most` leaves those elements out.
    """

    most: float
    differing: int
    odd: int = 0


class Input(NamedTuple):
    """The input of a watched module's forward in a step of training: its digest and shapes."""

    step: int
    digest: int
    shapes: str


class Facts(NamedTuple):
    """Values that may differ between ranks after a step whose parameters are still equal.

    `generators` has digests of random states, `ran` the modules whose forward ran in the step;
    `collectives` counts the collectives of gloo that the rank has begun.
    """

    step: int
    generators: Mapping[str, str]
    ran: frozenset[str]
    collectives: int


class Watched(NamedTuple):
    """The record of a rank about a watch (`--watch`).

    `parts` has the watched values by expression and path: after step `found`, or at the end of the
    watch if no difference was found.
    """

    steps: int
    times: int  # comparisons with other ranks
    found: int  # the first compared step after which ranks differ, 0 for none
    parts: Mapping[str, Mapping[str, ValueDigest]]
    sharded: int = 0  # parts that were left out because they are sharded
    facts: tuple[Facts, ...] = ()  # of the last comparisons until `found`
    inputs: tuple[Input, ...] = ()  # of the last forwards until `found`
    refused: Mapping[str, str] = NO_VALUES  # by expression: the reason for not watching its value
    names: Mapping[str, str] = NO_VALUES  # of parameters, by the beginning of an optimizer's path
    problem: str = ""  # the reason for an early end of the watch


@dataclass(frozen=True, slots=True)
class Mesh:
    """A device mesh in a snapshot; `ranks` are in the order of a flattened array of this shape."""

    device: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    names: tuple[str, ...] | None = None

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Mesh:
        """Read a mesh from a snapshot's manifest."""
        names = entry["names"] and tuple(entry["names"])
        return cls(entry["device"], tuple(entry["shape"]), tuple(entry["ranks"]), names)

    def fitted(self, before: int, after: int) -> Mesh | None:
        """Return the mesh for a world of `after` ranks, with a first dimension of another length.

        If the size changes, the mesh must have all ranks in order and fit `after`: None if not.
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
    """A rank's file of a snapshot, or the `problem` that prevented it.

    The file has the variables `names`, and small values that functions in them use (`also`).
    `left_out` has, by name, the reasons why variables are not in the file.  `versions` are those of
    the process that wrote the file.  Restoring the file needs device meshes like `meshes`.
    """

    problem: str = ""
    names: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    left_out: Mapping[str, str] = NO_VALUES
    size: int = 0
    digest: str = ""
    versions: Mapping[str, str] = NO_VALUES
    meshes: tuple[Mesh, ...] = ()


class Loaded(NamedTuple):
    """The result of reading a rank's file of a snapshot: success if all three texts are empty.

    Each text is a message to the user.  `distrust`: another user could have written the file;
    `damage`: the file cannot be read, or is not as it was written.
    """

    problem: str = ""
    damage: str = ""
    distrust: str = ""
