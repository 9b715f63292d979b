"""Tests of `nbdist.notebook.commands.status`: the table of workers, and whose the names are."""

from __future__ import annotations

from collections.abc import Callable

from nbdist.notebook.commands.status import owners_text, rows
from nbdist.wire.places import Collective, Place, WorkerStatus

IDLE = WorkerStatus(0, 100, "here", "idle", 0.0, 45 * 2**20, "cuda:0")


def test_columns_that_say_nothing_are_left_out():
    """Where no rank is in a cell, there is no column for its line, nor for collectives."""
    assert rows([]) == []
    assert rows([IDLE]) == [
        ("rank", "state", "pid", "device", "memory"),
        ("0", "idle", "100", "cuda:0", "45 MiB"),
    ]


def test_a_rank_in_a_cell():
    """Since when, in which line, and its last collective."""
    place, last = Place(line=7, operation="all_reduce"), Collective("all_reduce", 3, is_done=False)
    busy = WorkerStatus(1, 101, "here", "busy", 2.6, 2**20, "cuda:1", place, "", last)
    headings, idle, row = rows([IDLE, busy])
    assert headings[5:] == ("where", "last collective")
    assert idle[5:] == ("", "")
    assert row[1] == "busy 3 s"
    assert row[5:] == ("waits in all_reduce, line 7", "all_reduce #3, not done")


def test_owners():
    """A line for each of both."""
    owners = {
        "model": ("workers", frozenset({0, 1})),
        "x": ("notebook", frozenset({0})),
        "a": ("workers", frozenset({1})),
    }
    assert owners_text(owners) == "the workers' own: a, model\nthe notebook's, shipped: x"
    assert owners_text({}) == "the workers' own: none\nthe notebook's, shipped: none"


def test_without_workers(typed: Callable[[str], str]):
    """How some are started, and with `-v` that no name is anywhere."""
    shown = typed("%dist_status -v").splitlines()
    assert shown[0].startswith("no workers are running · `%%distributed -n 4`")
    assert shown[1:] == ["the workers' own: none", "the notebook's, shipped: none"]
