"""Tests of `nbdist.worker.ops.memory`: what it is used for, what an error says, what is freed."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from nbdist.world.world import World
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world

MEGABYTE = 2**20
ABSURD = "torch.empty(1 << 50)"


@pytest.fixture(scope="module")
def world(new_world: NewWorld) -> Iterator[World]:
    with new_world(2, show=False) as started:
        yield started


def test_memory(world: World) -> None:
    """Names that the worker itself has are not told, the user's are; and the cell's peak."""
    world.execute(
        "model = torch.nn.Linear(512, 256)\n"
        "gone = torch.ones(400 * 2**20, dtype=torch.uint8)\n"
        "del gone\n"
        "mine = torch.ones((rank + 1) * 10 * 2**20, dtype=torch.uint8)"
    )
    for rank, memory in enumerate(world.call("memory")):
        first, second, *_ = memory.held
        assert (first.name, first.size) == ("mine", (rank + 1) * 10 * MEGABYTE)
        assert (second.name, second.shape) == ("model.weight", (256, 512))
        assert not memory.peak.is_bound
        assert memory.peak.size > memory.pss + 350 * MEGABYTE
        assert memory.kept == ()
    world.execute("pass")
    assert [each.peak.is_bound for each in world.call("memory")] == [True, True]


def test_an_error_says_what_the_memory_is_used_for(world: World) -> None:
    """Of the rank that failed: used of total, by name, and what only the traceback holds."""
    world.execute("weights = torch.ones(1000, 1000)")
    failing = f"def step():\n    batch = torch.ones(500, 1000)\n    {ABSURD}\nif rank == 1: step()"
    with pytest.raises(RuntimeError) as caught:
        world.execute(failing)
    said = caught.value.__notes__[0].splitlines()
    (at,) = (i for i, line in enumerate(said) if line.startswith("rank 1: "))
    assert " in use, this rank " in said[at]
    assert any(line.endswith("  weights (1000, 1000) float32") for line in said[at:])
    assert said[-1].endswith("batch in step(), line 3 (500, 1000) float32")
    assert "`%dist_memory --free` frees it" in said[-2]
    assert [len(each.kept) for each in world.call("memory")] == [0, 1]
    world.clean()
    assert [len(each.kept) for each in world.call("memory")] == [0, 0]


def test_a_function_that_is_called(world: World) -> None:
    """Says it as well: no error message of IPython's is sent of it."""

    def fill() -> None:
        bytes(1 << 60)

    with pytest.raises(MemoryError) as caught:
        world.run(fill)
    assert "in use, this rank" in caught.value.__notes__[0]


def test_under_a_limit(world: World) -> None:
    """Where the process may have no more, there is still room to say so."""
    limit = (
        "import resource; del mine\n"
        "before = resource.getrlimit(resource.RLIMIT_AS)\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 300 * 2**20, before[1]))\n"
        "many = []\n"
        "while True: many.append(bytes(20 * 2**20))"
    )
    with pytest.raises(MemoryError) as caught:
        world.execute(limit)
    world.execute("resource.setrlimit(resource.RLIMIT_AS, before); del many")
    said = caught.value.__notes__[0]
    assert "ulimit -v has " in said
    assert "  20 MiB  many[0] bytes" in said
    assert world.gather("rank") == [0, 1]


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
