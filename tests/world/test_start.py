"""Tests of how `World` starts workers: environment (compared with torchrun's), name, program."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

import nbdist
from nbdist.agent.worker_group import HeldPort
from nbdist.errors import StartError, UsageError, WorkerDied, WorkerError
from nbdist.world.world import World
from tests.cells import begin, follow, run
from tests.waiting import SOON

pytestmark = pytest.mark.shared_world

ENVIRON = "__import__('os').environ"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("start")


@pytest.fixture(scope="module")
def world(folder: Path) -> Iterator[World]:
    """A world with a name, log files, and variables from `env` and from an `env_file`."""
    file = folder / ".env"
    file.write_text("export FROM_FILE='a b'\n")
    with World(
        2, name="exp/run", log_dir=str(folder), env={"GIVEN": "1"}, env_file=str(file)
    ) as world:
        yield world


def test_a_replaced_rank_has_the_same_environment(world: World, folder: Path) -> None:
    """A replaced rank has the dead rank's variables; log folders lie below the world's name."""
    root = Path(world.logs[0]).parent
    assert (root.parent, root.name[:8]) == (folder / "exp" / "run", "attempt_")
    assert [Path(world.logs[rank]) for rank in range(2)] == [root / "0", root / "1"]
    some_variables = (
        f"[{ENVIRON}[name] for name in ('GIVEN', 'FROM_FILE', 'NBDIST_WORLD', 'LOCAL_RANK')]"
    )
    expected = [["1", "a b", "exp/run", str(rank)] for rank in range(2)]
    assert world.gather(some_variables) == expected
    all_variables = (
        f"{{name: {ENVIRON}[name] for name in {ENVIRON} if name != 'NBDIST_WORKER_PID'}}"
    )
    before = world.gather(all_variables)
    with pytest.raises(WorkerDied):
        world.execute("import os\nif rank: os._exit(3)")
    assert world.gather(all_variables) == before
    assert "GIVEN" not in os.environ


def test_a_renumbered_rank_has_log_files_of_its_own(world: World) -> None:
    """After a change of the size, a rank's log has no lines of the worker with its old number."""
    world.execute("print('before', rank)")
    before = Path(world.logs[0], "stdout.log")
    world.scale(ranks=[1])
    world.execute("print('after', rank)")
    after = Path(world.logs[0], "stdout.log")
    assert "before 0" in before.read_text().splitlines()
    note, *lines = after.read_text().splitlines()
    assert note.startswith("[nbdist: this was rank 1 until now, and wrote to ")
    assert lines == ["after 0"]
    world.scale(2)


def test_a_restart_keeps_options_that_are_not_given(world: World, tmp_path: Path) -> None:
    """A restart keeps the options that are not given; a refused or failed restart keeps all."""
    with pytest.raises(UsageError):
        world.restart(name="../x")
    assert world.gather("rank") == [0, 1]
    line = refused(world, "no-such -x")
    assert "could not start: no-such: No such file or directory." in line
    assert f"`no-such -x {sys.executable} -P -m nbdist.worker`" in line
    # A worker compares its versions with the notebook's before it imports torch.
    (dist_info := tmp_path / "torch-1.9.0.dist-info").mkdir()
    (dist_info / "METADATA").write_text("Name: torch\nVersion: 1.9.0\n")
    line = refused(world, f"env PYTHONPATH={tmp_path}")
    start = f"the workers could not start: {sys.executable} has torch 1.9.0, the notebook "
    assert line.startswith(f"{start}{version('torch')}: functions and values go")
    assert line.endswith("`--python` names another one.")
    world.start()
    assert world.gather(f"{ENVIRON}['GIVEN']") == ["1"] * 2
    world.restart(env={"MORE": "2"}, cpus=3)
    variables = f"({ENVIRON}['GIVEN'], {ENVIRON}['MORE'], {ENVIRON}['OMP_NUM_THREADS'])"
    assert world.gather(variables) == [("1", "2", "3")] * 2
    assert world.gather("torch.get_num_threads()") == [3] * 2


def refused(world: World, wrap: str) -> str:
    """Return the line that says why workers cannot be started with this wrapper."""
    with pytest.raises(StartError) as caught:
        world.restart(wrap=wrap)
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.own_agent
def test_a_wrapped_worker_has_another_interpreter(tmp_path: Path) -> None:
    """A worker has the packages of its virtual environment, and its wrapper's settings.

    The wrapper stays as a process between agent and worker: Stop does not end the wrapper, which
    dies with the agent.
    """
    venv = tmp_path / "venv"
    command = [sys.executable, "-m", "venv", "--without-pip", str(venv)]
    subprocess.run(command, check=True, timeout=SOON)
    (site,) = venv.glob("lib/python*/site-packages")
    packages = [entry for entry in sys.path if entry.endswith("site-packages")]
    root = str(Path(nbdist.__file__).parent.parent)
    (site / "packages.pth").write_text("\n".join([*packages, root]))
    (site / "only_there.py").write_text("x = 7\n")
    python = str(venv / "bin" / "python")
    wrapper = tmp_path / "stays"
    wrapper.write_text('#!/bin/sh\n"$@"\nexit $?\n')
    wrapper.chmod(0o755)
    wrap = shlex.join([str(wrapper), "nice", "-n", "5", "env", "WRAPPED=yes"])
    with World(1, log_dir="", fork=False, python=python, wrap=wrap) as world:
        world.execute("import os, sys, only_there")
        interpreters = world.gather("(sys.executable, sys.prefix, only_there.x)")
        assert interpreters == [(python, str(venv), 7)]
        variables = f"[{ENVIRON}[name] for name in ('PYTHON_EXEC', 'WRAPPED', 'RANK')]"
        assert world.gather(variables) == [[python, "yes", "0"]]
        assert world.gather("os.nice(0)") == [5 + os.nice(0)]
        (worker,) = world.gather("os.getpid()")
        assert psutil.Process(worker).cmdline() == [python, "-P", "-m", "nbdist.worker"]
        assert worker != world.pids[0]
        processes = [psutil.Process(pid) for pid in (worker, world.pids[0])]
        running = begin(world, "import time\ntime.sleep(600)")
        world.interrupt()
        assert follow(world, running).failure().name == "KeyboardInterrupt"
        assert world.gather("os.getpid()") == [worker]
        os.kill(world.engine.connection.link.agent.pid, signal.SIGKILL)
        assert psutil.wait_procs(processes, timeout=SOON)[1] == []


MISMATCH = "Detected mismatch between collectives"


def test_debug_tells_which_collectives_differ(world: World) -> None:
    """With `debug`, a collective that differs between ranks raises an error with C++ stacks."""
    world.restart(debug=True)
    environ = world.gather(f"{{**{ENVIRON}}}")[1]
    assert environ["CUDA_LAUNCH_BLOCKING"] == "1"
    # With NCCL_DESYNC_DEBUG, torch's watchdog would end a worker that waits.
    assert "NCCL_DESYNC_DEBUG" not in environ
    ran = run(world, "x = torch.ones(2 + rank)\ndist.all_reduce(x)")
    assert MISMATCH in str(ran.error)
    message = ran.failure().message
    assert "Tensor shapes: 2vs 3" in message
    assert "C++ CapturedTraceback" in message or "frame #" in message
    world.execute("dist.barrier()")


def test_torchs_debug_level_reaches_a_fork(world: World) -> None:
    """A forked worker checks collectives though torch was imported before, also in new groups."""
    world.restart(debug=False, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    world.execute("group = dist.new_group([0, 1])")
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        world.execute("1 / 0 if rank else dist.barrier()")
    for group in ("None", "group"):
        with pytest.raises(WorkerError, match=MISMATCH):
            world.execute(f"dist.all_reduce(torch.ones(2 + rank), group={group})")
    world.execute("dist.all_reduce(torch.ones(1), group=group)")


# --- environments compared with those of a real torchrun ---------------------------------------


TORCHRUN_TIMEOUT = 100.0
DUMP = """
import json, os, sys
with open(f"{sys.argv[1]}/{os.environ['RANK']}.json", "w") as file:
    json.dump(dict(os.environ), file)
"""
CORES = len(os.sched_getaffinity(0))

Environs = list[Mapping[str, str]]

# `torchrun_variables` in nbdist.wire.spec says why these values differ from torchrun's.
OTHER_VALUES = {
    "OMP_NUM_THREADS",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
}
ONLY_TORCHRUN = {"TORCHELASTIC_SIGNALS_TO_HANDLE"}
ONLY_HERE = {
    *("PYTHON_EXEC", "GLOO_SOCKET_IFNAME", "TORCH_NCCL_ENABLE_MONITORING", "MPLBACKEND"),
    *("TTY_COMPATIBLE", "PYDEVD_DISABLE_FILE_VALIDATION", "NBDIST_WORLD"),
    "NBDIST_WORKER_PID",
}
# Variables that every ipykernel sets, for commands in cells.
IPYKERNELS = {"PAGER", "GIT_PAGER", "CLICOLOR", "CLICOLOR_FORCE", "FORCE_COLOR", "TERM"}
# Variables with a number, name or path that is different in each run.
OF_THE_RUN = {
    *("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "PYTEST_CURRENT_TEST")
}


def plain_environ() -> dict[str, str]:
    """Return the environment without variables that nbdist or ipykernel sets, and without GPUs."""
    names = ONLY_HERE | OTHER_VALUES | IPYKERNELS
    plain = {name: value for name, value in os.environ.items() if name not in names}
    return {**plain, "CUDA_VISIBLE_DEVICES": ""}


def start_torchrun(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start torch's own torchrun, whose workers write their environments into the folder."""
    folder.mkdir(exist_ok=True)
    script = folder / "dump.py"
    script.write_text(DUMP)
    run = [sys.executable, "-m", "torch.distributed.run", "--log-dir", str(folder), *options]
    command = [*run, str(script), str(folder)]
    return subprocess.Popen(command, env=plain_environ(), stderr=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def torchruns(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Environs]:
    """The ranks' environments of a torchrun with three ranks, and of a torchrun on two nodes."""
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
def plain_world() -> Iterator[World]:
    """A world that was made in an environment without the variables that nbdist sets."""
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ.keys() - plain_environ().keys():
            patch.delenv(name)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        with World(3, log_dir="") as world:
            yield world


@pytest.mark.parametrize("layout", ["1x3", "2x2"])
def test_the_environment_is_torchruns(
    plain_world: World, torchruns: Mapping[str, Environs], layout: str
) -> None:
    """Names and values are torchrun's, except for the variables that are listed above."""
    world = plain_world
    if layout != world.engine.rank_table.layout:
        world.restart(layout=layout)
    of_nbdist: Environs = world.gather("{**__import__('os').environ}")
    of_torchrun = torchruns[layout]
    for worker, reference in zip(of_nbdist, of_torchrun, strict=True):
        assert reference.keys() - worker.keys() == ONLY_TORCHRUN
        assert worker.keys() - reference.keys() - IPYKERNELS == ONLY_HERE
        differ = {
            name for name in reference.keys() & worker.keys() if reference[name] != worker[name]
        }
        assert differ - OF_THE_RUN <= OTHER_VALUES
        assert worker["OMP_NUM_THREADS"] == str(max(1, CORES // world.size))
        assert worker["TORCHELASTIC_USE_AGENT_STORE"] == "False"
        assert worker["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
        assert worker["PYTHON_EXEC"] == sys.executable
    # Each rank has an error file of its own, with torchrun and with nbdist.
    for environs in (of_nbdist, of_torchrun):
        assert len({each["TORCHELASTIC_ERROR_FILE"] for each in environs}) == len(environs)
        assert len({each["MASTER_PORT"] for each in environs}) == 1
    world.execute("x = torch.ones(1) * rank; dist.all_reduce(x)")
    assert world.gather("(rank, world_size, local_rank, str(device), int(x))") == [
        (rank, world.size, int(reference["LOCAL_RANK"]), "cpu", sum(range(world.size)))
        for rank, reference in enumerate(of_torchrun)
    ]
