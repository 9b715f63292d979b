"""What is lost with a worker."""

from __future__ import annotations

import pytest

from nbdist.output.events import Died, Done
from nbdist.world.losses import Losses, list_names, replaced_text


def bound(*names: str) -> Done:
    return Done("ok", 0.0, frozenset(names))


def test_what_a_new_rank_lacks() -> None:
    """All that cells bound on it, and what the cell in which it died bound on the others."""
    losses = Losses()
    for rank in (0, 1):
        losses.take(rank, bound("model", "x"))
    losses.take(0, bound("only0"))
    losses.take(1, Died(-9, 0))
    assert losses.replace({"late"}) == (1,)
    assert losses.lacking([1]) == "late, model and x"
    assert losses.lacking([0]) == ""
    assert losses.dead == {}


def test_what_is_bound_again_is_there() -> None:
    """Until the rank is lost once more."""
    losses = Losses()
    losses.take(1, bound("model", "x"))
    losses.take(1, Died(-9, 0))
    losses.replace()
    losses.take(1, bound("x"))
    assert losses.lacking([1]) == "model"
    losses.take(1, Died(-9, 0))
    losses.replace()
    assert losses.lacking([1]) == "model and x"


def test_replaced_ranks_are_told_once() -> None:
    """With how they ended; None for those that nbdist ended with them."""
    losses = Losses()
    losses.replace_all(2, {1: Died(-9, 0)})
    assert losses.take_replaced() == {0: None, 1: Died(-9, 0)}
    assert losses.take_replaced() == {}


@pytest.mark.parametrize(
    ("names", "text"),
    [("", ""), ("a", "a"), ("ba", "a and b"), ("cab", "a, b and c")],
)
def test_list_of_names(names: str, text: str) -> None:
    """In alphabetical order."""
    assert list_names(names) == text


def test_long_list_of_names() -> None:
    """Only some are named."""
    assert list_names("abcdefghi") == "a, b, c, d, e, f and 3 more"


def test_words() -> None:
    """Of one rank and of several."""
    assert replaced_text([2], "x") == "rank 2 was replaced and has lost its variables (x)"
    assert replaced_text([2, 0], "") == "ranks 0,2 were replaced and have lost their variables"
