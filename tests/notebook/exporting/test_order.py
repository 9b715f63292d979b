"""Tests of `nbdist.notebook.exporting.order`."""

from __future__ import annotations

import pytest

from nbdist.notebook.exporting.order import in_order, title_of
from nbdist.world.past import Kind, PastTask


def task(first: int, last: int = 0, runs: int = 1, kind: Kind = "cell", text: str = "") -> PastTask:
    last = last or first
    return PastTask(
        kind=kind, text=text, number=last + 10, ranks=(0,), on_all=True, status="ok",
        made=frozenset(), shows_value=False, draws=False, first=first, last=last, runs=runs,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("again", "between", "order"),
    [
        ("train()", "evaluate()", [2, 1]),
        ("model = Net()", "train(model)", [1, 2]),
        ("y = x", "x = 1", [2, 1]),
    ],
)
def test_a_cell_that_ran_again(again: str, between: str, order: list[int]) -> None:
    """Where it ran last, but before what has used what it binds."""
    found = in_order([task(1, 3, 2), task(2)], {1: again, 2: between})
    assert [each.first for each in found] == order


def test_titles() -> None:
    """For code and for people."""
    assert title_of(task(1)) == "cell 11"
    assert title_of(task(1), shown=True) == "In [11]"
    assert title_of(task(1, kind="script", text="a.py --x")) == "`%dist_run a.py --x`"
    assert title_of(task(1, kind="call", text="snapshot.read")) == "`%dist_restore`"
