"""Costs of cells and values: a collective, a first training step, transfers of CUDA tensors."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
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


def test_the_time_of_a_cell_is_reported(world: World, figure: Figure) -> None:
    """The report has the medians of fifty cells, after a first cell."""
    for name, source in {"pass": "pass", "all_reduce": lab.SUM}.items():
        world.execute(source)
        took = median(seconds(lambda source=source: world.execute(source)) for _ in range(50))
        figure(f"execute of `{name}`, n=4", 1000 * took, "ms")


def test_the_first_training_step_is_reported(world: World, figure: Figure) -> None:
    """A DDP model is made, takes its first step, then another step, and ranks agree."""
    world.restart()
    world.execute(lab.ON_DEVICE)
    figure("model and first step", seconds(lambda: world.execute(collectives.MODEL + STEP)), "s")
    figure("the next step", seconds(lambda: world.execute(STEP)), "s")
    assert len({*world.gather("net.module.weight.sum().item()")}) == 1


MIB = 1 << 20
SIZE = 1024 * MIB if lab.DEVICE == "cuda" else 8 * MIB

COPIES = """
import time
def seconds(copy):
    copy()
    started = time.monotonic()
    copy()
    return time.monotonic() - started
pageable = torch.empty(big.shape, dtype=big.dtype, device="cpu")
pinned = torch.empty(big.shape, dtype=big.dtype, device="cpu", pin_memory=device.type == "cuda")
took = [seconds(lambda: to.copy_(big)) for to in (pageable, pinned)]
del pageable, pinned
"""


def test_gathered_tensors_are_on_the_cpu(world: World) -> None:
    """Gathered tensors are on the CPU, with their views, strides, types and shared memory."""
    world.execute(
        "whole = torch.arange(24, dtype=torch.float32).reshape(4, 6) + rank\n"
        "parts = {'t': whole.t(), 'row': whole[1], 'half': whole.half(), 'steps': whole[:, ::2],\n"
        "         'flag': whole > 3, 'none': whole[:0],\n"
        "         'grown': torch.nn.Parameter(whole.clone())}\n"
        "pair = [whole, whole[0]]"
    )
    for rank, (parts, pair) in enumerate(
        zip(world.gather("parts"), world.gather("pair"), strict=True)
    ):
        first = parts["row"] - 6 - rank
        assert first.tolist() == [0, 1, 2, 3, 4, 5]
        assert {part.device.type for part in parts.values()} == {"cpu"}
        assert parts["t"].shape == (6, 4)
        assert parts["t"][2, 3].item() == 20 + rank
        assert str(parts["half"].dtype) == "torch.float16"
        assert parts["steps"][1].tolist() == [6 + rank, 8 + rank, 10 + rank]
        assert parts["flag"].sum().item() == 20 + min(rank, 4)
        assert parts["grown"].requires_grad
        assert parts["none"].shape == (0, 6)
        pair[0][0, 0] = 99
        assert pair[1][0].item() == 99  # a single memory, as on the rank


def test_big_tensors_are_gathered_to_the_cpu(world: World, figure: Figure) -> None:
    """Big tensors are gathered to the CPU; the report compares this with copies on the rank."""
    world.execute(f"big = torch.full(({SIZE},), rank, dtype=torch.uint8); big.sum().item()")
    world.execute(COPIES, ranks=[0])
    pageable, pinned = world.gather("took", ranks=[0])[0]
    gib = SIZE / 2**30
    figure("device to pageable memory, one rank", gib / pageable, "GiB/s")
    figure("device to pinned memory, one rank", gib / pinned, "GiB/s")
    for number in (1, 4):
        started = time.monotonic()
        found = world.gather("big", ranks=range(number))
        seconds = time.monotonic() - started
        figure(f"gather of {SIZE >> 20} MiB from {number} rank(s)", number * gib / seconds, "GiB/s")
        assert [tensor[-1].item() for tensor in found] == [*range(number)]
        assert all(tensor.device.type == "cpu" for tensor in found)


def test_sent_tensors_leave_the_notebook_without_cuda(world: World, figure: Figure) -> None:
    """A cell puts a tensor that the notebook sent on its GPU, and the notebook has no CUDA."""
    import torch

    data = torch.ones(SIZE, dtype=torch.uint8)
    started = time.monotonic()
    world.execute("there = data.to(device)", names={"data": data})
    figure(f"{SIZE >> 20} MiB to each of 4 GPUs", time.monotonic() - started, "s")
    assert world.gather("there.device == device and bool(there.all())") == [True] * 4
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def test_synced_values_are_on_the_receiver_s_gpu(world: World) -> None:
    """A value that goes from rank to rank arrives on the receiver's own GPU."""
    world.execute("state = {'w': torch.full((1000,), float(rank)), 'step': rank}")
    world.sync(["state"], source=2, ranks=[0, 1, 3])
    assert world.gather("state['w'].sum().item()") == [2000.0] * 4
    assert world.gather("state['w'].device == device") == [True] * 4


def test_a_snapshot_restores_tensors_on_the_gpu(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA tensors come back from the disk, each rank's own tensor on its own GPU."""
    monkeypatch.setenv("NBDIST_SNAPSHOT_DIR", str(tmp_path))
    world.execute("w = torch.full((10,), float(rank)); torch.manual_seed(rank)")
    world.snapshot(["w"], name="gpu")
    world.execute("first = torch.randn(4); w += 1")
    world.restart()
    world.execute(lab.ON_DEVICE)
    world.restore(name="gpu")
    assert world.gather("w.sum().item()") == [0.0, 10.0, 20.0, 30.0]
    assert world.gather("w.device == device") == [True] * 4


def test_digests_of_cuda_tensors_show_differences(world: World, figure: Figure) -> None:
    """Digests of CUDA tensors are equal for equal contents; ranks compute how far they differ."""
    world.execute(
        "net = torch.nn.Linear(300, 300)\n"
        "for each in net.parameters(): each.data.fill_(0.5)\n"
        "if rank == 3: net.weight.data[7, 7] += 2"
    )
    looked = {rank: each.parts for rank, each in enumerate(world.call("diff", expression="net"))}
    assert len({parts["bias"].digest for parts in looked.values()}) == 1
    assert len({parts["weight"].digest for parts in looked.values()}) == 2
    assert looked[0]["weight"].digest == looked[2]["weight"].digest != looked[3]["weight"].digest
    on = "" if lab.DEVICE == "cpu" else " on cuda"
    assert looked[0]["bias"].kind == f"float32 (300,){on}"
    lent = world.call("diff.lend", [0], expression="net", paths=("bias",)).rank(0)
    world.execute("net.bias.data[5] = -1.5", ranks=[3])
    apart = world.call("diff.compare", [3], expression="net", packed=lent.packed).rank(3)
    assert (apart["bias"].most, apart["bias"].differing) == (2.0, 1)
    world.execute(f"big = torch.ones({SIZE}, dtype=torch.uint8)")
    world.call("diff", expression="big")
    started = time.monotonic()
    world.call("diff", expression="big")
    figure("digests of a tensor on each of 4 ranks", time.monotonic() - started, "s")
