"""The GPU's memory: who has how much of it, and that it comes back."""

from __future__ import annotations

import os
import signal

import pytest

from nbdist.errors import WorkerDied, WorkerError
from nbdist.world.states import State
from nbdist.world.world import World
from tests.gpu import lab
from tests.gpu.conftest import Figure
from tests.waiting import wait_until

pytestmark = [pytest.mark.shared_world, pytest.mark.timeout(75)]

GIB = 1 << 30
BYTES = GIB if lab.DEVICE == "cuda" else 16 << 20
SLACK = 96 << 20
BACK_WITHIN = 10.0

SUM = "t = torch.ones(1); dist.all_reduce(t); assert t.item() == world_size"

FILL = f"held = torch.zeros({BYTES}, dtype=torch.uint8)"


def test_a_killed_rank_leaves_nothing(world: World) -> None:
    """What it had on the GPU is free as soon as it is replaced."""
    world.execute(SUM)
    before = lab.used_on_device()
    world.execute(f"if rank == 1:\n    {FILL}\n    held.sum().item()")
    if lab.DEVICE == "cuda":
        assert lab.used_on_device() > before + BYTES // 2
    os.kill(world.pids[1], signal.SIGKILL)

    def is_known() -> bool:
        world.session.receive(0.1)
        return world.state is State.BROKEN

    wait_until(is_known, "the death is seen")
    world.execute(SUM)
    wait_until(lambda: lab.used_on_device() < before + SLACK, "its memory comes back", BACK_WITHIN)


def test_faults_leave_nothing(world: World, kind: str, figure: Figure) -> None:
    """After eight failures and deaths there is as much in use as after the first two."""
    used = []
    for number in range(10):
        end = "os._exit(3)" if number % 5 == 1 else "raise ValueError('bad')"
        lab.ends(world, f"import os\nif rank == 1: {end}\n{SUM}")
        world.execute(SUM)
        used.append(lab.used_on_device())
    figure(f"{kind}: device memory, 8 faults later", (used[-1] - used[1]) / 2**20, "MiB more")
    assert used[-1] <= used[1] + SLACK


def test_clean(world: World) -> None:
    """It gives back what the last traceback and `Out` keep alive, and torch's cached memory."""
    world.clean()
    with pytest.raises(WorkerError, match="bad"):
        world.execute(f"def keep():\n    {FILL}\n    raise ValueError('bad')\nkeep()")
    world.execute(f"torch.ones({BYTES // 4})")  # `Out` has it
    cleaned = world.clean()
    for had in cleaned:
        if lab.DEVICE == "cpu":
            assert had.memory[0] - had.memory[1] > 1.5 * BYTES
            continue
        assert had.on_gpu[0] >= 2 * BYTES
        assert had.on_gpu[1] < SLACK
        assert had.held_on_gpu[1] < SLACK


def test_status_names_the_devices(world: World, kind: str) -> None:
    """Each rank's own GPU."""
    del kind
    assert [each.device for each in world.status()] == world.gather("str(device)")


def test_out_of_memory(world: World) -> None:
    """It is that rank's exception, and the others and the group go on."""
    if lab.DEVICE == "cpu":
        pytest.skip("there is no such limit on the CPU")
    _, error = lab.ends(world, f"if rank == 1: torch.zeros(2**46, dtype=torch.uint8)\n{SUM}")
    assert not isinstance(error, WorkerDied)
    assert "OutOfMemoryError" in str(error)
    world.clean()
    world.execute(SUM)


def test_an_error_says_what_the_memory_is_used_for(world: World) -> None:
    """By name, of the rank that failed, with its GPU's used of total; and so it can be asked."""
    source = (
        "weights = torch.ones(1000, 1000)\ndef step():\n    batch = torch.ones(500, 1000)\n"
        "    torch.empty(1 << 50)\nif rank == 1: step()"
    )
    with pytest.raises(RuntimeError) as caught:
        world.execute(source)
    said = caught.value.__notes__[0]
    assert "weights (1000, 1000) float32" in said
    assert "batch in step(), line 4 (500, 1000) float32" in said
    used = [*world.call("memory")]
    assert [rank for rank, each in enumerate(used) if each.kept] == [1]
    assert all(any(held.name == "weights" for held in each.held) for each in used)
    if lab.DEVICE == "cuda":
        assert "GPU " in said
        for each in used:
            assert each.gpu is not None
            assert 0 < each.gpu.tensors <= each.gpu.peak.size <= each.gpu.used <= each.gpu.total
    world.clean()
    assert not any(each.kept for each in world.call("memory"))
