"""Ranks die and fail again and again, and the use of resources does not grow."""

from __future__ import annotations

import time

import pytest

from nbdist.world.world import World
from tests.gpu import lab
from tests.gpu.conftest import Figure

pytestmark = [lab.NCCL, pytest.mark.shared_world(2), pytest.mark.timeout(150)]

TIMES = 50

LONGEST = {"os._exit(3)": 100.0, "raise ValueError('bad')": 25.0}
"""Seconds after which a slow machine may stop with fewer times."""

HELD = """
import gc, os, psutil
gc.collect()
held = (
    len(os.listdir("/proc/self/fd")),
    len(os.listdir("/proc/self/task")),
    psutil.Process().memory_full_info().uss >> 20,
)
"""


@pytest.mark.parametrize("end", LONGEST)
def test_nothing_grows_with_deaths_and_failures(world: World, figure: Figure, end: str) -> None:
    """After fifty deaths or failures the survivor and the device hold as much as before."""
    before, began = world.pids[0], time.monotonic()
    held, used = [], []
    filled = f"filled = torch.ones({lab.big() // 16})"  # 256 MiB that must be released again
    while len(held) < TIMES and time.monotonic() - began < LONGEST[end]:
        lab.ends(world, f"import os\n{filled}\nif rank == 1: {end}\n{lab.SUM}")
        world.execute(f"{lab.SUM}\n{HELD}")
        held.append(world.gather("held", ranks=[0])[0])
        used.append(lab.used_on_device() >> 20)
    assert world.pids[0] == before
    figure(f"{end}: times", len(held), "")
    figure(f"{end}: each", (time.monotonic() - began) / len(held), "s")
    early = min(5, len(held) - 1)
    more = [last - first for first, last in zip(held[early], held[-1], strict=True)]
    units = ("descriptors", "threads", "MiB of memory")
    for unit, number in zip(units, more, strict=True):
        figure(f"{end}: more {unit}", number, "")
    figure(f"{end}: more on the device", used[-1] - used[early], "MiB")
    assert more[0] <= 4
    assert more[1] <= 4 or lab.TORCH < (2, 14)  # threads of gloo, two each time
    assert more[2] <= 64
    assert used[-1] <= used[early] + 96
