"""Arguments of `World.run` share their objects on the ranks, as they do in the program."""

from __future__ import annotations

import os
import sys
from typing import Any, Literal

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


HOLD_FRAMES = """
import sys, threading, time
def hold_frames():
    held = []
    while holds:
        held += sys._current_frames().values()
        time.sleep(0.003)
holds, holder = True, threading.Thread(target=hold_frames)
holder.start()
"""
"""Starts a thread that holds the frames of all threads, as a profiler does, but until its end."""


def test_frames_in_another_thread_do_not_keep_arguments(world: World) -> None:
    """Each call gets the notebook's arguments, though a profiler keeps the last call's alive."""
    model = net()
    optimizer = sgd(model)
    world.execute(HOLD_FRAMES)
    try:
        for number in range(40):
            holder = {"model": model, "optimizer": optimizer}
            assert [*world.run(fit, model, optimizer, holder)] == [(0.605, True)] * 2, number
    finally:
        world.execute("holds = False; holder.join()")


def fit_and_keep(
    model: Any, optimizer: Any, where: list[int], part: Literal["model", "memory"]
) -> tuple[float, int]:
    """Train, and keep the model, or only its memory, on the ranks in `where`.

    Return the loss, and how many models the rank has kept.
    """
    kept = vars(sys).setdefault("_kept_models", [])
    if int(os.environ["RANK"]) in where:
        kept.append(model if part == "model" else model.weight.detach())
    return train(model, optimizer), len(kept)


@pytest.mark.parametrize("part", ["model", "memory"])
def test_arguments_that_one_rank_keeps_are_new_in_the_next_call(
    world: World, part: Literal["model", "memory"]
) -> None:
    """If only one rank keeps a model, all ranks get the notebook's; if all keep it, they train it.

    Else the next call would train other weights on the rank that has kept the model.
    """
    model = net()
    optimizer = sgd(model)

    def fit_on(where: list[int]) -> list[tuple[float, int]]:
        return [*world.run(fit_and_keep, model, optimizer, where, part)]

    try:
        assert fit_on([0]) == [(0.605, 1), (0.605, 0)]
        assert fit_on([0]) == [(0.605, 2), (0.605, 0)]
        assert fit_on([0, 1]) == [(0.605, 3), (0.605, 1)]
        later = fit_on([])
        assert later[0][0] == later[1][0] < 0.605
    finally:
        world.execute("import sys; del sys._kept_models")


def fit_and_keep_error(model: Any, optimizer: Any) -> float:
    """Train, and keep an exception that has passed through a function with the model."""
    loss = train(model, optimizer)

    def fail(trained: Any) -> None:
        raise ValueError(loss)

    try:
        fail(model)
    except ValueError as error:
        vars(sys)["_kept_error"] = error
    return loss


def test_a_kept_exception_keeps_its_variables(world: World) -> None:
    """The variables of an exception that a call has stored can be looked at later."""
    model = net()
    optimizer = sgd(model)
    look = "import sys; names = [*sys._kept_error.__traceback__.tb_next.tb_frame.f_locals]"
    try:
        assert [*world.run(fit_and_keep_error, model, optimizer)] == [0.605] * 2
        assert [*world.execute(look, fetch=["names"])] == [["trained", "loss"]] * 2
    finally:
        world.execute("del sys._kept_error")


def fit_in_a_cycle(model: Any, optimizer: Any) -> float:
    """Train, and leave a reference cycle that refers to the arguments."""
    cycle: list[Any] = [model, optimizer]
    cycle.append(cycle)
    return train(model, optimizer)


def test_arguments_in_a_cycle_end_with_the_call(world: World) -> None:
    """Each call gets the notebook's arguments, though a cycle keeps the last call's alive."""
    model = net()
    optimizer = sgd(model)
    world.execute("import gc; gc.disable()")
    try:
        for _ in range(3):
            assert [*world.run(fit_in_a_cycle, model, optimizer)] == [0.605] * 2
            assert world.map(lambda _: fit_in_a_cycle(model, optimizer), [0]) == [0.605]
    finally:
        world.execute("gc.enable()")
