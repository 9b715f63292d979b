"""Tests of `nbdist.worker.ops.snapshot`: variables in files, and files that were changed."""

from __future__ import annotations

import ctypes
import os
import resource
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nbdist.errors import UsageError
from nbdist.system.folders import Untrusted
from nbdist.values.shared_memory import ALIGNMENT, Buffer
from nbdist.worker.ops.snapshot import MAGIC, Damaged, map_frames, read_frames, write_frames
from nbdist.world.world import World
from tests.faults.test_training import TRAINING

pytestmark = [pytest.mark.shared_world(2), pytest.mark.usefixtures("empty_snapshot_folder")]


def entries(folder: Path) -> list[str]:
    """What lies in a folder; complete snapshots have no dot in front."""
    return sorted(each.name for each in folder.iterdir())


# Its import takes a second in every new worker.
WITHOUT_FSDP = TRAINING.replace("from torch.distributed.fsdp import fully_shard", "")


def test_training_goes_on_bit_by_bit(world: World) -> None:
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


def test_no_frames(read: Read, path: Path) -> None:
    """They are no error."""
    assert read(path, *write_frames(path, [])) == []


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


@pytest.fixture
def _small_files() -> Iterator[None]:
    """What a full disk would do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("_small_files")
def test_no_room_for_frames(path: Path) -> None:
    """It is an OSError, whatever has been written by then."""
    with pytest.raises(OSError, match="File too large"):
        write_frames(path, FRAMES)


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


LENGTH, SIZES, WIDTH = len(MAGIC), len(MAGIC) + 8, 28
PARTS = (b"{", b"[9", b"[-", b'["', b"\xff", b"[" + b"9" * 26 + b"]")
WHOLE = (b"12", b"{}", b"[1.5]", b"[[1],2]", b"[true]", b"[131481, -1]")
LISTED = (*PARTS, *(text.ljust(WIDTH) for text in WHOLE))
"""In the place of `[5, 0, 65535, 65536, 400, 4]`."""


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, r"rank0\.frames has [\d,]+ of [\d,]+ bytes"),
        (grow, r"rank0\.frames has [\d,]+ of [\d,]+ bytes"),
        (empty, r"rank0\.frames has 0 of [\d,]+ bytes"),
        (change(-1, b"X"), "other contents"),
        (change(0, b"X"), "other contents"),
        (change(LENGTH, b"\xff" * 8), "other contents"),
        *((change(SIZES, listed), "other contents") for listed in LISTED),
    ],
    ids=["cut", "grown", "empty", "end", "begin", "length", *map(str, LISTED)],
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
