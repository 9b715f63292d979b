"""The environment of the workers beside that of a real torchrun's, name by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from nbdist.agent.worker_group import HeldPort
from nbdist.world.world import World

pytestmark = pytest.mark.shared_world

TORCHRUN_TIMEOUT = 100.0
DUMP = """
import json, os, sys
with open(f"{sys.argv[1]}/{os.environ['RANK']}.json", "w") as file:
    json.dump(dict(os.environ), file)
"""
CORES = len(os.sched_getaffinity(0))

Environs = list[Mapping[str, str]]

# The table in nbdist.wire.spec says why.
OTHER_VALUES = {
    "OMP_NUM_THREADS",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
}
ONLY_TORCHRUN = {"TORCHELASTIC_SIGNALS_TO_HANDLE"}
ONLY_HERE = {
    *("PYTHON_EXEC", "GLOO_SOCKET_IFNAME", "TORCH_NCCL_ENABLE_MONITORING", "MPLBACKEND"),
    *("TTY_COMPATIBLE", "PYDEVD_DISABLE_FILE_VALIDATION", "NBDIST_WORLD"),
}
# What every ipykernel sets, for commands in cells.
IPYKERNELS = {"PAGER", "GIT_PAGER", "CLICOLOR", "CLICOLOR_FORCE", "FORCE_COLOR", "TERM"}
# Numbers, names and paths of the run.
OF_THE_RUN = {
    *("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "PYTEST_CURRENT_TEST")
}


def plain_environ() -> dict[str, str]:
    """The environment without all of that, and without GPUs."""
    names = ONLY_HERE | OTHER_VALUES | IPYKERNELS
    plain = {name: value for name, value in os.environ.items() if name not in names}
    return {**plain, "CUDA_VISIBLE_DEVICES": ""}


def start_torchrun(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    """The real one, whose workers write their environments into the folder."""
    folder.mkdir(exist_ok=True)
    script = folder / "dump.py"
    script.write_text(DUMP)
    run = [sys.executable, "-m", "torch.distributed.run", "--log-dir", str(folder), *options]
    command = [*run, str(script), str(folder)]
    return subprocess.Popen(command, env=plain_environ(), stderr=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def torchruns(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Environs]:
    """What three ranks of one torchrun have, and two of each of two that belong together."""
    folder, port = tmp_path_factory.mktemp("torchrun"), HeldPort()
    address = ("--master-addr=localhost", f"--master-port={port.number}")
    two = ("--nnodes=2", "--nproc-per-node=2", *address)
    runs = [
        start_torchrun(folder / "1x3", "--standalone", "--nproc-per-node=3"),
        *(start_torchrun(folder / "2x2", *two, f"--node-rank={node}") for node in range(2)),
    ]
    try:
        assert [run.wait(TORCHRUN_TIMEOUT) for run in runs] == [0, 0, 0]
    finally:
        for run in runs:
            run.kill()
            run.wait()
        port.close()
    return {
        layout: [json.loads((folder / layout / f"{rank}.json").read_text()) for rank in range(size)]
        for layout, size in (("1x3", 3), ("2x2", 4))
    }


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Made where nobody has set what it sets."""
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ.keys() - plain_environ().keys():
            patch.delenv(name)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        with World(3, log_dir="") as world:
            yield world


@pytest.mark.parametrize("layout", ["1x3", "2x2"])
def test_every_name_is_torchruns(
    world: World, torchruns: Mapping[str, Environs], layout: str
) -> None:
    """Names and values are torchrun's but for those of the documented table."""
    if layout != world.session.layout:
        world.restart(layout=layout)
    ours: Environs = world.gather("{**__import__('os').environ}")
    theirs = torchruns[layout]
    for mine, its in zip(ours, theirs, strict=True):
        assert its.keys() - mine.keys() == ONLY_TORCHRUN
        assert mine.keys() - its.keys() - IPYKERNELS == ONLY_HERE
        differ = {name for name in its.keys() & mine.keys() if its[name] != mine[name]}
        assert differ - OF_THE_RUN <= OTHER_VALUES
        assert mine["OMP_NUM_THREADS"] == str(max(1, CORES // world.size))
        assert mine["TORCHELASTIC_USE_AGENT_STORE"] == "False"
        assert mine["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
        assert mine["PYTHON_EXEC"] == sys.executable
    # Each rank of torchrun has a file of its own for its error, and so here.
    for environs in (ours, theirs):
        assert len({each["TORCHELASTIC_ERROR_FILE"] for each in environs}) == len(environs)
        assert len({each["MASTER_PORT"] for each in environs}) == 1
    world.execute("x = torch.ones(1) * rank; dist.all_reduce(x)")
    assert world.gather("(rank, world_size, local_rank, str(device), int(x))") == [
        (rank, world.size, int(its["LOCAL_RANK"]), "cpu", sum(range(world.size)))
        for rank, its in enumerate(theirs)
    ]
