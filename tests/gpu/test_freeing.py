"""A rank that fails frees those that wait for it on the GPU; all go on.

The cells are those of `tests.faults.test_freeing`.  With nccl a rank's Python code does not
wait for its collectives, so that less is told of who waited in which line; and what was
computed from a collective that was aborted means nothing.
"""

from __future__ import annotations

import time

import pytest

from nbdist.errors import RanksReleased, WorkerDied, WorkerError
from nbdist.world.world import World
from tests.faults import collectives
from tests.faults import test_freeing as faults
from tests.gpu import lab
from tests.gpu.conftest import Figure

pytestmark = [pytest.mark.shared_world, pytest.mark.timeout(75)]

MESHES = ("mesh", "FSDP2 forward", "FSDP2 backward", "DTensor")

HOST_ONLY = ("send", "recv", "batch_isend_irecv")
"""What gloo takes of the CPU's tensors alone, and crashes for others."""

BIG = ("all_reduce", "broadcast", "all_gather", "DDP")

CASES = [*((name, 256) for name in collectives.SMALL), *((name, 25_000_000) for name in BIG)]

NAMES = [f"{name} of 100 MB" if length > 256 else name for name, length in CASES]


@pytest.fixture
def world(world: World, kind: str) -> World:
    """Four ranks with a DDP model and a subgroup, and with meshes where these work."""
    if not all(world.gather("'net' in globals()")):
        world.execute(collectives.MODEL)
        if has_meshes(kind):
            world.execute(collectives.SHARDS)
    return world


def has_meshes(kind: str) -> bool:
    """Some versions of torch give meshes of CUDA devices nccl, whatever the group has."""
    return kind == "nccl" or lab.DEVICE == "cpu"


def goes_on(world: World, kind: str) -> None:
    """All variables are there, and all that was built before works."""
    assert world.gather("kept") == [*range(world.size)]
    sources = [faults.MODEL_WORKS, *([faults.SHARDS_WORK] if has_meshes(kind) else [])]
    if kind == "nccl":
        # What was computed from an aborted collective is no model any more.
        sources.insert(0, "for p in net.parameters(): dist.broadcast(p.detach(), 1)")
        sources.insert(1, "optimizer.state.clear()")
    for source in sources:
        world.execute(source)


def works_with_gloo(world: World, collective: str) -> None:
    """Skip what this torch's gloo does not do with CUDA tensors."""
    try:
        world.execute(f"t = torch.ones(256); u = torch.ones(world_size * 64)\n{collective}")
    except WorkerError as error:
        if lab.DEVICE == "cpu":
            raise
        pytest.skip(f"gloo does not do this with CUDA tensors: {str(error)[:200]}")


def bad(collective: str, length: int) -> str:
    """A cell in which rank 1 raises and the others wait."""
    return (
        f"t = torch.ones({length})\nu = torch.ones(world_size * 64)\n"
        f"if rank == 1:\n    raise ValueError('bad')\n{collective}"
    )


@pytest.mark.parametrize(("name", "length"), CASES, ids=NAMES)
def test_one_rank_raises(world: World, kind: str, name: str, length: int) -> None:
    """The cell ends with that one exception; processes and variables are kept, all goes on."""
    if not has_meshes(kind) and name in MESHES:
        pytest.skip("meshes of CUDA devices may need nccl")
    if kind == "gloo" and lab.DEVICE == "cuda" and name in HOST_ONLY:
        pytest.skip("gloo does this with the CPU's tensors alone")
    collective = collectives.SMALL[name]
    if kind == "gloo" and name not in (*MESHES, *HOST_ONLY):
        works_with_gloo(world, collective)
    before = dict(world.pids)
    running, error = lab.ends(world, bad(collective, length))
    assert isinstance(error, WorkerError)
    assert error.errors.keys() == {1}
    assert "ValueError: bad" in str(error)
    if kind == "gloo":
        assert "Ranks 0,2-3 were waiting in " in str(error)
        assert "(line 5) and were released; no variables were lost." in str(error)
    assert world.pids == before
    goes_on(world, kind)
    lab.say(f"{running.age:.2f} s")


def test_the_first_collective_of_all(world: World, kind: str, figure: Figure) -> None:
    """Ranks that never had a collective before are freed as well, twice."""
    world.restart()
    world.execute(lab.ON_DEVICE)
    before = dict(world.pids)
    for _ in range(2):
        running, error = lab.ends(world, bad("dist.all_reduce(t)\nt.sum().item()", 256))
        assert isinstance(error, WorkerError)
        assert error.errors.keys() == {1}
        figure(f"{kind}: rank 1 raises, 3 in an all_reduce: to idle", running.age, "s")
        assert world.pids == before
    world.execute("t = torch.ones(1); dist.all_reduce(t); assert t.item() == 4")


def test_ranks_that_synchronise(world: World, kind: str) -> None:
    """Who waits for the stream with an aborted collective in it is freed, at that line."""
    before = dict(world.pids)
    _, error = lab.ends(world, bad("dist.all_reduce(t)\nprint(t.sum().item())", 256))
    assert isinstance(error, WorkerError)
    assert error.errors.keys() == {1}
    assert world.pids == before
    goes_on(world, kind)


def test_a_subgroups_collective(world: World, kind: str) -> None:
    """A rank that waits for one of its subgroup's that has failed is freed."""
    world.execute("if rank % 2 == 0: dist.all_reduce(torch.ones(1), group=evens)")
    _, error = lab.ends(
        world,
        "if rank == 2: raise ValueError('bad')\n"
        "if rank == 0:\n    t = torch.ones(1); dist.all_reduce(t, group=evens); t.item()",
    )
    assert "ValueError: bad" in str(error)
    goes_on(world, kind)


def test_a_skipped_collective(world: World, kind: str) -> None:
    """Ranks that wait for one that has finished the cell are freed, and the cell says so."""
    _, error = lab.ends(world, "t = torch.ones(1)\nif rank != 1:\n    dist.all_reduce(t); t.item()")
    assert isinstance(error, RanksReleased)
    assert "rank 1 finished the cell without" in str(error)
    goes_on(world, kind)


def test_a_cell_for_some_ranks(world: World, kind: str) -> None:
    """A cell for one rank with a collective of all cannot hang, and says why."""
    _, error = lab.ends(world, "t = torch.ones(1)\ndist.all_reduce(t); t.item()", ranks=[0])
    assert "rank 0 waits in" in str(error)
    assert "ranks 1-3 do not run this cell" in str(error)
    goes_on(world, kind)


def test_slow_is_not_stuck(world: World, kind: str) -> None:
    """A rank that computes before it joins is waited for, though others have finished."""
    source = "import time\nif rank == 2: time.sleep(3)\nt = torch.ones(1); dist.all_reduce(t)"
    assert list(world.execute(source, fetch=("t.item()",))) == [4.0] * 4
    goes_on(world, kind)


def test_a_group_is_made_after_a_failure(world: World, kind: str) -> None:
    """`new_group` gives one that works, also for those that waited to make one."""
    _, error = lab.ends(world, "if rank == 1: raise ValueError('bad')\ndist.new_group()")
    assert "ValueError: bad" in str(error)
    world.execute(faults.ALL_MEET)
    goes_on(world, kind)


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
        ("os._exit(3)", "exited with code 3"),
    ],
)
@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_dies_in_a_collective(
    world: World, kind: str, figure: Figure, end: str, told: str, dying: int
) -> None:
    """It is replaced under its number; the others keep processes and variables."""
    before = dict(world.pids)
    running, error = lab.ends(
        world,
        f"import os, signal, time\nt = torch.ones(1000)\nif rank == {dying}:\n"
        f"    time.sleep(0.2); {end}\ndist.all_reduce(t)\nt.sum().item()",
    )
    assert isinstance(error, WorkerDied)
    assert (error.rank, error.pid) == (dying, before[dying])
    assert told in str(error)
    assert {rank for rank in before if before[rank] != world.pids[rank]} == {dying}
    kept = [None if rank == dying else rank for rank in range(world.size)]
    assert world.gather("globals().get('kept')") == kept
    world.execute(faults.ALL_MEET)
    started = time.monotonic()
    world.execute("t = torch.ones(1); dist.all_reduce(t); assert t.item() == world_size")
    name = f"{kind}: rank {dying} of 4 dies in an all_reduce"
    figure(f"{name}: to idle, replaced", running.age - 0.2, "s")
    figure(f"{name}: the next all_reduce", time.monotonic() - started, "s")


def test_two_die(world: World) -> None:
    """Both are replaced."""
    _, error = lab.ends(
        world, "import os\nif rank < 2: os._exit(rank + 1)\nt = torch.ones(1); dist.all_reduce(t)"
    )
    assert isinstance(error, WorkerDied)
    assert world.gather("rank") == [*range(world.size)]
    world.execute("t = torch.ones(1); dist.all_reduce(t); assert t.item() == world_size")


def test_ten_times_in_a_row(world: World, kind: str) -> None:
    """Each time the same, with no more descriptors than after the first."""
    held = []
    for _ in range(10):
        lab.ends(world, "if rank == 0: raise ValueError('bad')\ndist.all_reduce(torch.ones(9))")
        goes_on(world, kind)
        held.append(world.gather("len(__import__('os').listdir('/proc/self/fd'))"))
    lab.say(f"{held}")
    assert max(last - first for last, first in zip(held[-1], held[1], strict=True)) <= 2
