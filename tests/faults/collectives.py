"""Source of calls in which ranks wait: for the tests of releasing, and for tools without pytest."""

from __future__ import annotations

MODEL = """
kept = rank
torch.manual_seed(0)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
evens = dist.new_group([*range(0, world_size, 2)])
"""

SHARDS = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
mesh = init_device_mesh(device.type, (world_size,))
sharded = fully_shard(torch.nn.Linear(64, 64), mesh=mesh)
spread = distribute_tensor(torch.ones(4 * world_size), mesh, [Shard(0)])
"""

BEFORE = MODEL + SHARDS

COLLECTIVES = {
    "all_reduce": "dist.all_reduce(t)",
    "broadcast": "dist.broadcast(t, 1)",
    "all_gather": "dist.all_gather([torch.empty_like(t) for _ in range(world_size)], t)",
    "reduce_scatter": "dist.reduce_scatter_tensor(t[: len(t) // world_size].clone(),"
    " t[: len(t) // world_size * world_size])",
    "all_to_all": "dist.all_to_all_single(torch.empty_like(u), u)",
    "scatter": "dist.scatter(t, [t] * world_size if rank == 1 else None, src=1)",
    "recv": "dist.recv(t, 1)",
    "batch_isend_irecv": "[w.wait() for w in"
    " dist.batch_isend_irecv([dist.P2POp(dist.irecv, t, 1)])]",
    "async": "work = dist.all_reduce(t, async_op=True); work.wait()",
    "mesh": "dist.all_reduce(t, group=mesh.get_group())",
    "DDP": "net(torch.ones(2, 64)).sum().backward()",
}

SMALL_ONLY = {
    "FSDP2 forward": "sharded(torch.ones(2, 64))",
    "FSDP2 backward": "sharded(torch.ones(2, 64)).sum().backward()",
    "DTensor": "spread.full_tensor()",
    "barrier": "dist.barrier()",
    "all_gather_object": "dist.all_gather_object([None] * world_size, rank)",
    "broadcast_object_list": "dist.broadcast_object_list([rank], src=1)",
}

BIG_ONLY = {
    # A small message is sent before any rank receives it.
    "send": "dist.send(t, 1)",
}

SMALL = {**COLLECTIVES, **SMALL_ONLY}
