"""Tests of `nbdist.cluster.waiting`: who has come, and what to do for the others."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from nbdist.cluster.waiting import Awaited

JOIN = "nbdist join a:1"


@pytest.mark.parametrize(
    ("awaited", "room", "is_enough", "said"),
    [
        (Awaited(2), {}, False, "0 of 2 nodes"),
        (Awaited(2), {"a": 4, "b": 2}, True, "2 of 2 nodes: a (4), b (2)"),
        (Awaited(1, 8), {"a": 4}, True, "1 of 1 node: a (4)"),
        (
            Awaited(2, None, JOIN),
            {},
            False,
            "run `nbdist join a:1` on each machine · 0 of 2 nodes",
        ),
        (
            Awaited(2, None, JOIN),
            {"a": 4},
            False,
            "run `nbdist join a:1` on each machine · 1 of 2 nodes: a (4)",
        ),
        (Awaited(2, None, JOIN), {"a": 4, "b": 4}, True, "2 of 2 nodes: a (4), b (4)"),
        (
            Awaited(1, 6, JOIN),
            {"a": 4},
            False,
            "run `nbdist join a:1` on each machine · 4 of 6 workers: a (4)",
        ),
        (Awaited(1, 6, JOIN), {"a": 4, "b": 2}, True, "6 of 6 workers: a (4), b (2)"),
    ],
)
def test_who_has_come(
    awaited: Awaited, room: dict[str, int], *, is_enough: bool, said: str
) -> None:
    """The command stands there as long as somebody has to run it."""
    assert awaited.have_come(room) is is_enough
    assert awaited.text(room) == said


@pytest.mark.parametrize(
    ("awaited", "room", "will_do"),
    [
        (Awaited(2, least=1), {"a": 4}, True),
        (Awaited(2, least=1), {}, False),
        (Awaited(2), {"a": 4}, False),
        (Awaited(2, None, JOIN, least=1), {"a": 4}, False),
    ],
)
def test_fewer_will_do(awaited: Awaited, room: Mapping[str, int], will_do: bool) -> None:  # noqa: FBT001
    """Where that was said, and nobody is to be invited."""
    assert awaited.will_do(room) == will_do
