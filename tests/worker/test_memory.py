"""Tests of `nbdist.worker.memory`: figures of this process, and whose memory it is."""

from __future__ import annotations

import resource
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nbdist.system.limits import MemoryLimit
from nbdist.wire.ops import GpuMemory, Held, Memory, Peak
from nbdist.worker.compat import accelerator
from nbdist.worker.memory import Peaks, account, account_lines, is_out_of_memory, measure, pss_now

MEGABYTE = 2**20


def shell_with(**names: Any) -> Any:
    """As much of IPython's shell as is looked at."""
    hidden = {"Out": {}, "_oh": names.pop("_oh", {}), "get_ipython": None}
    return SimpleNamespace(
        user_ns={**hidden, **names}, user_ns_hidden=hidden, last_execution_result=None
    )


def test_names_and_what_is_shown():
    """A name of the user's counts as his, what IPython keeps of it as kept by that alone."""
    mine, shown = torch.zeros(1000), torch.zeros(500)
    shell = shell_with(mine=mine, _5=shown, _=shown, _oh={4: mine, 5: shown})
    found = measure(shell, Peaks(), 5.0)
    assert [(each.name, each.size) for each in found.held] == [("mine", 4000)]
    assert [(each.name, each.size) for each in found.kept] == [("Out[5]", 2000)]
    assert (found.tensors, found.kept_size, found.is_whole) == (4000, 2000, True)
    assert found.gpu is None or accelerator.is_in_use()
    assert found.limit is not None
    assert 0 < found.limit.free < found.limit.limit


def test_only_the_largest_are_named():
    """But all are counted."""
    names = {f"x{size}": torch.zeros(size, dtype=torch.uint8) for size in range(1, 31)}
    found = measure(shell_with(**names), Peaks(), 5.0)
    assert [each.name for each in found.held[:2]] == ["x30", "x29"]
    assert len(found.held) < 30
    assert found.tensors == sum(range(1, 31))


def test_the_peak_of_a_cell():
    """Of what was let go again; where it was used before, it is a bound and no more."""
    peaks = Peaks()
    peaks.begin()
    fill = pss_now() + 300 * MEGABYTE
    # More than this process has ever had.
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    gone = torch.ones(max(0, most - pss_now()) + 300 * MEGABYTE, dtype=torch.uint8)
    del gone
    pss = pss_now()
    peak = peaks.memory(pss)
    assert not peak.is_bound
    assert peak.size > fill > pss + 200 * MEGABYTE
    peaks.begin()
    later = peaks.memory(pss_now())
    assert later.is_bound
    assert later.size > fill


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
