"""Tests of `nbdist.worker.ops.sharded`: FSDP2 models and DTensors through a snapshot."""

from __future__ import annotations

import pytest

from nbdist.errors import UsageError, WorkerDied
from nbdist.worker.compat import torch as seam
from nbdist.world.world import World

pytestmark = [pytest.mark.shared_world(2), pytest.mark.usefixtures("empty_snapshot_folder")]

IMPORTS = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
"""

TRAINING = f"""{IMPORTS}
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        # 33 rows are a multiple of nothing; two modules have one parameter.
        self.first, self.second = torch.nn.Linear(8, 33), torch.nn.Linear(33, 8)
        self.head, self.tied = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8)
        self.tied.weight = self.head.weight
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen += 1
        return self.tied(self.head(self.second(self.first(x).relu())))

def train(net, optimizer, steps, of=lambda: rank):
    losses = []
    for step in steps:
        torch.manual_seed(1000 * step + of())
        optimizer.zero_grad()
        loss = net(torch.randn(6, 8)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value

def gathered(net):
    # What stays gathered after a forward, and whether two modules are gathered together.
    with torch.no_grad():
        net(torch.ones(1, 8))
    names = [name for name, p in net.named_parameters() if not isinstance(p, DTensor)]
    return names, fully_shard.state(net.first) is fully_shard.state(net.second)

def everything(net, optimizer):
    states = [each for p in net.parameters() for each in optimizer.state[p].values()]
    grads = [p.grad for p in net.parameters()]
    return [whole(each).detach() for each in [*net.parameters(), *states, *grads]]

torch.manual_seed(1)
net = Net()
"""

OPTIMIZER = "\noptimizer = torch.optim.AdamW(net.parameters(), lr=0.01)"

SHARDED = {
    "as it comes": "fully_shard(net.first); fully_shard(net)",
    "several together, with options": (
        "policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)\n"
        "offload = CPUOffloadPolicy(pin_memory=False)\n"
        "both = {'mp_policy': policy, 'offload_policy': offload, 'reshard_after_forward': False}\n"
        "fully_shard([net.second, net.first], **both)\n"
        "fully_shard(net, reshard_after_forward=True)\n"
        "if hasattr(net, 'set_force_sum_reduction_for_comms'):\n"
        "    net.set_force_sum_reduction_for_comms(True)\n"
        "getattr(net, 'set_gradient_divide_factor', net.set_reduce_scatter_divide_factor)(3.0)"
    ),
    "in part, and replicated": (
        "mesh = init_device_mesh('cpu', (2, 1), mesh_dim_names=('copies', 'shards'))\n"
        "fully_shard(net.first, mesh=mesh)\n"
        "fully_shard(net, mesh=mesh, ignored_params={net.second.weight, net.second.bias})"
    ),
    "by columns, over a part of a mesh": (
        "mesh = init_device_mesh('cpu', (1, 2), mesh_dim_names=('stages', 'shards'))['shards']\n"
        "by = {1: Shard(0), 2: Shard(1)}\n"
        "net.first = torch.nn.Linear(8, 32); net.second = torch.nn.Linear(32, 8)\n"
        "fully_shard(net, mesh=mesh, shard_placement_fn=lambda p: by[p.ndim])"
    ),
}


REPLICATES = seam.VERSION >= (2, 8)
"""Whether FSDP2 reduces gradients over gloo where it replicates too."""

AVERAGES = seam.VERSION >= (2, 9)
"""Whether it averages them; older ones add them up."""


# --- as many ranks ------------------------------------------------------------------------


@pytest.mark.parametrize("how", SHARDED)
def test_training_goes_on_bit_by_bit(world: World, how: str) -> None:
    """New workers get model and optimizer by their names alone, and have the same losses."""
    if "copies" in SHARDED[how] and not REPLICATES:
        pytest.skip("this torch cannot train it over gloo")
    world.execute(f"{TRAINING}\n{SHARDED[how]}{OPTIMIZER}\ntrain(net, optimizer, range(3))")
    stays = world.gather("gathered(net)")
    assert world.snapshot(name="three").left_out == {}
    world.execute("losses = train(net, optimizer, range(3, 6))")
    went_on = world.gather("losses, everything(net, optimizer), net.seen")
    world.restore(["net", "optimizer"], name="three")
    world.execute("losses = train(net, optimizer, range(3, 6))")
    assert world.gather("losses") == [losses for losses, _, _ in went_on]
    world.restart()
    world.restore(name="three")
    world.execute("assert type(net).__name__ == 'FSDPNet' and net.head.weight is net.tied.weight")
    world.execute("losses = train(net, optimizer, range(3, 6))")
    restored = world.gather("losses, everything(net, optimizer), net.seen")
    for (losses, state, seen), (expected, its_state, its_seen) in zip(
        restored, went_on, strict=True
    ):
        assert losses == expected
        assert all(mine.equal(its) for mine, its in zip(state, its_state, strict=True))
        assert seen.equal(its_seen)
    assert world.gather("gathered(net)") == stays


def test_after_a_rank_was_replaced(world: World) -> None:
    """Where some ranks have restored it before and others have not, all of them can again."""
    how = SHARDED["in part, and replicated" if REPLICATES else "by columns, over a part of a mesh"]
    world.execute(f"{TRAINING}\n{how}{OPTIMIZER}\nlosses = train(net, optimizer, range(3))")
    world.snapshot(["net", "optimizer", "train"], name="three")
    world.restore(name="three")
    world.execute("losses = train(net, optimizer, range(3, 6))")
    expected = world.gather("losses")
    with pytest.raises(WorkerDied):
        world.execute("import os\nif rank: os._exit(3)\ntrain(net, optimizer, [6])")
    world.restore(name="three")
    world.execute("losses = train(net, optimizer, range(3, 6))")
    assert world.gather("losses") == expected


def test_hooks_are_kept(world: World) -> None:
    """Users' hooks come along, and neither FSDP2's nor new ones take their places."""
    hook = "def count(module, inputs, output): calls.append(1)\ncalls = []\n"
    for shard in ("fully_shard(net)", "pass"):
        world.restart()
        world.execute(f"{TRAINING}\n{hook}net.register_forward_hook(count)\n{shard}")
        world.snapshot(["net", "calls"], name="hooked")
        world.restart()
        world.restore(name="hooked")
        world.execute("net.register_forward_hook(lambda *_: None); net(torch.ones(1, 8))")
        assert world.gather("len(calls)") == [1, 1]


def test_tensors_and_meshes(world: World) -> None:
    """DTensors of every kind are there again, and their meshes have groups."""
    world.execute(
        f"{IMPORTS}\n"
        "mesh = init_device_mesh('cpu', (1, 2), mesh_dim_names=('a', 'b'))\n"
        "data = torch.arange(15.0).view(5, 3)\n"
        "uneven = distribute_tensor(data, mesh['b'], [Shard(0)])\n"
        "both = distribute_tensor(data.T.contiguous(), mesh, [Shard(1), Shard(0)])\n"
        "copied = distribute_tensor(data, mesh, [Replicate(), Replicate()])\n"
        "partial = DTensor.from_local(data * (rank + 1), mesh['b'], [Partial()])\n"
        "weight = torch.nn.Parameter(uneven); weight.mark = 'mine'"
    )
    world.snapshot(name="a")
    world.restart()
    world.restore(name="a")
    world.execute(
        f"{IMPORTS}\ntotal = torch.ones(1); dist.all_reduce(total, group=mesh.get_group('b'))\n"
        "assert total == 2 and mesh['b'] == uneven.device_mesh\n"
        "assert both.placements == (Shard(1), Shard(0))\n"
        "assert both.full_tensor().equal(data.T) and copied.to_local().equal(data)\n"
        "assert partial.full_tensor().equal(data * 3)\n"
        "assert isinstance(weight, torch.nn.Parameter) and weight.mark == 'mine'\n"
        "assert uneven.full_tensor().equal(data) and uneven.to_local().shape[0] == 3 - rank"
    )


# --- another number of ranks --------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3])
def test_another_size(world: World, size: int) -> None:
    """`--from-rank` shards over as many ranks as there are, and training goes on."""
    world.execute(f"{TRAINING}\nfully_shard(net.first); fully_shard(net){OPTIMIZER}")
    world.execute("train(net, optimizer, range(3), lambda: 0)")
    world.snapshot(["net", "optimizer", "train", "everything"], name="three")
    expected = world.gather("everything(net, optimizer)")[0]
    world.execute("losses = train(net, optimizer, range(3, 6), lambda: 0)")
    losses = world.gather("losses")[0]
    world.restart(size)
    with pytest.raises(UsageError, match=r"`--from 0` gives .* its part of sharded values"):
        world.restore(name="three")
    world.restore(name="three", from_rank=0)
    for state in world.gather("everything(net, optimizer)"):
        assert all(mine.equal(its) for mine, its in zip(state, expected, strict=True))
    assert sum(world.gather("len(net.first.weight.to_local())")) == 33
    world.execute("losses = train(net, optimizer, range(3, 6), lambda: 0)")
    # Over another number of ranks a sum is another one, from the second step on.
    same = slice(None) if AVERAGES else slice(1)
    found = [each[same] for each in world.gather("losses")]
    assert found == [pytest.approx(losses[same])] * size


def test_from_one_rank(world: World) -> None:
    """Of what is sharded each rank gets its own share, whichever rank's variables it gets."""
    world.execute(
        f"{IMPORTS}\nmesh = init_device_mesh('cpu', (2, 1), mesh_dim_names=('a', 'b'))\n"
        "spread = distribute_tensor(torch.arange(6.0), mesh, [Shard(0), Replicate()])\nx = rank"
    )
    world.snapshot(name="a")
    world.restart(2)
    world.restore(name="a", from_rank=1)
    assert world.gather("x, spread.to_local().tolist()") == [(1, [0, 1, 2]), (1, [3, 4, 5])]
    world.restart(3)
    world.restore(name="a", from_rank=1)
    expected = [(1, [0, 1]), (1, [2, 3]), (1, [4, 5])]
    assert world.gather("x, spread.to_local().tolist()") == expected


def test_the_order_on_a_rank(world: World) -> None:
    """A name that one rank has alone does not change which tensor is put together with which."""
    world.execute(
        f"{IMPORTS}\nmesh = init_device_mesh('cpu', (2,))\n"
        "some = [distribute_tensor(torch.full((4,), float(n)), mesh, [Shard(0)]) for n in (1, 2)]"
    )
    world.execute("early = some[1]", ranks=[1])
    world.snapshot(name="a")
    world.restore(name="a", from_rank=0)
    whole = world.gather("[each.full_tensor().tolist() for each in some]")
    assert whole == [[[1] * 4, [2] * 4]] * 2


REFUSED = {
    "tensors": (
        "n = 2 + rank; x = DTensor.from_local(torch.ones(n), whole, [Shard(0)], shape=(n,),"
        " stride=(1,))",
        "the ranks' sharded tensors are not the same ones",
    ),
    "sums": (
        "x = DTensor.from_local(torch.ones(2), whole, [Partial()])",
        "a tensor is P.* on a mesh",
    ),
    "parts": ("x = distribute_tensor(torch.ones(2), pair['b'], [Shard(0)])", "on a part of a mesh"),
    "meshes": (
        "x = init_device_mesh('cpu', (1, 2))",
        r"has a mesh of 1 x 2 ranks, which this world of 3 cannot have. `%dist_restart -n 2`",
    ),
}


def test_what_another_size_cannot_have(world: World) -> None:
    """One line says why, and nothing is bound."""
    pair = "pair = init_device_mesh('cpu', (2, 1), mesh_dim_names=('a', 'b'))"
    world.execute(f"{IMPORTS}\nwhole = init_device_mesh('cpu', (2,)); {pair}")
    for what, (source, _) in REFUSED.items():
        world.execute(source)
        world.snapshot(["x"], name=what)
    world.restart(3)
    for what, (_, said) in REFUSED.items():
        with pytest.raises(UsageError, match=said) as told:
            world.restore(name=what, from_rank=0)
        assert "\n" not in str(told.value)
    assert world.gather("'x' in globals()") == [False] * 3


def test_another_ranks_file_is_damaged(world: World) -> None:
    """A file from which shards are to come is checked like a rank's own; nothing is bound."""
    mesh = "init_device_mesh('cpu', (2,))"
    world.execute(f"{IMPORTS}\nx = distribute_tensor(torch.ones(2), {mesh}, [Shard(0)])")
    file = world.snapshot(name="a").folder / "rank1.frames"
    world.execute("x = None")
    contents = file.read_bytes()
    file.write_bytes(contents[:-9] + bytes(9))
    with pytest.raises(UsageError, match=r"rank1\.frames has other contents than were written"):
        world.restore(name="a", from_rank=0)
    assert world.gather("x") == [None, None]


# --- what is not written ------------------------------------------------------------------

NOT_WRITTEN = {
    "gradients": (
        "net.set_requires_gradient_sync(False)\nnet(torch.ones(1, 8)).sum().backward()",
        "it has gradients that were not reduced yet",
    ),
    "a group": ("net = dist.new_group()", "ProcessGroup.*new_group makes another one"),
    "an all_gather": (
        "class Own: pass\nnet.set_custom_all_gather(Own())",
        "it has communication of its own; use torch.distributed.checkpoint",
    ),
    "several dtypes": (
        "net = Net(); fully_shard(net, mp_policy=MixedPrecisionPolicy(\n"
        "torch.bfloat16, param_dtype_override_fn=lambda p: p.dtype if p.ndim == 1 else None))",
        "its parameters are cast to several dtypes",
    ),
    "a late end": (
        "net.set_manual_backward_finalization(True)",
        "its backward is finalized by a call",
    ),
}

NEEDS = {  # of torch
    "an all_gather": ("FSDPModule", "set_custom_all_gather"),
    "several dtypes": ("MixedPrecisionPolicy", "param_dtype_override_fn"),
    "a late end": ("FSDPModule", "set_manual_backward_finalization"),
}


@pytest.mark.parametrize("what", NOT_WRITTEN)
def test_what_is_not_written(world: World, what: str) -> None:
    """It is named, with what is in the way."""
    from torch.distributed import fsdp  # which takes a second

    if (needs := NEEDS.get(what)) and not hasattr(getattr(fsdp, needs[0]), needs[1]):
        pytest.skip("this torch has no such thing")
    source, said = NOT_WRITTEN[what]
    world.execute(f"{TRAINING}\nfully_shard(net)\n{source}")
    with pytest.raises(UsageError, match=f"`net` cannot be pickled: .*{said}"):
        world.snapshot(["net"], name="a")
