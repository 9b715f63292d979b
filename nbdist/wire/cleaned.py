"""What `%dist_clean` found in one worker."""

from __future__ import annotations

from dataclasses import dataclass

CLEAN = "__import__('nbdist.worker.cleaning').worker.cleaning.clean()"
"""The expression that has a worker let go of memory; its value is `Cleaned`."""


@dataclass(frozen=True, slots=True)
class Cleaned:
    """A worker's memory in bytes before and after it let go of what nobody needs.

    `memory` is PSS, in which shared pages count in part; `on_gpu` what tensors take of the
    rank's GPU, `held_on_gpu` that and what torch keeps for the next ones, 0 without a GPU.
    """

    memory: tuple[int, int]
    on_gpu: tuple[int, int] = (0, 0)
    held_on_gpu: tuple[int, int] = (0, 0)
