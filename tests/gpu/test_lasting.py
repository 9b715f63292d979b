"""A lasting GPU error costs only its rank; a full GPU costs no rank, and can be emptied."""

from __future__ import annotations

import pytest

from nbdist.errors import WorkerDied, WorkerError
from nbdist.world.world import World
from tests.gpu import lab
from tests.gpu.conftest import Figure

pytestmark = [lab.NCCL, pytest.mark.shared_world, pytest.mark.timeout(75)]

ON_GPU = lab.DEVICE == "cuda"

BYTES, SLACK = 1 << 30 if ON_GPU else 16 << 20, 96 << 20

POISON = (
    "torch.zeros(2)[torch.tensor([9])]"
    if ON_GPU
    else "raise getattr(torch, 'AcceleratorError', RuntimeError)"
    "('CUDA error: device-side assert triggered')"
)
"""An index out of range, at which a kernel fails; on the CPU, the error that torch would raise."""

CASES = {
    "it is noticed": f"{POISON}\n    torch.ones(1).item()",
    "something else is raised": f"{POISON}\n    time.sleep(1)\n    raise ValueError('bad')",
    "with a collective under way": f"dist.all_reduce(t)\n    {POISON}\n    t.sum().item()",
}


@pytest.mark.parametrize("case", CASES)
def test_only_a_rank_with_a_poisoned_context_restarts(
    world: World, figure: Figure, case: str
) -> None:
    """A rank with a poisoned context is restarted by itself; others keep all, the group works."""
    world.execute("kept = rank")
    before = dict(world.pids)
    running, error = lab.ends(
        world,
        f"import time\nt = torch.ones(8)\nif rank == 1:\n    {CASES[case]}\n"
        "dist.all_reduce(t); t.sum().item()",
    )
    assert isinstance(error, WorkerError)
    assert not isinstance(error, WorkerDied), "torch's watchdog was first"
    assert "device-side assert triggered) made the process of rank 1 unusable" in str(error)
    assert "Rank 1 was restarted and its variables (t and kept) are gone" in str(error)
    figure(f"poisoned context, {case}: to idle, replaced", running.age, "s")
    assert {rank for rank in before if before[rank] != world.pids[rank]} == {1}
    assert world.gather("globals().get('kept')") == [0, None, 2, 3]
    world.execute(lab.SUM)


def test_out_of_memory_names_the_tensors_in_use(world: World) -> None:
    """Out of memory is an exception of its rank, which names tensors in use; all ranks go on."""
    before = dict(world.pids)
    full = "torch.zeros(2**46, dtype=torch.uint8)" if ON_GPU else "torch.empty(1 << 50)"
    source = (
        "weights = torch.ones(1000, 1000)\ndef step():\n    batch = torch.ones(500, 1000)\n"
        f"    {full}\nif rank == 1: step()\n{lab.SUM}"
    )
    with pytest.raises(RuntimeError) as caught:
        world.execute(source)
    said = caught.value.__notes__[0]
    assert "weights (1000, 1000) float32" in said
    assert "batch in step(), line 4 (500, 1000) float32" in said
    used = [*world.call("memory")]
    assert [rank for rank, each in enumerate(used) if each.kept] == [1]
    assert all(any(held.name == "weights" for held in each.held) for each in used)
    if ON_GPU:
        assert "OutOfMemoryError" in str(caught.value)
        assert "GPU " in said
        for each in used:
            assert each.gpu is not None
            assert 0 < each.gpu.tensors <= each.gpu.peak.size <= each.gpu.used <= each.gpu.total
    world.clean()
    assert not any(each.kept for each in world.call("memory"))
    assert world.pids == before
    world.execute(lab.SUM)


def test_clean_releases_tensors_and_cached_memory(world: World) -> None:
    """`clean` releases tensors of the last traceback and of `Out`, and torch's cached memory."""
    world.clean()
    full = f"torch.zeros({BYTES}, dtype=torch.uint8)"
    with pytest.raises(WorkerError, match="bad"):
        world.execute(f"def keep():\n    held = {full}\n    raise ValueError('bad')\nkeep()")
    world.execute(f"torch.ones({BYTES // 4})")  # `Out` has this tensor
    cleaned = world.clean()
    for had in cleaned:
        if not ON_GPU:
            assert had.memory[0] - had.memory[1] > 1.5 * BYTES
            continue
        assert had.on_gpu[0] >= 2 * BYTES
        assert had.on_gpu[1] < SLACK
        assert had.held_on_gpu[1] < SLACK
