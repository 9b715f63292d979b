"""Tests of `nbdist.world.status`: what ranks use, in as few words as a head has room for."""

from __future__ import annotations

from nbdist.wire.places import Gpu, Usage
from nbdist.world.status import usage_text

GIB = 2**30


def test_equal_ranks():
    """One figure each, and none of what is not known."""
    assert usage_text([]) == ""
    assert usage_text([Usage(0)]) == ""
    assert usage_text([Usage(2 * GIB), Usage(2 * GIB)]) == "cpu 2 GiB"
    gpu = Gpu(61 * GIB, 80 * GIB, 97)
    assert usage_text([Usage(2 * GIB, gpu)]) == "cpu 2 GiB · gpu 61/80 GiB · 97 %"


def test_ranks_that_differ():
    """From which to which."""
    used = [
        Usage(500 << 20, Gpu(3 * GIB, 16 * GIB, None)),
        Usage(GIB, Gpu(12 * GIB, 16 * GIB, 5)),
        Usage(2 * GIB, Gpu(GIB // 2, 16 * GIB, 0)),
    ]
    assert usage_text(used) == "cpu 500 MiB-2 GiB · gpu 0.5-12/16 GiB · 0-5 %"
