"""What ops of a worker return: `nbdist.worker.ops` makes these, the notebook reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
class Written:
    """A rank's file of a snapshot: names, what goes along with them, what was left out and why.

    With a `problem`, for the user, there is no file.  `torch` is its version.
    """

    problem: str = ""
    names: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    size: int = 0
    digest: str = ""
    torch: str = ""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A rank has read its file, unless there is one of these, for the user.

    `damage` of the file, `distrust` because another user could have written it, any other
    `problem` with what is in it.
    """

    problem: str = ""
    damage: str = ""
    distrust: str = ""
