"""The values that ops, functions of nbdist that run on the ranks, return to the notebook."""

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
    """A worker's memory in bytes, as pairs: before and after the worker released unused memory.

    `memory` is PSS: a page that n processes share counts as 1/n.  `on_gpu` is the memory of
    tensors, and `held_on_gpu` all memory that torch has reserved, its cache included.  Without a
    GPU the last two are 0.
    """

    memory: tuple[int, int]
    on_gpu: tuple[int, int] = (0, 0)
    held_on_gpu: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class NameMemory:
    """Memory of one large value, such as a tensor, or of `count` tensors, to which a name leads.

    `name` is the expression that leads there, such as "model.weight".  `size` has the bytes of
    whole storages, even if a tensor is a view of a part of its storage.
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
    """The most bytes that were in use at a time while the last cell ran.

    If `is_bound` is True, `size` is only an upper bound: it may have been reached before the cell.
    """

    size: int
    is_bound: bool = False


class GpuMemory(NamedTuple):
    """Memory of the rank's GPU in bytes.

    `used` is the memory that all processes use, `tensors` the memory of this rank's tensors, and
    `peak` the largest value that `tensors` had.
    """

    device: str
    used: int
    total: int
    tensors: int
    peak: Peak


class Memory(NamedTuple):
    """How much memory a rank uses on the CPU and the GPU, and what holds most of it; in bytes."""

    pss: int
    peak: Peak
    # The limit with the least free memory: the machine's, a control group's or `ulimit -v`.
    limit: MemoryLimit | None
    gpu: GpuMemory | None
    held: tuple[NameMemory, ...]  # the largest values in variables, such as tensors
    tensors: int  # bytes of all such values, also of smaller tensors
    # The largest such values that only recent tracebacks or `Out` hold, and no variable.
    kept: tuple[NameMemory, ...]
    kept_size: int  # bytes of all such values, also of smaller tensors
    is_whole: bool = True  # False if the search ended before everything was searched


class Met(NamedTuple):
    """A collective of some `size` bytes that a rank has begun, with its `number` in its `group`."""

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
    # The begin and end of waits in Python code.  Waits in C++ code, as in the backward of a DDP
    # module, are not here; only their collectives are in `met`.
    waits: tuple[tuple[int, int], ...]
    waited_ns: int  # the sum of all waits in Python code, also of waits that `waits` lacks
    met: tuple[Met, ...]
    is_recorded: bool = True  # False if this torch's Flight Recorder does not record gloo
    is_whole: bool = True  # False if `waits` or `met` may lack entries because they are limited


@dataclass(frozen=True, slots=True)
class TracePart:
    """A rank's part of a profile by torch's profiler.

    `events` has the first `count` events as JSON, separated by commas and compressed.  `size` is
    the number of bytes before compression, and `dropped` the number of later events, which are left
    out.  If the profiler's own file is too large, there are no events, and only `problem` is set: a
    text that says so.
    """

    events: bytes = b""
    size: int = 0
    count: int = 0
    dropped: int = 0
    problem: str = ""


class Spread(NamedTuple):
    """A DTensor inside a value that the notebook has requested; each of `ranks` has a part of it.

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
    """A rank's old value of a variable that gets a new value, mostly from the notebook.

    `kind` is the old value's type.  `is_changed` is False only if the old value is known to be as
    the notebook sent it.  `others` are other variables of the rank that lead to the old value, or
    to a parameter in it.
    """

    kind: str
    is_changed: bool
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Inspected:
    """A rank's answer to the question which of the notebook's objects the rank has changed.

    `changed` has the changed parts by the key of the object.  `names` describes the rank's values
    of the variables that the notebook asked about.  `gone` has the keys of objects that no longer
    exist on the rank.
    """

    changed: Changed = field(default_factory=dict)
    names: Mapping[str, Replaced] = field(default_factory=dict)
    gone: tuple[int, ...] = ()


class Brought(NamedTuple):
    """A rank's values of some expressions, pickled together in `packed`, or why there are none.

    Without values, `packed` is None.  Then the value of the expression `of` cannot be sent, and
    `missing` is an undefined name in the expression, or `problem` says another reason.  Or the
    values have DTensors, whose parts the ranks must first put together; `spread` lists them.
    """

    of: str = ""
    packed: Payload | None = None
    missing: str = ""
    problem: str = ""
    spread: tuple[Spread, ...] = ()


@dataclass(frozen=True, slots=True)
class ValueDigest:
    """The digest of a tensor, array or plain value inside a value, for comparing ranks.

    `kind` is the type, or dtype and shape.  `text` shows a plain value, or its beginning.  `size`
    is the number of bytes, 0 if unknown, and `count` the number of elements.  `digest` is "" if the
    contents cannot be compared.
    """

    kind: str
    digest: str
    text: str = ""
    size: int = 0
    count: int = 1


class Looked(NamedTuple):
    """The digests of the parts of a rank's value, by the path of the part, for comparing ranks.

    If the value has no digests, `missing` is an undefined name in the expression, or `problem` says
    another reason.
    """

    parts: Mapping[str, ValueDigest] = NO_VALUES
    missing: str = ""
    problem: str = ""


class Distance(NamedTuple):
    """How two tensors differ: the number of `differing` elements, and how far they are apart.

    `most` is the largest finite distance between two elements.  `odd` is the number of differing
    elements whose distance is NaN or infinite.
    """

    most: float
    differing: int
    odd: int = 0


class Input(NamedTuple):
    """The digest and shapes of a module's input in one forward pass, observed by `--watch`."""

    step: int
    digest: int
    shapes: str


class Facts(NamedTuple):
    """Facts about a rank after a step of a watched cell, to find the cause of a difference.

    These facts may differ between ranks before parameters do.  `generators` has digests of the
    states of random generators.  `ran` has the names of the modules whose forward ran in the step.
    `collectives` is the number of gloo's collectives that the rank has begun so far.
    """

    step: int
    generators: Mapping[str, str]
    ran: frozenset[str]
    collectives: int


class Watched(NamedTuple):
    """A rank's record of a watch (`--watch`), which compares values of ranks after steps of a cell.

    `parts` has the digests of the watched values, by expression and path, as they were when the
    difference was found, or at the end of the watch if no difference was found.
    """

    steps: int  # how many steps the cell has made
    times: int  # how many steps were compared with other ranks
    found: int  # the first compared step after which ranks differ, 0 for none
    parts: Mapping[str, Mapping[str, ValueDigest]]
    sharded: int = 0  # how many parts were left out because they are sharded
    facts: tuple[Facts, ...] = ()  # the facts of the last compared steps until `found`
    inputs: tuple[Input, ...] = ()  # the inputs of the last forwards until `found`
    refused: Mapping[str, str] = NO_VALUES  # by expression: the reason for not watching its value
    # By the beginning of a path in a watched optimizer, such as "optimizer state[3]": the name of
    # the parameter whose state is there.
    names: Mapping[str, str] = NO_VALUES
    problem: str = ""  # the reason for an early end of the watch


@dataclass(frozen=True, slots=True)
class Mesh:
    """A torch device mesh as a snapshot describes it; `ranks` has its ranks as a flat list."""

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
        """Return the mesh for a world that had `before` ranks and has `after` ranks now.

        If the world's size has changed, only the mesh's first dimension changes.  Returns None if
        this is impossible, because the mesh does not have all ranks in order, or because the
        product of its other dimensions does not divide `after`.
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
    """The result of writing a rank's file of a snapshot, or the `problem` that prevented it.

    The file has the variables `names`, and small variables that functions and classes in them use
    (`also`).  `left_out` has, by name, the reasons why variables are not in the file.  `versions`
    has the versions of Python and packages in the process that wrote the file.  A world needs
    device meshes like `meshes` to restore the file.
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

    A text is the reason of a failure, for the user.  `distrust` is set if another user could have
    written the file, `damage` if the file cannot be read or is not as it was written, and `problem`
    for any other reason.
    """

    problem: str = ""
    damage: str = ""
    distrust: str = ""
