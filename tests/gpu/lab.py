"""Worlds whose tensors are on the GPU, and facts about the GPU that need no CUDA.

This module runs in the process of the tests, which acts as the notebook: it must not touch CUDA.
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
"""`cpu` runs the same tests with gloo on the CPU, to prove that the tests are right."""

TORCH = tuple(map(int, version("torch").split(".")[:2]))

KINDS = ("nccl", "gloo")
"""The backends for collectives of CUDA tensors; the more telling backend first."""

NCCL = pytest.mark.parametrize("kind", ["nccl"], indirect=True, scope="module")
"""The mark of a module whose tests are about nccl alone."""

SUM = "t = torch.ones(1); dist.all_reduce(t); assert t.item() == world_size"

ON_DEVICE = "torch.set_default_device(device)"
"""A set-up cell, after which tensors and modules that cells make are on the rank's GPU."""

FREED_WITHIN = 15.0
"""Seconds within which a cell that failed on a rank has to end by itself on all ranks."""

SMI_TIMEOUT = 20.0


def has_gpu() -> bool:
    """Return True if a GPU is visible, or if the tests run on the CPU."""
    return DEVICE == "cpu" or gpus() > 0


def gpus() -> int:
    """Return how many GPUs are visible, without CUDA."""
    return len(topology.visible_gpus(os.environ)) if DEVICE == "cuda" else 0


def big() -> int:
    """Return the bytes of a collective that runs for a while: 1/32 of the GPU, at most 1 GiB."""
    if DEVICE == "cpu":
        return 4 << 20
    return min(1 << 30, (int(smi("--query-gpu=memory.total")[0]) << 20) // 32)


def make_world(kind: str, n: int, **options: Any) -> World:
    """Start `n` workers with tensors on the GPU, and a group of this kind."""
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
    """Make the world ready for the next test, whatever the last test has done to the world."""
    world.engine.setup.forget()
    world.engine.rank_table.pop_replaced()
    world.engine.config = world.engine.config.with_changes(on_failure="heal")
    if world.state is not WorldState.READY:
        world.restart()
    world.execute(ON_DEVICE, setup=True)
    return world


ends = partial(cells.ends, within=FREED_WITHIN)


def used_on_device() -> int:
    """Return the bytes in use on all GPUs, from nvidia-smi; 0 on the CPU."""
    if DEVICE == "cpu":
        return 0
    return sum(int(line) for line in smi("--query-gpu=memory.used")) << 20


def smi(query: str) -> list[str]:
    """Return the lines that nvidia-smi answers; none without the program."""
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
    """Return a process's signs of a CUDA context: device files of the driver, open or mapped."""
    found = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.add(os.readlink(f"/proc/{pid}/fd/{number}"))
        except FileNotFoundError:
            continue  # closed meanwhile
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        found.add(line.split(maxsplit=5)[-1])
    return sorted(path for path in found if path.startswith("/dev/nvidia"))
