"""Tests of `nbdist.worker.out_of_memory`: which errors say so, and what is said of them."""

from __future__ import annotations

import pytest
import torch

from nbdist.wire.cgroups import MemoryLimit
from nbdist.wire.ops import GpuMemory, Held, Memory, Peak
from nbdist.worker.out_of_memory import account, account_lines, is_out_of_memory
from tests.worker.test_memory_use import shell_with

GIB = 2**30


def raised_by(source: str) -> BaseException:
    """What running it raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 (this is what is asked)
        exec(source, {"torch": torch})
    return caught.value


@pytest.mark.parametrize(
    ("source", "is_one"),
    [
        ("torch.empty(1 << 50)", True),
        ("bytes(1 << 60)", True),
        ("import numpy; numpy.ones(1 << 50)", True),
        ("raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB')", True),
        ("raise RuntimeError('CUDA error: out of memory')", True),
        ("raise RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling it')", True),
        (
            "try: bytes(1 << 60)\nexcept MemoryError as e: raise OSError('no data') from e",
            True,
        ),
        ("raise ValueError('out of memory')", False),
        ("torch.ones(2) + torch.ones(3)", False),
    ],
)
def test_which_errors_are_meant(source: str, is_one: bool) -> None:  # noqa: FBT001
    """Those of Python, numpy and torch's allocators, and what is raised from them."""
    error = raised_by(source)
    assert is_out_of_memory(error) == is_one
    assert bool(account(shell_with(), 3, error)) == is_one


def test_what_is_said():
    """How much of how much, what by which name, and what could be let go."""
    memory = Memory(
        pss=2 * GIB,
        peak=Peak(0),
        limit=MemoryLimit("ulimit -v", 4 * GIB, GIB),
        gpu=GpuMemory("0", 79 * GIB, 80 * GIB, 61 * GIB, Peak(0)),
        held=tuple(Held(f"x{i}", (9 - i) * GIB, (i, 2), "int8") for i in range(7)),
        tensors=0,
        kept=(Held("y in f(), line 3", 10 * 2**20, (5,), "int8"),),
        kept_size=10 * 2**20,
        is_whole=False,
    )
    assert account_lines(2, memory) == [
        "rank 2: GPU 0 has 79 GiB of 80 GiB in use, 61 GiB of it by this rank's tensors, "
        "ulimit -v has 3 GiB of 4 GiB in use, this rank 2 GiB",
        "  9 GiB  x0 (0, 2) int8",
        "  8 GiB  x1 (1, 2) int8",
        "  7 GiB  x2 (2, 2) int8",
        "  6 GiB  x3 (3, 2) int8",
        "  5 GiB  x4 (4, 2) int8",
        "  …",
        "  … not everything was searched in time: `%dist_memory`",
        "Only this traceback, or `Out`, holds 10 MiB (`%dist_memory --free` frees it):",
        "  10 MiB  y in f(), line 3 (5,) int8",
    ]
