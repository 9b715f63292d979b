"""Tests of `nbdist.world.result`: a row for each worker, and columns that say something."""

from __future__ import annotations

from dataclasses import replace

from nbdist.wire.views import Collective, Gpu, Place, Usage, WorkerStatus
from nbdist.world.result import rows, usage_text

IDLE = WorkerStatus(0, 100, "here", "idle", 0.0, 45 * 2**20, "cuda:0")


def test_columns_that_say_nothing_are_left_out():
    """Where no rank is in a cell, there is no column for its line, nor for collectives."""
    assert rows([]) == []
    assert rows([IDLE]) == [
        ("rank", "state", "pid", "device", "memory"),
        ("0", "idle", "100", "cuda:0", "45 MiB"),
    ]


def test_hosts_are_named_where_there_are_several() -> None:
    """Beside the ranks."""
    headings, first, second = rows([IDLE, replace(IDLE, rank=1, host="there")])
    assert headings[:3] == ("rank", "host", "state")
    assert (first[1], second[1]) == ("here", "there")


def test_a_rank_in_a_cell():
    """Since when, in which line, and its last collective."""
    place, last = Place(line=7, operation="all_reduce"), Collective("all_reduce", 3, is_done=False)
    busy = WorkerStatus(1, 101, "here", "busy", 2.6, 2**20, "cuda:1", place, "", last)
    headings, idle, row = rows([IDLE, busy])
    assert headings[5:] == ("where", "last collective")
    assert idle[5:] == ("", "")
    assert row[1] == "busy 3 s"
    assert row[5:] == ("waits in all_reduce, line 7", "all_reduce #3, not done")


def test_what_a_terminal_shows_besides():
    """Processor time, the GPU, and the last line of text, of those of whom it is known."""
    gpu = Gpu(61 * 2**30, 80 * 2**30, 97)
    other = replace(IDLE, rank=1, gpu=gpu)
    headings, first, second = rows([IDLE, other], {0: 98.6}, {1: "loss 0.5"})
    assert headings[5:] == ("cpu", "gpu", "last line")
    assert first[5:] == ("99 %", "", "")
    assert second[5:] == ("", "61/80 GiB 97 %", "loss 0.5")
    slice_of = replace(IDLE, gpu=Gpu(2**30, 10 * 2**30))
    assert rows([slice_of])[1][5:] == ("1/10 GiB",)


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
