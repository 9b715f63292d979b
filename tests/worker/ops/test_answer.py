"""Tests of `nbdist.worker.ops.answer`: what a front end asks by code of its own."""

from __future__ import annotations

import pytest

from nbdist.errors import WorkerError
from nbdist.wire.task import Call
from nbdist.worker.ops.answer import answer
from nbdist.world.world import World

pytestmark = pytest.mark.shared_world(2)


def test_what_it_prints_comes_back(world: World) -> None:
    """With the rank's variables and IPython's magics, in the notebook's place and shown nowhere."""
    assert answer.__module__.endswith(".answer")
    world.execute("x = rank")
    task = world.task(Call("answer", {"source": "_names = %who_ls\nprint('x' in _names, x)"}))
    assert [*world.session.run(task)] == ["True 0\n", "True 1\n"]
    with pytest.raises(WorkerError, match="nowhere"):
        world.session.run(world.task(Call("answer", {"source": "nowhere"})))
