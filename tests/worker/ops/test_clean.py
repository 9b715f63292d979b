"""Tests of `nbdist.worker.ops.clean`: what a worker lets go of, and what it keeps."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from nbdist.world.world import World
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world

MEGABYTE = 2**20


@pytest.fixture(scope="module")
def world(new_world: NewWorld) -> Iterator[World]:
    with new_world(2) as started:
        yield started


def memory_of(world: World) -> int:
    return sum(psutil.Process(pid).memory_info().rss for pid in world.pids.values())


def test_clean(world: World) -> None:
    """What a failed cell's traceback holds, and what cells have shown, is let go."""
    hold = "big = torch.empty(200 * 2**20, dtype=torch.uint8).fill_(1)"
    with pytest.raises(ZeroDivisionError):
        world.execute(f"def f():\n    {hold}\n    1 / 0\nf()")
    world.execute(f"{hold}\nbig")
    world.execute("del big")
    world.execute(f"{hold}\ncycle = [big]; cycle.append(cycle)\ndel big, cycle")
    # What lies between pages that are in use the C library keeps, unless told otherwise.
    world.execute("many = [bytes(2000) for _ in range(100_000)]\nlast = many[-1]\ndel many")
    kept = memory_of(world)
    for cleaned in world.clean():
        before, after = cleaned.memory
        assert before - after > 750 * MEGABYTE
        assert (cleaned.on_gpu, cleaned.held_on_gpu) == ((0, 0), (0, 0))
    assert kept - memory_of(world) > 1500 * MEGABYTE
    assert (
        world.gather("(_, __, Out, [n for n in globals() if n[1:].isdigit()])")
        == [("", "", {}, [])] * 2
    )


def test_clean_keeps_variables(world: World) -> None:
    """Variables stay, also such that hold an exception; tracebacks of new errors are whole."""
    world.execute("x = [1]\ntry: 1 / 0\nexcept ZeroDivisionError as error: kept = error")
    world.clean([1])
    assert world.gather("(x, str(kept))") == [([1], "division by zero")] * 2
    with pytest.raises(ZeroDivisionError) as caught:
        world.execute("1 / 0")
    assert "----> 1 1 / 0" in caught.value.__notes__[0]
