"""A rank of many that fails frees those that wait for it, as with few."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nbdist.errors import WorkerDied
from nbdist.world.world import World
from tests.faults.collectives import BEFORE, SMALL
from tests.faults.test_freeing import fails, goes_on
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world


@pytest.fixture(scope="module")
def many(new_world: NewWorld) -> Iterator[World]:
    with new_world(8) as world:
        world.execute(BEFORE)
        yield world


@pytest.mark.parametrize(
    ("name", "length"), [("all_reduce", 5_000_000), ("recv", 256), ("all_gather_object", 256)]
)
def test_one_rank_of_many_raises(many: World, name: str, length: int) -> None:
    """As with few: that one exception, who waited in what, and all goes on."""
    _, error = fails(
        many,
        f"t = torch.ones({length})\nu = torch.ones(world_size * 64)\n"
        f"if rank == 1:\n    raise ValueError('bad')\n{SMALL[name]}",
    )
    assert error.errors.keys() == {1}
    assert f"ValueError: bad. Ranks 0,2-{many.size - 1} were waiting in " in str(error)
    goes_on(many)


def test_two_of_many_die(many: World) -> None:
    """They are replaced, the others keep what they have."""
    _, error = fails(many, "import os\nif rank in (3, 5): os._exit(1)\ndist.barrier()")
    assert isinstance(error, WorkerDied)
    assert "Ranks 3,5 were restarted and their variables (" in str(error)
    kept = [None if rank in (3, 5) else rank for rank in range(many.size)]
    assert many.gather("globals().get('kept')") == kept
    many.execute("t = torch.ones(1); dist.all_reduce(t); assert t.item() == world_size")
