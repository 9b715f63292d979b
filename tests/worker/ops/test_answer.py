"""Tests of `nbdist.worker.ops.call`: what a front end asks by code of its own."""

from __future__ import annotations

import pytest

from nbdist.errors import WorkerError
from nbdist.wire.work import Call
from nbdist.world.world import World

pytestmark = pytest.mark.shared_world(2)


def test_what_it_prints_comes_back(world: World) -> None:
    """With the rank's variables and IPython's magics, in the notebook's place and shown nowhere."""
    world.execute("x = rank")
    task = world.task(Call("call.answer", {"source": "_names = %who_ls\nprint('x' in _names, x)"}))
    assert [*world.session.run(task)] == ["True 0\n", "True 1\n"]
    with pytest.raises(WorkerError, match="nowhere"):
        world.session.run(world.task(Call("call.answer", {"source": "nowhere"})))
