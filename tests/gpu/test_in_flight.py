"""What is under way on the GPU when a rank fails: CUDA graphs, two groups, point to point."""

from __future__ import annotations

import pytest

from nbdist.world.world import World
from tests.gpu import lab
from tests.gpu.conftest import Figure

pytestmark = [lab.NCCL, pytest.mark.shared_world, pytest.mark.timeout(75)]

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

CASES = {
    "two groups": (TWO, "both(fails=rank == 1)", "both()"),
    "send and receive": (RING, "around(fails=rank == 1)", "around()"),
    # What was captured has the communicator that was aborted.
    "a CUDA graph": (
        f"{GRAPH}\ncapture(); replay()",
        "if rank == 1: raise ValueError('bad')\nreplay()",
        "capture(); replay(); replay()",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_rank_raises(world: World, figure: Figure, name: str) -> None:
    """The others are released; the same works again, with the processes there were."""
    if lab.DEVICE == "cpu" and "CUDA" in name:
        pytest.skip("for CUDA")
    made, fails, works = CASES[name]
    world.execute(made.replace("LENGTH", str(lab.big() // 4)))
    world.execute(works)
    before = dict(world.pids)
    running, error = lab.ends(world, fails)
    assert "ValueError: bad" in str(error)
    figure(f"{name}: a rank raises, to idle", running.age, "s")
    assert world.pids == before
    world.execute(works)
