"""What cells cost: one that does nothing, a collective, the first training step of a world."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import pytest

from nbdist.world.world import World
from tests.faults import collectives
from tests.gpu import lab
from tests.gpu.conftest import Figure

pytestmark = [lab.NCCL, pytest.mark.shared_world, pytest.mark.timeout(75)]

STEP = "net(torch.ones(2, 64)).sum().backward(); optimizer.step(); net.module.weight.sum().item()"


def seconds(run: Callable[[], object]) -> float:
    started = time.monotonic()
    run()
    return time.monotonic() - started


def test_cells(world: World, figure: Figure) -> None:
    """Medians of fifty, after the first."""
    for name, source in {"pass": "pass", "all_reduce": lab.SUM}.items():
        world.execute(source)
        took = median(seconds(lambda source=source: world.execute(source)) for _ in range(50))
        figure(f"execute of `{name}`, n=4", 1000 * took, "ms")


def test_first_step(world: World, figure: Figure) -> None:
    """A DDP model is made, and takes its first step, then another one."""
    world.restart()
    world.execute(lab.ON_DEVICE)
    figure("model and first step", seconds(lambda: world.execute(collectives.MODEL + STEP)), "s")
    figure("the next step", seconds(lambda: world.execute(STEP)), "s")
    assert len({*world.gather("net.module.weight.sum().item()")}) == 1
