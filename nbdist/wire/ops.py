"""What ops of a worker return: `nbdist.worker.ops` makes these, the notebook reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Cleaned:
    """A worker's memory in bytes before and after it released what is not needed.

    `memory` is PSS, in which shared pages count in part; `on_gpu` what tensors take of the
    rank's GPU, `held_on_gpu` that and what torch keeps for the next ones, 0 without a GPU.
    """

    memory: tuple[int, int]
    on_gpu: tuple[int, int] = (0, 0)
    held_on_gpu: tuple[int, int] = (0, 0)


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


@dataclass(frozen=True, slots=True)
class Written:
    """A rank's file of a snapshot: names, what goes along with them, what was left out and why.

    With a `problem`, for the user, there is no file.  `torch` is its version; `meshes` are
    those that restoring it needs.
    """

    problem: str = ""
    names: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    size: int = 0
    digest: str = ""
    torch: str = ""
    meshes: tuple[Mesh, ...] = ()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A rank has read its file, unless there is one of these, for the user.

    `damage` of the file, `distrust` because another user could have written it, any other
    `problem` with what is in it.
    """

    problem: str = ""
    damage: str = ""
    distrust: str = ""
