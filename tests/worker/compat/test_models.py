"""Tests of `nbdist.worker.compat.models`: what torch keeps of DDP and FSDP2 in a module."""

from __future__ import annotations

import pytest

from nbdist.world.world import World

pytestmark = pytest.mark.shared_world(2)

DDP = """
from nbdist.worker.compat import models
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
x = torch.ones(1, 4)
assert models.buckets_of(net) is None
for _ in range(2):
    net(x).sum().backward()
    net(x)
found = models.buckets_of(net)
assert sorted(sum(found, [])) == [0, 1], found
assert not models.set_buckets(net, [[0]])
assert models.set_buckets(net, [[0], [1]])
net.zero_grad()
net(x).sum().backward()
assert torch.equal(net.module.weight.grad, torch.ones(2, 4)), net.module.weight.grad
"""

FSDP = """
from nbdist.worker.compat import models
from torch.distributed.fsdp import fully_shard
net = torch.nn.Sequential(torch.nn.Linear(4, 4))
net[0].register_forward_hook(lambda *_: None)
hooks = dict(net[0]._forward_hooks)
names = {*vars(net[0])}
assert not models.is_of_fsdp(net[0])
fully_shard(net[0], reshard_after_forward=False)
fully_shard(net)
net(torch.ones(1, 4)).sum().backward()
assert models.is_of_fsdp(net[0])
assert models.class_before_fsdp(type(net[0])) is torch.nn.Linear
before = models.without_fsdp(vars(net[0]))
assert {*before} == names, {*before} ^ names
assert dict(before["_forward_hooks"]) == hooks
_, mesh, options, settings = models.sharding_of(net[0])
assert models.root_of(mesh).size() == world_size
assert options["reshard_after_forward"] is False
assert settings and models.why_only_here(net[0]) == ""
models.set_on_fsdp(net[0], {"reduce_grads": False})
assert models.sharding_of(net[0])[3]["reduce_grads"] is False
net(torch.ones(1, 4)).sum().backward()
assert models.why_only_here(net[0]) == "it has gradients that were not reduced yet"
"""


def test_buckets_of_ddp(world: World) -> None:
    """There are none before the second step; others are refused unless they have each parameter."""
    world.execute(DDP)


def test_what_fully_shard_adds(world: World) -> None:
    """It can be told from what the module had, and what it was given can be found."""
    world.execute(FSDP)
