"""Tests of `nbdist.worker.compat.torch`: of all that is waited for, receives alone end."""

from __future__ import annotations

import pytest

from nbdist.world.world import World

pytestmark = pytest.mark.shared_world(2)

ONLY_RECEIVES = """
from nbdist.worker.compat.torch import end_receive
reduced = dist.all_reduce(torch.ones(1), async_op=True)
sent = dist.isend(torch.ones(1), (rank + 1) % world_size)
assert not end_receive(reduced)
assert not end_receive(sent)
dist.recv(t := torch.zeros(1), (rank - 1) % world_size)
reduced.wait(), sent.wait()
never = dist.irecv(t, tag=5)
assert end_receive(never)
assert not never.wait()
"""


def test_only_receives_can_be_ended(world: World) -> None:
    """What is no receive of gloo's is left alone, by its class in C++."""
    world.execute(ONLY_RECEIVES)
