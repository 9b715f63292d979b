"""The values that ops return: made by `nbdist.worker.ops` and tools, read in the notebook."""

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

    `memory` is PSS, `on_gpu` the memory of tensors, `held_on_gpu` all that torch has reserved,
    its cache included; both are 0 without a GPU.
    """

    memory: tuple[int, int]
    on_gpu: tuple[int, int] = (0, 0)
    held_on_gpu: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class NameMemory:
    """Memory that a variable holds: of one tensor or array, or of `count` tensors.

    `size` counts the bytes of the whole storage, also if the tensor is a view of a part.
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
    """The most bytes in use at a time; `is_bound` if that may have been before the last cell.

    In that case the peak of the last cell is at most `size`.
    """

    size: int
    is_bound: bool = False


class GpuMemory(NamedTuple):
    """Memory of the rank's GPU in bytes.

    All processes together use `used` of `total`; `tensors` are this rank's, with their `peak`.
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
    # The tightest of the machine's memory, its control group's and `ulimit -v`.
    limit: MemoryLimit | None
    gpu: GpuMemory | None
    held: tuple[NameMemory, ...]  # the largest tensors and arrays in variables
    tensors: int  # bytes of all tensors and arrays in variables, in `held` or not
    kept: tuple[NameMemory, ...]  # the largest that only the last traceback or `Out` holds
    kept_size: int  # bytes of all that only they hold
    is_whole: bool = True  # False if the time did not suffice to search everything


class Met(NamedTuple):
    """A collective that a rank has begun, with its `number` in its `group`, of `size` bytes."""

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
    is_whole: bool = True  # False if `waits` or `met` lacks entries, because of too many


@dataclass(frozen=True, slots=True)
class TracePart:
    """A rank's part of a profile, or the `problem` that prevents it.

    `events` has the first `count` events as compressed JSON, separated by commas, `size` bytes
    uncompressed; `dropped` counts the events after them.
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
"""By an object's key: the parts of it that a rank has changed since they were sent to the rank."""


def type_text(value: object) -> str:
    """Return the name of a value's type, or for a module `module numpy`."""
    if isinstance(value, ModuleType):
        return f"module {value.__name__}"
    return type(value).__qualname__


@dataclass(frozen=True, slots=True)
class Replaced:
    """A rank's value of a variable that the notebook has assigned again.

    `kind` is the value's type; `is_changed` tells whether the rank has bound the variable or
    changed the value since it was sent.  `others` are the rank's other variables that hold the
    value or parts of it.
    """

    kind: str
    is_changed: bool
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Inspected:
    """The changes of a rank to the objects and names that the notebook has asked about.

    `gone` has the keys of objects that no longer exist on the rank.
    """

    changed: Changed = field(default_factory=dict)
    names: Mapping[str, Replaced] = field(default_factory=dict)
    gone: tuple[int, ...] = ()


class Brought(NamedTuple):
    """A rank's values of some expressions, `packed` together.

    Nothing is packed if an expression has no value: then `of` is the expression, and `missing` the
    undefined name that it needs, or `problem` another reason.  Nothing is packed either if parts of
    a value are `spread` over ranks: the ranks must first put the parts together.
    """

    of: str = ""
    packed: Payload | None = None
    missing: str = ""
    problem: str = ""
    spread: tuple[Spread, ...] = ()


@dataclass(frozen=True, slots=True)
class ValueDigest:
    """A tensor, array or plain value inside a value, for comparing ranks.

    `kind` has type, dtype and shape, `text` a short value itself, `size` its bytes.  `digest` is
    "" if the contents cannot be compared.
    """

    kind: str
    digest: str
    text: str = ""
    size: int = 0
    count: int = 1


class Looked(NamedTuple):
    """The parts of a rank's value by path; without a value, the name `missing`, or a `problem`."""

    parts: Mapping[str, ValueDigest] = NO_VALUES
    missing: str = ""
    problem: str = ""


class Distance(NamedTuple):
    """The difference of two tensors: `differing` elements, at `most` so far apart.

    In `odd` of them one tensor has NaN or infinity; `most` leaves these out.
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

    `parts` has the watched values by expression and path.  They are from step `found`, or
    from the end of the watch if no difference was found.
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
        """Return the mesh for a world of another size, with a first dimension of another length.

        None if the mesh does not have all ranks, or if their number cannot be divided so.
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

    The file has the variables `names`, and those that they need (`also`); `left_out` has the
    reasons for others by name.  `versions` are of the process that wrote the file; restoring it
    needs device meshes like `meshes`.
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
