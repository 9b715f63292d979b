"""Tests of `nbdist.worker.memory_use`: figures of this process, and whose memory it is."""

from __future__ import annotations

import resource
from types import SimpleNamespace
from typing import Any

import torch

from nbdist.worker.compat import accelerator
from nbdist.worker.memory_use import Peaks, measure, pss_now

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
