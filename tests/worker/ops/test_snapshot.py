"""Tests of `nbdist.worker.ops.snapshot` and `sharded`: variables in files, models of FSDP2 too."""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from nbdist.errors import UsageError, WorkerDied
from nbdist.system.folders import Untrusted
from nbdist.values.shared_memory import ALIGNMENT, Buffer
from nbdist.worker.compat import torch as seam
from nbdist.worker.ops.snapshot import MAGIC, Damaged, map_frames, read_frames, write_frames
from nbdist.world.world import World
from tests.faults.test_training import TRAINING as OF_DDP

pytestmark = [pytest.mark.shared_world(2), pytest.mark.usefixtures("empty_snapshot_folder")]


def entries(folder: Path) -> list[str]:
    """What lies in a folder; complete snapshots have no dot in front."""
    return sorted(each.name for each in folder.iterdir())


# Its import takes a second in every new worker.
WITHOUT_FSDP = OF_DDP.replace("from torch.distributed.fsdp import fully_shard", "")


def test_training_with_ddp_goes_on(world: World) -> None:
    """Five steps, a snapshot, five more; new workers do these from the snapshot alike.

    On three ranks, where the last bits of a sum depend on DDP's buckets.
    """
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


def test_objects_stay_shared(world: World) -> None:
    """A rank's variables are one graph: what shared an object does so again, views too."""
    world.execute(
        "net = torch.nn.Linear(2, 2); optimizer = torch.optim.SGD(net.parameters(), lr=1.0)\n"
        "net(torch.ones(2)).sum().backward()\n"
        "whole = torch.arange(6.0); part = whole[2:4]; both = [whole, part]"
    )
    world.snapshot(["net", "optimizer", "whole", "part", "both"], name="a")
    world.execute("del net, optimizer, whole, part, both")
    assert world.restore(name="a").names == ("both", "net", "optimizer", "part", "whole")
    world.execute(
        "assert optimizer.param_groups[0]['params'][0] is net.weight\n"
        "assert net.weight.grad.tolist() == [[1, 1], [1, 1]]\n"
        "part.fill_(9)\n"
        "assert whole[3] == 9 and both[0] is whole and both[1] is part"
    )


def test_random_numbers_go_on(world: World) -> None:
    """Python, numpy and torch go on with the numbers that would have come."""
    draw = (
        "import random, numpy\nx = 1\n"
        "drawn = random.random(), numpy.random.rand(), torch.rand(1).item()"
    )
    world.execute(f"{draw}\ntorch.manual_seed(rank)")
    world.snapshot(["x"], name="a")
    world.execute(draw)
    first = world.gather("drawn")
    world.restart()
    world.restore()
    world.execute(draw)
    assert world.gather("drawn") == first
    world.restore(name="a", from_rank=0)
    world.execute(draw)
    assert world.gather("drawn") != first


def test_cell_functions_come_with_what_they_use(world: World) -> None:
    """Functions and classes of cells are rebuilt in the workers' namespace, with their names."""
    world.execute(
        "import math as m\nscale = 3\n"
        "def times(x): return m.floor(x) * scale\n"
        "class Net:\n    def run(self): return times(rank + 0.5)\nnet = Net()"
    )
    world.snapshot(["net"], name="a")
    world.restart()
    assert world.restore().names == ("net",)
    assert world.gather("net.run()") == [0, 3]
    world.execute("scale = 5")
    assert world.gather("net.run()") == [0, 5]


def test_no_room(world: World, tmp_path: Path) -> None:
    """Where a rank cannot write, one line says so, and earlier snapshots are as they were."""
    world.execute("x = 1")
    world.snapshot(["x"], name="a")
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, ({}, resource.RLIM_INFINITY))"
    world.execute(f"import resource\nx = torch.zeros(1 << 20)\n{limit.format(1 << 20)}", ranks=[1])
    with pytest.raises(UsageError, match=r"No snapshot was written: rank 1: File too large\.$"):
        world.snapshot(["x"], name="a")
    world.execute(limit.format("resource.RLIM_INFINITY"), ranks=[1])
    assert len(entries(tmp_path / "a")) == 2
    world.restore(name="a")
    assert world.gather("x") == [1, 1]


# --- frames in a file -------------------------------------------------------------------


SMALL = 1 << 16
FRAMES: list[Buffer] = [
    b"first",
    b"",
    bytearray(b"x" * (SMALL - 1)),
    memoryview(b"y" * SMALL),
    memoryview(b"0123" * 100).cast("i"),
    b"last",
]

Read = Callable[[Path, int, str], list[memoryview]]


@pytest.fixture(params=[read_frames, map_frames])
def read(request: pytest.FixtureRequest) -> Read:
    """Each way to read them."""
    found: Read = request.param
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank0.frames"


def contents(frames: list[memoryview]) -> list[bytes]:
    return [bytes(frame) for frame in frames]


def test_frames_come_back_as_they_were(read: Read, path: Path) -> None:
    """In their order, of any kind of memory; the file is this user's alone."""
    size, digest = write_frames(path, FRAMES)
    assert path.stat().st_size == size
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert contents(read(path, size, digest)) == [bytes(each) for each in FRAMES]
    none = path.with_name("none")
    assert read(none, *write_frames(none, [])) == []


def test_frames_can_be_written_to(path: Path) -> None:
    """They begin where torch's own do, none reaches into another, and the file stays."""
    size, digest = write_frames(path, FRAMES)
    frames = read_frames(path, size, digest)
    for frame in filter(len, frames):
        address = ctypes.addressof(ctypes.c_char.from_buffer(frame))
        assert address % ALIGNMENT == 0
        frame[:] = b"z" * len(frame)
    assert contents(frames) == [b"z" * memoryview(each).nbytes for each in FRAMES]
    assert contents(read_frames(path, size, digest)) == [bytes(each) for each in FRAMES]


def test_mapped_frames_can_be_written_to(path: Path) -> None:
    """The file stays as it is, and so do the frames of other readers."""
    size, digest = write_frames(path, FRAMES)
    first, second = map_frames(path, size, digest), map_frames(path, size, digest)
    first[0][:] = b"z" * 5
    assert bytes(second[0]) == bytes(map_frames(path, size, digest)[0]) == b"first"


def test_a_file_is_never_written_over(path: Path) -> None:
    """One of that name is somebody else's."""
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        write_frames(path, FRAMES)
    assert path.read_text() == "mine"


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def change(at: int, to: bytes) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
            file.write(to)

    return damage


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, r"rank0\.frames has [\d,]+ of [\d,]+ bytes"),
        (grow, r"rank0\.frames has [\d,]+ of [\d,]+ bytes"),
        (empty, r"rank0\.frames has 0 of [\d,]+ bytes"),
        (change(-1, b"X"), "other contents"),
        (change(0, b"X"), "other contents"),
        (change(len(MAGIC), b"\xff" * 8), "other contents"),
    ],
    ids=["cut", "grown", "empty", "end", "begin", "length"],
)
def test_damage_is_told(read: Read, path: Path, damage: Callable[[Path], None], said: str) -> None:
    """Wherever a file differs from what was written."""
    size, digest = write_frames(path, FRAMES)
    damage(path)
    with pytest.raises(Damaged, match=said):
        read(path, size, digest)


def test_another_file(read: Read, path: Path) -> None:
    """One that is whole is not the one that was meant."""
    size, digest = write_frames(path, [b"one"])
    path.unlink()
    assert write_frames(path, [b"two"])[0] == size
    with pytest.raises(Damaged, match="other contents"):
        read(path, size, digest)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read(path, size, digest)


def test_a_file_that_others_could_have_written(read: Read, path: Path) -> None:
    """Nothing of it is read."""
    size, digest = write_frames(path, FRAMES)
    path.chmod(0o620)
    with pytest.raises(Untrusted, match="others can write"):
        read(path, size, digest)


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


# --- sharded: as many ranks ---------------------------------------------------------------


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
