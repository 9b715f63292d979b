"""Groups of nccl alone, without connections of gloo that show which ranks wait, or release them.

The tests use the backend that "nccl" stands for, and the old backend of torch if it is another.
Without nbdist, torch's own nccl2 passes the checks of its stand-in; no GPU has run this part yet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from nbdist.errors import RanksReleased, WorkerDied, WorkerError
from nbdist.wire.spec import MULTI_RANK_NCCL, WITH_NCCL, sharing_variables
from nbdist.world.world import World
from tests.gpu import lab
from tests.gpu.conftest import Figure, needs_gpu
from tests.standin import processes
from tests.standin.conftest import has_torch
from tests.standin.processes import CHECKS, Said, both
from tests.waiting import SOON

pytestmark = [pytest.mark.shared_world, pytest.mark.timeout(75)]

EVENS = "t = torch.ones(1)\nif rank % 2 == 0: dist.all_reduce(t, group=evens); t.item()"


@pytest.fixture(scope="module", params=["nccl", "nccl-legacy"])
def kind(request: pytest.FixtureRequest) -> str:
    needs_gpu()
    if request.param == "nccl-legacy" and (lab.TORCH < (2, 15) or lab.DEVICE == "cpu"):
        pytest.skip('"nccl" is the old one here')
    return str(request.param)


@pytest.fixture(scope="module")
def started(kind: str) -> Iterator[World]:
    with lab.make_world("nccl", 4, backend=kind) as world:
        yield world


@pytest.fixture
def world(world: World) -> World:
    world.execute(f"kept = rank\nevens = dist.new_group([0, 2])\n{EVENS}")
    return world


def test_a_rank_that_raises_releases_the_others(world: World, kind: str, figure: Figure) -> None:
    """A rank that raises releases the ranks that wait, and group and subgroup work again."""
    before, took = dict(world.pids), []
    for _ in range(5):
        running, error = lab.ends(world, f"if rank == 1: raise ValueError('bad')\n{lab.SUM}")
        assert isinstance(error, WorkerError)
        assert error.errors.keys() == {1}
        took.append(running.age)
        world.execute(f"{lab.SUM}\n{EVENS}\ndist.barrier()")
    assert world.pids == before
    assert world.gather("kept") == [0, 1, 2, 3]
    (name,) = {*world.gather("type(dist.group.WORLD._get_backend(device)).__name__")}
    figure(f"{kind} ({name}): a rank raises, to idle and connected, median of 5", median(took), "s")


def test_a_skipped_collective_releases_the_others(world: World) -> None:
    """Ranks that wait for a rank that has finished the cell are released."""
    _, error = lab.ends(world, f"if rank != 1:\n    {lab.SUM}")
    assert isinstance(error, RanksReleased)
    world.execute(lab.SUM)


@pytest.mark.parametrize("dying", [0, 3])
def test_a_dead_rank_is_replaced_at_once(world: World, dying: int) -> None:
    """A dead rank is replaced at once, whether the subgroup that others hold had it or not."""
    running, error = lab.ends(world, f"import os\nif rank == {dying}: os._exit(3)\n{lab.SUM}")
    assert isinstance(error, WorkerDied)
    assert running.age < lab.FREED_WITHIN
    world.execute(lab.SUM)
    world.execute("other = dist.new_group(); dist.all_reduce(torch.ones(1), group=other)")


@pytest.mark.parametrize("name", ["nccl", "nccl-legacy"])
def test_two_ranks_release_and_connect_their_group(
    gpu: str, figure: Figure, tmp_path: Path, name: str
) -> None:
    """Two plain processes release their group and connect it again; the report has the times."""
    least = {"cuda nccl": (2, 0), "cuda nccl-legacy": (2, 15), "cpu nccl": (2, 15)}
    if least.get(f"{gpu} {name}", (9,)) > lab.TORCH:
        pytest.skip("it is not here, and no stand-in for it")
    standin = {"PYTHONPATH": processes.path_with_standin(tmp_path)} if gpu == "cpu" else {}
    version, ranks = MULTI_RANK_NCCL if lab.TORCH >= (2, 14) else (), []
    for rank in range(2):
        shared = sharing_variables(rank, version, os.environ) if lab.gpus() == 1 else {}
        command = [sys.executable, "-m", "tests.gpu.renewals", str(rank), str(tmp_path / "store")]
        environ = {**os.environ, **WITH_NCCL, **shared, **standin}
        ranks.append(subprocess.Popen([*command, gpu, name], env=environ, stdout=subprocess.PIPE))
    try:
        found, _ = (json.loads(rank.communicate(timeout=SOON)[0]) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for what in ("released", "connected"):
        figure(f"{found['class']}, 2 ranks: {what}, median of 9", found[what], "ms")


@pytest.fixture(scope="module")
def said(gpu: str, tmp_path_factory: pytest.TempPathFactory) -> Said:
    """The answers of two ranks to each check; the ranks share a GPU if there is only one."""
    if gpu == "cpu" or not has_torch():
        pytest.skip("nccl2 is in torch from 2.15 on, with CUDA")
    shared = sharing_variables(0, MULTI_RANK_NCCL, os.environ) if lab.gpus() < 2 else {}
    return both(tmp_path_factory.mktemp("contract"), gpu, {**os.environ, **shared})


@pytest.mark.parametrize("check", CHECKS)
def test_nccl2_passes_each_check_of_its_contract(said: Said, check: str) -> None:
    """Both ranks pass the check."""
    said.passed(check)
