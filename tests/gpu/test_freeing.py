"""A rank that fails releases the ranks that wait for it on the GPU, and all ranks go on.

The cells are those of `tests.faults.test_freeing`.  With nccl a rank's Python code does not
wait for its collectives, so messages say less about which rank waited in which line, and results
of an aborted collective mean nothing.  Big collectives move a gigabyte and more, so that kernels
run while a rank fails; other tests are of CUDA graphs, two groups, and point to point.
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

BIG = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "DDP")

SMALL = ("recv", "batch_isend_irecv", "barrier", "all_gather_object", "FSDP2 backward", "DTensor")

WITH_GLOO = ("all_reduce", "DDP")

CASES = [*((name, True) for name in BIG), *((name, False) for name in SMALL)]

NAMES = [f"{name}, big" if is_big else name for name, is_big in CASES]

KEPT_BUSY = "t = torch.ones({length})\nfor step in range(30):\n    {then}\n    dist.all_reduce(t)\n"
"""Collectives of which some are under way when `then` ends the rank."""


@pytest.fixture
def world(world: World, kind: str) -> World:
    """Four ranks with a DDP model and a subgroup, and with meshes if meshes work."""
    if not all(world.gather("'net' in globals()")):
        world.execute(collectives.MODEL)
        if has_meshes(kind):
            world.execute(collectives.SHARDS)
    return world


def has_meshes(kind: str) -> bool:
    """Return True if meshes work: torch may give meshes of CUDA devices nccl in a gloo group."""
    return kind == "nccl" or lab.DEVICE == "cpu"


def goes_on(world: World, kind: str) -> None:
    """Assert that all variables exist, and that all that was built before works."""
    assert world.gather("kept") == [*range(world.size)]
    sources = [faults.MODEL_WORKS, *([faults.SHARDS_WORK] if has_meshes(kind) else [])]
    if kind == "nccl":
        # Values computed from an aborted collective are useless: rank 1 sends its model.
        sources.insert(0, "for p in net.parameters(): dist.broadcast(p.detach(), 1)")
        sources.insert(1, "optimizer.state.clear()")
    for source in sources:
        world.execute(source)


def bad(collective: str, length: int = 256) -> str:
    """Return a cell in which rank 1 raises and the others wait."""
    return (
        f"t = torch.ones({length})\nu = torch.ones(world_size * 64)\n"
        f"if rank == 1:\n    raise ValueError('bad')\n{collective}"
    )


@pytest.mark.parametrize(("name", "is_big"), CASES, ids=NAMES)
def test_a_rank_that_raises_releases_the_others(
    world: World, kind: str, figure: Figure, name: str, *, is_big: bool
) -> None:
    """The cell ends with the exception of rank 1; processes and variables stay, and all goes on."""
    if kind == "gloo" and name not in WITH_GLOO:
        pytest.skip("tests/faults has it on the CPU")
    before = dict(world.pids)
    length = lab.big() // 4 if is_big and kind == "nccl" else 256
    running, error = lab.ends(world, bad(collectives.SMALL[name], length))
    assert isinstance(error, WorkerError)
    assert error.errors.keys() == {1}
    assert "ValueError: bad" in str(error)
    if kind == "gloo":
        assert "Ranks 0,2-3 were waiting in " in str(error)
        assert "(line 5) and were released; no variables were lost." in str(error)
    assert world.pids == before
    goes_on(world, kind)
    figure(f"{kind}: rank 1 of 4 raises, {name} of {4 * length >> 20} MiB", running.age, "s")


def test_a_rank_may_raise_among_running_kernels(world: World, kind: str, figure: Figure) -> None:
    """A rank raises while kernels of large collectives run on all ranks, and all goes on."""
    before = dict(world.pids)
    # Each aborted collective still copies its gigabyte, and gloo copies through the CPU.
    length = lab.big() // (4 if kind == "nccl" else 64)
    source = KEPT_BUSY.format(
        length=length, then="if rank == 1 and step == 3: raise ValueError('bad')"
    )
    running, error = lab.ends(world, source)
    assert "ValueError: bad" in str(error)
    assert world.pids == before
    figure(f"{kind}: raises among 30 all_reduces of {4 * length >> 20} MiB", running.age, "s")
    goes_on(world, kind)


def test_ranks_are_released_from_their_first_collective(
    world: World, kind: str, figure: Figure
) -> None:
    """Ranks are released from the first collective that they ever had, and then once more."""
    world.restart()
    world.execute(lab.ON_DEVICE)
    before = dict(world.pids)
    for _ in range(2):
        running, error = lab.ends(world, bad("dist.all_reduce(t)\nprint(t.sum().item())"))
        assert isinstance(error, WorkerError)
        assert error.errors.keys() == {1}
        figure(f"{kind}: rank 1 raises, 3 in an all_reduce: to idle", running.age, "s")
        assert world.pids == before
    world.execute(lab.SUM)


def test_a_rank_is_released_from_a_new_subgroup(world: World, kind: str) -> None:
    """A rank that waits in a new subgroup for a member that has failed is released."""
    world.execute("new = dist.new_group([0, 2])")
    _, error = lab.ends(
        world,
        "if rank == 2: raise ValueError('bad')\n"
        "if rank == 0:\n    t = torch.ones(1); dist.all_reduce(t, group=new); t.item()",
    )
    assert "ValueError: bad" in str(error)
    world.execute("if rank in (0, 2): dist.all_reduce(torch.ones(1), group=new)")
    goes_on(world, kind)


def test_a_skipped_collective_releases_the_others(world: World, kind: str) -> None:
    """Ranks that wait for a rank that has finished the cell are released, and the cell says so."""
    _, error = lab.ends(world, "t = torch.ones(1)\nif rank != 1:\n    dist.all_reduce(t); t.item()")
    assert isinstance(error, RanksReleased)
    assert "rank 1 finished the cell without" in str(error)
    goes_on(world, kind)


def test_ranks_in_different_collectives_are_released(world: World, kind: str) -> None:
    """Ranks in two different collectives are released, and the error names both."""
    _, error = lab.ends(
        world,
        "t = torch.ones(8)\n"
        "if rank == 1: dist.broadcast(t, 0)\nelse: dist.all_reduce(t)\nt.sum().item()",
    )
    assert isinstance(error, RanksReleased)
    assert "broadcast" in str(error)
    assert "all_reduce" in str(error)
    goes_on(world, kind)


def test_a_cell_for_one_rank_cannot_hang(world: World, kind: str) -> None:
    """A cell of rank 0 with a collective of all ranks cannot hang, and its error says why."""
    _, error = lab.ends(world, "t = torch.ones(1)\ndist.all_reduce(t); t.item()", ranks=[0])
    assert "rank 0 waits in" in str(error)
    assert "ranks 1-3 do not run this cell" in str(error)
    goes_on(world, kind)


def test_a_slow_rank_is_waited_for(world: World, kind: str) -> None:
    """The others wait for a rank that computes for 3 s before it joins the collective."""
    source = "import time\nif rank == 2: time.sleep(3)\nt = torch.ones(1); dist.all_reduce(t)"
    assert list(world.execute(source, fetch=("t.item()",))) == [4.0] * 4
    goes_on(world, kind)


def test_a_group_is_made_after_a_failure(world: World, kind: str) -> None:
    """After a failure `new_group` makes a group that works, also on ranks that waited in it."""
    _, error = lab.ends(world, "if rank == 1: raise ValueError('bad')\ndist.new_group()")
    assert "ValueError: bad" in str(error)
    world.execute("other = dist.new_group(); dist.all_reduce(torch.ones(1), group=other)")
    goes_on(world, kind)


@pytest.mark.parametrize(
    ("dying", "end", "told"),
    [
        (0, "os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        (1, "os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
        (1, "os._exit(3)", "exited with code 3"),
    ],
)
def test_a_rank_that_dies_among_kernels_is_replaced(
    world: World, kind: str, figure: Figure, dying: int, end: str, told: str
) -> None:
    """A rank that dies is replaced under its number; the others keep processes and variables."""
    before = dict(world.pids)
    then = f"if rank == {dying} and step == 3: {end}"
    running, error = lab.ends(
        world, f"import os, signal\n{KEPT_BUSY.format(length=lab.big() // 4, then=then)}"
    )
    assert isinstance(error, WorkerDied)
    assert (error.rank, error.pid) == (dying, before[dying])
    assert told in str(error)
    assert {rank for rank in before if before[rank] != world.pids[rank]} == {dying}
    kept = [None if rank == dying else rank for rank in range(world.size)]
    assert world.gather("globals().get('kept')") == kept
    world.execute(faults.ALL_MEET)
    started = time.monotonic()
    world.execute(lab.SUM)
    name = f"{kind}: rank {dying} of 4 {told}"
    figure(f"{name}: to idle, replaced", running.age, "s")
    figure(f"{name}: the next all_reduce", time.monotonic() - started, "s")


GRAPH = """
def capture():
    global graph, total
    total = torch.ones(4)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        dist.all_reduce(total)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        dist.all_reduce(total)

def replay():
    total.fill_(1)
    graph.replay()
    assert total[0].item() == world_size
"""

TWO = """
other = dist.new_group()
def both(fails=False):
    a, b = torch.ones(LENGTH), torch.ones(LENGTH)
    works = [dist.all_reduce(a, async_op=True)]
    if fails:
        raise ValueError("bad")
    works.append(dist.all_reduce(b, group=other, async_op=True))
    for work in works:
        work.wait()
    assert a[-1].item() == b[-1].item() == world_size
"""

RING = """
def around(fails=False):
    mine, found = torch.full((LENGTH,), float(rank)), torch.empty(LENGTH)
    if fails:
        raise ValueError("bad")
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    sent = [dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, found, before)]
    for work in dist.batch_isend_irecv(sent):
        work.wait()
    assert found[-1].item() == before
"""

IN_FLIGHT = {
    "two groups": (TWO, "both(fails=rank == 1)", "both()"),
    "send and receive": (RING, "around(fails=rank == 1)", "around()"),
    # The captured graph has the communicator that was aborted.
    "a CUDA graph": (
        f"{GRAPH}\ncapture(); replay()",
        "if rank == 1: raise ValueError('bad')\nreplay()",
        "capture(); replay(); replay()",
    ),
}


@lab.NCCL
@pytest.mark.parametrize("name", IN_FLIGHT)
def test_work_in_flight_is_released_and_works_again(
    world: World, figure: Figure, name: str
) -> None:
    """A failure releases ranks from work in flight, which works again in the same processes."""
    if lab.DEVICE == "cpu" and "CUDA" in name:
        pytest.skip("for CUDA")
    made, fails, works = IN_FLIGHT[name]
    world.execute(made.replace("LENGTH", str(lab.big() // 4)))
    world.execute(works)
    before = dict(world.pids)
    running, error = lab.ends(world, fails)
    assert "ValueError: bad" in str(error)
    figure(f"{name}: a rank raises, to idle", running.age, "s")
    assert world.pids == before
    world.execute(works)
