"""Tests of `nbdist.world.exchange`: what may be copied, by which ranks, and who has got it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nbdist.errors import BadRanks, NbdistError, UsageError
from nbdist.world.world import World
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world(3)


def test_without_a_group(new_world: NewWorld) -> None:
    """It says so: there is none to copy through."""
    with new_world(1, backend="none") as alone:
        alone.execute("x = 1")
        with pytest.raises(UsageError, match=r"these workers have none \(`--backend none`\)"):
            alone.sync(["x"])


@pytest.fixture
def world(started: World) -> World:
    """Ranks with `x`, of which the first has `mine` and what cannot be copied."""
    started.execute(
        "import threading\nx = rank; globals().pop('mine', None)\n"
        "if rank == 0: mine = [1]; lock = threading.Lock()"
    )
    return started


def test_who_has_got_it(world: World) -> None:
    """The ranks that lacked a name, or those that are named; never the source itself."""
    assert world.sync(["mine", "mine"]) == (1, 2)
    assert world.sync(["mine"]) == ()
    assert world.sync(["x"], source=2, ranks=[2, 0]) == (0,)
    assert world.gather("(x, mine)") == [(2, [1]), (1, [1]), (2, [1])]
    assert world.sync(["x"], source=1, ranks=[1]) == ()
    assert world.sync(["x"], source=1, ranks=[]) == ()


@pytest.mark.parametrize(
    ("names", "source", "ranks", "kind", "said"),
    [
        ([], 0, None, UsageError, "which names"),
        (["x", "mine[0]"], 0, None, UsageError, r"`%dist_sync mine\[0\]`: a name is copied"),
        ([""], 0, None, UsageError, "a name is copied"),
        (["x"], 3, None, BadRanks, "there is no rank 3"),
        (["x"], -1, None, BadRanks, "there is no rank -1"),
        (["x"], 0, [1, 5], BadRanks, "there is no rank 5"),
        (["x", "gone"], 1, None, UsageError, "rank 1: this rank has no `gone`"),
        (["x", "lock"], 0, None, UsageError, "rank 0: `x, lock` cannot be copied: TypeError"),
    ],
)
def test_what_cannot_be(
    world: World,
    names: list[str],
    source: int,
    ranks: Sequence[int] | None,
    kind: type[NbdistError],
    said: str,
) -> None:
    """It is told in a line, and nothing has changed."""
    with pytest.raises(kind, match=said) as caught:
        world.sync(names, source=source, ranks=ranks)
    assert "\n" not in str(caught.value)
    assert world.gather("(x, 'mine' in globals())") == [(0, True), (1, False), (2, False)]
