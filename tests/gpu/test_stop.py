"""Stop gives control back, whatever the GPU does."""

from __future__ import annotations

import time

import pytest

from nbdist.errors import NbdistError
from nbdist.world.states import WorldState
from nbdist.world.task_error import error_of
from nbdist.world.world import World
from tests import cells
from tests.gpu import lab
from tests.gpu.conftest import Figure

pytestmark = [pytest.mark.shared_world, pytest.mark.timeout(60)]

STOP_LIMIT = 12.0
"""Seconds after which the test says that Stop has failed; the aim is 5."""

KERNEL = (
    "torch.cuda._sleep(10**12)\n{then}"
    if lab.DEVICE == "cuda"
    else "import ctypes\nctypes.{library}(None).sleep(600)"
)
"""A kernel that runs for minutes; on the CPU it is C code, with the GIL and without."""


def stop(world: World, source: str, times: int = 1) -> tuple[NbdistError | None, float]:
    """Stop a cell that would run for ever; return its error, and the seconds until idle."""
    world.execute("kept = rank")
    running = cells.run_for(world, source, 1.0)
    stopped = time.monotonic()
    for _ in range(times):
        cells.stop(world, running)
    seconds = time.monotonic() - stopped
    assert world.state is WorldState.READY
    return error_of(running), seconds


CASES = {
    "Python code": "while True: pass",
    "one in a collective": "import time\nif rank: time.sleep(600)\n{SUM}",
    "all synchronise": "import time\nif not rank: time.sleep(600)\n{SUM}; torch.cuda.synchronize()",
}


@pytest.mark.parametrize("name", CASES)
def test_stop_keeps_everything(world: World, kind: str, figure: Figure, name: str) -> None:
    """Stop keeps all processes and variables, and the group works."""
    source = CASES[name].replace("{SUM}", lab.SUM)
    if lab.DEVICE == "cpu":
        source = source.replace("; torch.cuda.synchronize()", "")
    before = dict(world.pids)
    error, seconds = stop(world, source)
    assert error is not None
    figure(f"{kind}: Stop, {name}", seconds, "s")
    assert world.pids == before
    assert world.gather("kept") == [0, 1, 2, 3]
    world.execute(lab.SUM)
    assert seconds < STOP_LIMIT


@pytest.mark.parametrize("waits", [True, False], ids=["waited for", "left behind"])
def test_a_second_stop_replaces_only_a_busy_rank(
    world: World, kind: str, figure: Figure, *, waits: bool
) -> None:
    """Stop, pressed twice, replaces at most the rank whose GPU is busy; the group works."""
    kernel = KERNEL.format(
        then="torch.cuda.synchronize()" if waits else "t.item()",
        library="PyDLL" if waits else "CDLL",
    )
    before = dict(world.pids)
    source = f"t = torch.ones(1)\nif rank == 1:\n    {_indented(kernel)}"
    error, seconds = stop(world, source, times=2)
    assert error is not None
    figure(f"{kind}: Stop in a kernel, {'waited for' if waits else 'left behind'}", seconds, "s")
    assert {rank for rank in before if before[rank] != world.pids[rank]} <= {1}
    world.execute(lab.SUM)
    assert seconds < STOP_LIMIT


def _indented(source: str) -> str:
    return source.replace("\n", "\n    ")
