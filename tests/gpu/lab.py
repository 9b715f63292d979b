"""Worlds whose tensors are on the GPU, and what can be seen of it without CUDA.

Runs in the process of the tests, which stands for the notebook: it must not touch CUDA.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from nbdist import topology
from nbdist.world.states import WorldState
from nbdist.world.world import World
from tests import cells

DEVICE = os.environ.get("NBDIST_TEST_DEVICE", "cuda")
"""`cpu` runs the same bodies with gloo on the CPU, to prove that they are right."""

TORCH = tuple(map(int, version("torch").split(".")[:2]))

KINDS = ("nccl", "gloo")
"""Which backend has the collectives of CUDA tensors; the more telling first."""

NCCL = pytest.mark.parametrize("kind", ["nccl"], indirect=True, scope="module")
"""For a module's tests that are about nccl alone."""

SUM = "t = torch.ones(1); dist.all_reduce(t); assert t.item() == world_size"

ON_DEVICE = "torch.set_default_device(device)"
"""As a set-up cell: tensors and modules that cells make are on the rank's GPU."""

FREED_WITHIN = 15.0
"""Seconds until a cell that failed somewhere has to have ended by itself everywhere."""

SMI_TIMEOUT = 20.0


def has_gpu() -> bool:
    """Whether there is one, or none is wanted."""
    return DEVICE == "cpu" or gpus() > 0


def gpus() -> int:
    """How many are visible, without CUDA."""
    return len(topology.visible_gpus(os.environ)) if DEVICE == "cuda" else 0


def big() -> int:
    """Bytes of a collective whose kernel runs for a while: 1 GiB on a card with 32 of them."""
    if DEVICE == "cpu":
        return 4 << 20
    return min(1 << 30, (int(smi("--query-gpu=memory.total")[0]) << 20) // 32)


def make_world(kind: str, n: int, **options: Any) -> World:
    """N workers with tensors on the GPU, and the group that the kind says."""
    if DEVICE == "cpu" or kind == "gloo":
        options["backend"] = "gloo"
    else:
        options["share_gpus"] = n > gpus()
    world = World(n, log_dir="", show=False, **options)
    world.start()
    try:
        world.execute(ON_DEVICE, setup=True)
    except BaseException:
        world.shutdown()
        raise
    return world


def whole(world: World) -> World:
    """The world, ready for the next test whatever the one before has done to it."""
    world.session.setup.forget()
    world.session.pop_replaced()
    world.session.on_failure = "heal"
    if world.state is not WorldState.READY:
        world.restart()
    world.execute(ON_DEVICE, setup=True)
    return world


ends = partial(cells.ends, within=FREED_WITHIN)


def used_on_device() -> int:
    """Bytes in use on all GPUs, as nvidia-smi has it; 0 on the CPU."""
    if DEVICE == "cpu":
        return 0
    return sum(int(line) for line in smi("--query-gpu=memory.used")) << 20


def smi(query: str) -> list[str]:
    """The lines of an answer of nvidia-smi; none without it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    answer = subprocess.run(
        [program, query, "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=SMI_TIMEOUT,
        check=False,
    )
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def cuda_traces(pid: int) -> list[str]:
    """What a process has of a CUDA context: the driver's device files, open or mapped."""
    found = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.add(os.readlink(f"/proc/{pid}/fd/{number}"))
        except FileNotFoundError:
            continue  # closed meanwhile
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        found.add(line.split(maxsplit=5)[-1])
    return sorted(path for path in found if path.startswith("/dev/nvidia"))
