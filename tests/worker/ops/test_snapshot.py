"""Tests of `nbdist.worker.ops.snapshot` and `sharded`: variables in files, also models of FSDP2."""

from __future__ import annotations

import ctypes
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from nbdist.errors import UsageError, WorkerDied
from nbdist.system.folders import Untrusted
from nbdist.values.payload import ALIGNMENT
from nbdist.values.pickling import Buffer
from nbdist.worker.compat import torch as seam
from nbdist.worker.ops.snapshot import map_frames, read_frames, write_frames
from nbdist.world.world import World
from tests.faults.test_training import TRAINING as OF_DDP

pytestmark = [pytest.mark.shared_world(2), pytest.mark.usefixtures("empty_snapshot_folder")]


# The import of FSDP2 takes a second in every new worker.
WITHOUT_FSDP = OF_DDP.replace("from torch.distributed.fsdp import fully_shard", "")


def test_restored_training_with_ddp_goes_on_bit_by_bit(world: World) -> None:
    """Restored DDP training ends alike; on 3 ranks the last bits depend on DDP's buckets."""
    world.restart(3)
    world.execute(f"{WITHOUT_FSDP}\nnet, optimizer = make('DDP')\ntrain(net, optimizer, range(5))")
    world.snapshot(name="five")
    world.execute("train(net, optimizer, range(5, 10))")
    went_on = world.gather("weights(net)")
    world.restart()
    world.restore(name="five")
    world.execute("train(net, optimizer, range(5, 7))")
    world.snapshot(name="seven")
    world.restore(name="seven")
    world.execute("train(net, optimizer, range(7, 10))")
    for restored, expected in zip(world.gather("weights(net)"), went_on, strict=True):
        assert restored.equal(expected)


def test_restored_variables_share_objects_as_before(world: World) -> None:
    """Restored variables share objects, have the functions that they use, and draw as before."""
    draw = (
        "import random, numpy\ndrawn = random.random(), numpy.random.rand(), torch.rand(1).item()"
    )
    world.execute(
        "net = torch.nn.Linear(2, 2); optimizer = torch.optim.SGD(net.parameters(), lr=1.0)\n"
        "net(torch.ones(2)).sum().backward()\n"
        "whole = torch.arange(6.0); part = whole[2:4]; both = [whole, part]\n"
        "import math as m\nscale = 3\n"
        "def times(x): return m.floor(x) * scale\n"
        "class Own:\n    def run(self): return times(rank + 0.5)\nown = Own()\n"
        f"{draw}\ntorch.manual_seed(rank)"
    )
    names = ["net", "optimizer", "whole", "part", "both", "own"]
    world.snapshot(names, name="a")
    world.execute(draw)
    first = world.gather("drawn")
    world.restart()
    assert world.restore().names == (*sorted(names),)
    world.execute(draw)
    assert world.gather("drawn") == first
    world.execute(
        "assert optimizer.param_groups[0]['params'][0] is net.weight\n"
        "assert net.weight.grad.tolist() == [[1, 1], [1, 1]]\n"
        "part.fill_(9)\n"
        "assert whole[3] == 9 and both[0] is whole and both[1] is part"
    )
    assert world.gather("own.run()") == [0, 3]
    world.execute("scale = 5")
    assert world.gather("own.run()") == [0, 5]
    world.restore(name="a", from_rank=0)
    world.execute(draw)
    assert world.gather("drawn") != first


def test_a_tuple_is_restored_with_the_objects_that_other_variables_have(world: World) -> None:
    """A tuple that is restored alone has the model and the list that other variables have."""
    world.execute("net = torch.nn.Linear(2, 2); seen = [rank]; pair = net, (seen, 5)")
    world.snapshot("pair", name="pair")
    world.execute("net.weight.data.add_(1); seen.append(7); later = net.weight.tolist()")
    world.restore("pair", name="pair")
    world.execute(
        "assert pair[0] is net and pair[1][0] is seen and pair[1][1] == 5\n"
        "assert seen == [rank] and net.weight.tolist() != later"
    )


def test_a_snapshot_without_room_leaves_earlier_snapshots(world: World, tmp_path: Path) -> None:
    """If a rank cannot write its file, a line says so, and an earlier snapshot stays whole."""
    world.execute("x = 1")
    world.snapshot(["x"], name="a")
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, ({}, resource.RLIM_INFINITY))"
    world.execute(f"import resource\nx = torch.zeros(1 << 20)\n{limit.format(1 << 20)}", ranks=[1])
    with pytest.raises(UsageError, match=r"No snapshot was written: rank 1: File too large\.$"):
        world.snapshot(["x"], name="a")
    world.execute(limit.format("resource.RLIM_INFINITY"), ranks=[1])
    assert len([*(tmp_path / "a").iterdir()]) == 2
    world.restore(name="a")
    assert world.gather("x") == [1, 1]


# --- frames in a file -------------------------------------------------------------------


FRAMES: list[Buffer] = [
    b"first",
    b"",
    bytearray(b"x" * 65_535),
    memoryview(b"y" * 65_536),
    memoryview(b"0123" * 100).cast("i"),
    b"last",
]
WHOLE = [bytes(each) for each in FRAMES]


@pytest.mark.parametrize("read", [read_frames, map_frames])
def test_frames_come_back_as_they_were(
    read: Callable[[Path, str], list[memoryview]], tmp_path: Path
) -> None:
    """Frames come back in order and writable; the file is private, and never written over."""
    path = tmp_path / "rank0.frames"
    size, digest = write_frames(path, FRAMES)
    assert path.stat().st_size == size
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    frames, others = read(path, digest), read(path, digest)
    assert [*map(bytes, frames)] == WHOLE
    for frame in filter(len, frames):
        address = ctypes.addressof(ctypes.c_char.from_buffer(frame))
        assert read is map_frames or address % ALIGNMENT == 0
        frame[:] = b"z" * len(frame)
    assert [*map(bytes, frames)] == [b"z" * len(each) for each in WHOLE]
    assert [*map(bytes, others)] == [*map(bytes, read(path, digest))] == WHOLE
    with pytest.raises(FileExistsError):
        write_frames(path, FRAMES)
    path.chmod(0o620)
    with pytest.raises(Untrusted, match="others can write"):
        read(path, digest)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read(path, digest)
    assert read(path, write_frames(path, [])[1]) == []


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
    "several together, with options": """
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
offload = CPUOffloadPolicy(pin_memory=False)
both = {'mp_policy': policy, 'offload_policy': offload, 'reshard_after_forward': False}
fully_shard([net.second, net.first], **both)
fully_shard(net, reshard_after_forward=True)
if hasattr(net, 'set_force_sum_reduction_for_comms'):
    net.set_force_sum_reduction_for_comms(True)
getattr(net, 'set_gradient_divide_factor', net.set_reduce_scatter_divide_factor)(3.0)""",
    "in part, and replicated": """
mesh = init_device_mesh('cpu', (2, 1), mesh_dim_names=('copies', 'shards'))
fully_shard(net.first, mesh=mesh)
fully_shard(net, mesh=mesh, ignored_params={net.second.weight, net.second.bias})""",
    "by columns, over a part of a mesh": """
mesh = init_device_mesh('cpu', (1, 2), mesh_dim_names=('stages', 'shards'))['shards']
by = {1: Shard(0), 2: Shard(1)}
net.first = torch.nn.Linear(8, 32); net.second = torch.nn.Linear(32, 8)
fully_shard(net, mesh=mesh, shard_placement_fn=lambda p: by[p.ndim])""",
}

# Whether FSDP2 reduces gradients over gloo even if it replicates, and whether it averages them.
REPLICATES, AVERAGES = seam.VERSION >= (2, 8), seam.VERSION >= (2, 9)


def test_restored_training_with_fsdp_goes_on_bit_by_bit(world: World) -> None:
    """Restored FSDP2 models train on with equal losses, on the same workers and on new workers."""
    world.execute(f"{TRAINING}\nnets = []")
    for how in SHARDED.values():
        if REPLICATES or "copies" not in how:  # else this torch cannot train the model over gloo
            world.execute(f"torch.manual_seed(1); net = Net()\n{how}{OPTIMIZER}")
            world.execute("train(net, optimizer, range(3)); nets.append((net, optimizer))")
    stays = world.gather("[gathered(net) for net, _ in nets]")
    assert world.snapshot(name="three").left_out == {}
    go_on = "losses = [train(*each, range(3, 6)) for each in nets]"
    states = "[[*everything(*each), each[0].seen] for each in nets]"
    world.execute(go_on)
    losses, expected = world.gather("losses"), world.gather(states)
    world.restore(["nets"], name="three")
    world.execute(go_on)
    assert world.gather("losses") == losses
    world.restart()
    world.restore(name="three")
    kinds = "{(type(net).__name__, net.head.weight is net.tied.weight) for net, _ in nets}"
    assert world.gather(kinds) == [{("FSDPNet", True)}] * 2
    world.execute(go_on)
    assert world.gather("losses") == losses
    for rank, of_nets in enumerate(world.gather(states)):
        for found, state in zip(of_nets, expected[rank], strict=True):
            assert all(mine.equal(its) for mine, its in zip(found, state, strict=True))
    assert world.gather("[gathered(net) for net, _ in nets]") == stays


def test_all_ranks_can_restore_after_a_replacement(world: World) -> None:
    """All ranks can restore a snapshot that only some of them have restored before."""
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
    """Restored modules keep the user's hooks, beside FSDP2's hooks and hooks registered later."""
    hook = "def count(module, inputs, output): calls.append(1)\ncalls, plain = [], Net()\n"
    register = "for each in (net, plain): each.register_forward_hook({})\n"
    world.execute(f"{TRAINING}\n{hook}{register.format('count')}fully_shard(net)")
    world.snapshot(["net", "plain", "calls"], name="hooked")
    world.restart()
    world.restore(name="hooked")
    world.execute(f"{register.format('lambda *_: None')}net(x := torch.ones(1, 8)), plain(x)")
    assert world.gather("len(calls)") == [2, 2]


def test_dtensors_come_back_with_working_meshes(world: World) -> None:
    """DTensors of each placement are restored, and the groups of their meshes work."""
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


def test_one_ranks_model_is_sharded_over_another_size(world: World) -> None:
    """With `from_rank` models are sharded over all ranks of a world of any size, and train on."""
    world.execute(f"{TRAINING}\nfully_shard(net.first); fully_shard(net){OPTIMIZER}")
    world.execute("train(net, optimizer, range(3), lambda: 0)")
    world.snapshot(["net", "optimizer", "train", "everything"], name="three")
    expected = world.gather("everything(net, optimizer)")[0]
    world.execute("losses = train(net, optimizer, range(3, 6), lambda: 0)")
    losses = world.gather("losses")[0]
    for size in (1, 3):
        world.restart(size)
        with pytest.raises(UsageError, match=r"`--from 0` gives .* its part of sharded values"):
            world.restore(name="three")
        world.restore(name="three", from_rank=0)
        for state in world.gather("everything(net, optimizer)"):
            assert all(mine.equal(its) for mine, its in zip(state, expected, strict=True))
        assert sum(world.gather("len(net.first.weight.to_local())")) == 33
        world.execute("losses = train(net, optimizer, range(3, 6), lambda: 0)")
        # Unless gradients are averaged, another number of ranks changes the second step's loss.
        same = slice(None) if AVERAGES else slice(1)
        found = [each[same] for each in world.gather("losses")]
        assert found == [pytest.approx(losses[same])] * size


def test_each_rank_gets_its_share_of_one_ranks_variables(world: World) -> None:
    """With `from_rank` each rank gets its share of sharded values; from a damaged file, nothing."""
    world.execute(
        f"{IMPORTS}\nmesh = init_device_mesh('cpu', (2, 1), mesh_dim_names=('a', 'b'))\n"
        "spread = distribute_tensor(torch.arange(6.0), mesh, [Shard(0), Replicate()])\nx = rank\n"
        "line = init_device_mesh('cpu', (2,))\n"
        "some = [distribute_tensor(torch.full((4,), float(n)), line, [Shard(0)]) for n in (1, 2)]"
    )
    world.execute("early = some[1]", ranks=[1])
    file = world.snapshot(name="a").folder / "rank1.frames"
    world.restore(name="a", from_rank=0)
    whole = world.gather("[each.full_tensor().tolist() for each in some]")
    assert whole == [[[1] * 4, [2] * 4]] * 2
    world.restart(2)
    world.restore(name="a", from_rank=1)
    assert world.gather("x, spread.to_local().tolist()") == [(1, [0, 1, 2]), (1, [3, 4, 5])]
    world.restart(3)
    world.restore(name="a", from_rank=1)
    expected = [(1, [0, 1]), (1, [2, 3]), (1, [4, 5])]
    assert world.gather("x, spread.to_local().tolist()") == expected
    world.execute("spread = None")
    contents = file.read_bytes()
    file.write_bytes(contents[:-9] + bytes(9))
    with pytest.raises(UsageError, match=r"rank1\.frames has other contents than were written"):
        world.restore(name="a", from_rank=0)
    assert world.gather("spread") == [None] * 3


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


def test_values_that_fit_no_other_size_are_refused(world: World) -> None:
    """A value that a world of another size cannot have is refused in one line; nothing is bound."""
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

NEEDS = {  # classes of torch, with the method or field
    "an all_gather": ("FSDPModule", "set_custom_all_gather"),
    "several dtypes": ("MixedPrecisionPolicy", "param_dtype_override_fn"),
    "a late end": ("FSDPModule", "set_manual_backward_finalization"),
}


def test_a_model_that_cannot_be_written_is_named(world: World) -> None:
    """A model that cannot be pickled is refused by its name, with the reason."""
    from torch.distributed import fsdp  # the import takes a second

    for what, (source, said) in NOT_WRITTEN.items():
        owner, name = NEEDS.get(what, ("FSDPModule", "unshard"))
        if hasattr(getattr(fsdp, owner), name):  # else this torch lacks the method or field
            world.execute(f"{TRAINING}\nfully_shard(net)\n{source}")
            with pytest.raises(UsageError, match=f"`net` cannot be pickled: .*{said}"):
                world.snapshot(["net"], name="a")
