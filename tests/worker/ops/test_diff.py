"""Tests of `nbdist.worker.ops.diff`: what a rank says of a value, and of another rank's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nbdist.wire.ops import Distance, Looked
from nbdist.worker.namespace import Namespace
from nbdist.worker.op import Context
from nbdist.worker.ops.diff import compare, diff, lend


def context(**names: Any) -> Context:
    return Context(SimpleNamespace(user_ns=names), Namespace(names), None, task_id="t")


def test_parts():
    """With size and number of elements."""
    here = context(x={"w": torch.ones(2, 3), "lr": 0.1})
    parts = diff(here, "x").parts
    assert [*parts] == ["['w']", "['lr']"]
    assert (parts["['w']"].size, parts["['w']"].count) == (24, 6)
    assert [*diff(here, "x['w'][0]").parts] == [""]


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("nope", Looked(missing="nope")),
        ("x.y", Looked(problem="AttributeError: 'list' object has no attribute 'y'")),
        (
            "[None] * 100_001",
            Looked(problem="it has more than 100,000 parts: compare one of them"),
        ),
    ],
)
def test_what_has_no_parts(expression: str, said: Looked):
    """It is told, and no error of the task's."""
    assert diff(context(x=[]), expression) == said


def test_ranks_compare_without_the_notebook():
    """One lends, the other says how far it is apart; what it has otherwise is left out."""
    one, other = context(x=[torch.ones(3), 5, torch.ones(2)]), context(x=[torch.zeros(3), 5])
    lent = lend(one, "x", ("[0]", "[1]", "[2]"))
    assert lent.packed is not None
    assert compare(other, "x", lent.packed) == {"[0]": Distance(1.0, 3)}
