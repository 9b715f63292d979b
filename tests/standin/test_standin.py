"""The stand-in does what nccl2 does, as tests/gpu has the real one do; and worlds heal on it.

A rank fails while others are in its collectives: they are released, and the world goes on.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from nbdist.errors import WorkerError
from nbdist.world.states import State
from nbdist.world.world import World
from tests.standin import matrix, processes
from tests.standin.processes import CHECKS, Said, both
from tests.waiting import SOON, wait_until


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """What two ranks have said of each check."""
    folder = tmp_path_factory.mktemp("standin")
    return both(folder, "cpu", {**os.environ, "PYTHONPATH": processes.path_with_standin(folder)})


@pytest.mark.parametrize("check", CHECKS)
def test_contract(said: Said, check: str) -> None:
    """Both ranks pass it."""
    said.passed(check)


@pytest.mark.parametrize(("asked", "name"), [("1", "ProcessGroupNCCL2"), ("0", "ProcessGroupNCCL")])
def test_what_is_said_of_nccl(asked: str, name: str) -> None:
    """`nbdist doctor` asks torch which of its two classes `nccl` is; the stand-in is not there."""
    done = subprocess.run(
        [sys.executable, "-m", "nbdist.worker.about"],
        env={**os.environ, "TORCH_DIST_USE_NCCL2": asked},
        capture_output=True,
        text=True,
        timeout=SOON,
    )
    nccl = json.loads(done.stdout)["nccl"]
    if not nccl:
        pytest.skip("this torch has no nccl")
    assert re.fullmatch(rf"[\d.]+ \({name}\)", nccl)


pytestmark = [pytest.mark.own_agent, pytest.mark.shared_world(matrix.RANKS)]


@pytest.fixture(scope="module")
def started() -> Iterator[World]:
    with matrix.made() as world:
        yield world


@pytest.fixture
def world(started: World) -> World:
    """With its models and groups."""
    matrix.prepare(started)
    return started


@pytest.mark.parametrize("name", matrix.ROWS)
def test_goes_on(world: World, name: str) -> None:
    """Survivors keep processes and variables, and all that was made before works on."""
    row, found = matrix.ROWS[name], matrix.run(world, name)
    sys.stdout.write(f"{found.idle:.2f} s to idle, {found.healed:.2f} s to a right collective\n")
    kinds = [kind.__name__ for kind in type(found.error).__mro__]
    assert (row.error or "NoneType") in kinds, found.error
    assert row.said in str(found.error)
    if row.ranks:
        assert getattr(found.error, "errors", {}).keys() == {*row.ranks}
    assert {each for each in found.pids if found.pids[each] != world.pids[each]} == {*row.lost}
    kept = [None if rank in row.lost else rank for rank in range(world.size)]
    assert world.gather("globals().get('kept')") == kept
    if not row.lost:
        world.execute(matrix.GOES_ON)


def test_no_communicator(world: World) -> None:
    """Where a rank cannot make one, the next cell tries again; no variables are lost."""
    before = dict(world.pids)
    world.execute(matrix.BREAKS.format("connect"))
    with pytest.raises(WorkerError, match="bad"):
        world.execute(matrix.ROWS["raises"].source)
    assert world.state is State.BROKEN
    world.execute(matrix.GOES_ON)
    assert world.pids == before


def test_status(world: World) -> None:
    """It says which collective each rank waits in, and which was its last one."""
    source = "import time\nif rank == 1: time.sleep(600)\nt = torch.ones(4); dist.all_reduce(t)"
    running = world.submit(world.task(source))

    def waits(rank: int) -> tuple[str, int, bool]:
        found = world.status()[rank]
        assert found.place is not None
        named = str(found.collective).startswith("all_reduce #")
        return found.place.operation, found.place.line, named and not found.collective.is_done

    try:
        for rank in (0, 2, 3):
            wait_until(lambda rank=rank: waits(rank) == ("all_reduce", 3, True))
        wait_until(lambda: waits(1) == ("", 2, False))
    finally:
        world.interrupt()
        world.session.wait(running)
