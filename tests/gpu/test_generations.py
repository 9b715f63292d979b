"""The group is formed anew again and again, with nothing that grows."""

from __future__ import annotations

import time

import pytest

from nbdist.world.world import World
from tests.gpu import lab
from tests.gpu.conftest import Figure

pytestmark = [pytest.mark.shared_world, pytest.mark.timeout(100)]

GENERATIONS = {"gloo": 200, "nccl": 100}
"""With nccl every generation takes two of the 235 types that torch leaves free."""

LONGEST = 35.0
"""Seconds after which it is enough, on a slow machine."""

SUM = "t = torch.ones(1); dist.all_reduce(t); assert t.item() == world_size"

HELD = "(len(os.listdir('/proc/self/fd')), len(os.listdir('/proc/self/task')))"


def test_many_generations(world: World, kind: str, figure: Figure) -> None:
    """A failure each, and an all_reduce that is right; memory on the device stays as it is."""
    before, started = dict(world.pids), time.monotonic()
    world.execute("import os")
    held, used = [], []
    done = 0
    while done < GENERATIONS[kind] and time.monotonic() - started < LONGEST:
        lab.ends(world, f"if rank == 1: raise ValueError('bad')\n{SUM}")
        world.execute(SUM)
        held.append(world.gather(HELD)[0])
        used.append(lab.used_on_device())
        done += 1
    assert world.pids == before
    figure(f"{kind}: generations", done, "")
    figure(f"{kind}: each", (time.monotonic() - started) / done, "s")
    first, last = held[min(5, done - 1)], held[-1]
    figure(f"{kind}: descriptors and threads more", sum(last) - sum(first), "")
    figure(f"{kind}: device memory more", (used[-1] - used[min(5, done - 1)]) / 2**20, "MiB")
    assert last[0] <= first[0] + 4
    assert used[-1] <= used[min(5, done - 1)] + (96 << 20)
