"""Tests of `nbdist.cluster.merging`: what several nodes say, as one agent would say it."""

from __future__ import annotations

from nbdist.cluster.merging import in_time_of_head, last_words, shares
from nbdist.output.events import Died, Done, Failure, Text
from nbdist.wire.messages import Outputs

HOUR = 3600 * 10**9


def test_failures_of_a_node_whose_clock_is_wrong() -> None:
    """They have the time of the head's clock, as all others; nothing else is changed."""
    failure, died = Failure("ValueError", "no", (), HOUR + 5), Died(-9, HOUR + 7)
    outputs = Outputs(((0, "t", Text("stdout", "x")), (0, "t", failure), (1, "t", died)))
    text, first, second = in_time_of_head(outputs, HOUR).items
    assert text == (0, "t", Text("stdout", "x"))
    assert isinstance(first[2], Failure)
    assert isinstance(second[2], Died)
    assert (first[2].time_ns, second[2].time_ns) == (5, 7)
    assert first[2].message == "no"


def test_the_last_words_of_a_machine() -> None:
    """What was shown is kept; what failed and ended there is not, as its ranks are dead by then."""
    text, failure = Text("stdout", "step 9"), Failure("RuntimeError", "closed", (), 5)
    ended = Done("error", 0.0, received=False)
    items = ((1, "t", text), (1, "t", failure), (1, "t", ended))
    assert last_words(Outputs(items)) == Outputs(((1, "t", text),))


def test_the_share_of_each_node() -> None:
    """Ranks by the nodes on which they are; those that are on none are left out."""
    assert shares([3, 0, 1, 9], {0: 0, 1: 0, 3: 2}) == {2: (3,), 0: (0, 1)}
