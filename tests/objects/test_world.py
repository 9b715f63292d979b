"""Arguments of `World.run` share their objects on the ranks, as they do in the program."""

from __future__ import annotations

from typing import Any

import pytest

from nbdist.world.world import World
from tests.objects.nets import net, sgd, train

pytestmark = pytest.mark.shared_world(2)


def fit(model: Any, optimizer: Any, holder: dict[str, Any]) -> tuple[float, bool]:
    """Train the holder's model; return the loss, and whether the holder has the arguments."""
    is_one = holder["model"] is model and holder["optimizer"] is optimizer
    return train(holder["model"], optimizer), is_one


def test_arguments_share_objects(world: World) -> None:
    """A model, its optimizer and a dict of both are linked on each rank."""
    model = net()
    optimizer = sgd(model)
    holder = {"model": model, "optimizer": optimizer}
    assert [*world.run(fit, model, optimizer, holder)] == [(0.605, True)] * 2
    assert [*world.run(fit, model, optimizer, holder=holder)] == [(0.605, True)] * 2
    assert model.weight.sum().item() == 0


def test_garbage_collection_does_not_unlink_arguments(world: World) -> None:
    """Arguments share objects in every call, though Python collects garbage all the time."""
    world.execute("import gc; thresholds = gc.get_threshold(); gc.set_threshold(1, 1, 1)")
    try:
        for _ in range(5):
            test_arguments_share_objects(world)
    finally:
        world.execute("gc.set_threshold(*thresholds)")
