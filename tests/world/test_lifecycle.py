"""Tests of `nbdist.world.lifecycle`: starts, ends, and how ranks follow the notebook's changes."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from nbdist import topology
from nbdist.config import WorldConfig
from nbdist.errors import StartError, UsageError, WorkerDied
from nbdist.wire.messages import GetStatus
from nbdist.wire.work import Surroundings
from nbdist.world.spec import NotebookSurroundings, make_spec
from nbdist.world.states import WorldState
from nbdist.world.world import World
from tests.traces import command_line
from tests.waiting import once, press_stop, wait_until
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world(2)


@pytest.fixture
def new_children() -> Callable[[], list[psutil.Process]]:
    """A function that lists this process's descendants that were started since the test began.

    A forked worker is listed for a moment after its end, until the fork server reaps the worker.
    """
    before = psutil.Process().children(recursive=True)
    return lambda: [
        child for child in psutil.Process().children(recursive=True) if child not in before
    ]


@pytest.mark.world
def test_a_failed_start_says_which_rank_and_why(
    monkeypatch: pytest.MonkeyPatch,
    traces_left: Callable[[], list[str]],
    new_children: Callable[[], list[psutil.Process]],
) -> None:
    """The error of a failed start has a worker's rank, host, cause, command and last lines."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    world = World(2, log_dir="")
    with pytest.raises(StartError) as caught:
        world.start()
    error = caught.value
    assert (error.rank in (0, 1), error.host) == (True, os.uname().nodename)
    assert "-m nbdist.worker" in error.command
    (line,) = error.log_lines
    assert line.startswith("GLOO_SOCKET_IFNAME=nowhere0: this network interface does not exist. ")
    assert line.endswith("; without the variable workers use lo.")
    first = str(error).splitlines()[0]
    assert first.startswith(f"rank {error.rank} on {error.host} could not start: ")
    assert "it exited with code 1." in first
    assert world.state is WorldState.STOPPED
    wait_until(lambda: not new_children(), "no process is left")
    monkeypatch.undo()
    world.restart()
    assert world.gather("rank") == [0, 1]
    world.shutdown()
    assert [line for line in traces_left() if not line.startswith("process")] == []


@pytest.mark.world
def test_an_unusable_gpu_fails_the_start_in_one_line(
    monkeypatch: pytest.MonkeyPatch, new_children: Callable[[], list[psutil.Process]]
) -> None:
    """The error is one line: which GPU of which machine torch cannot use, and the remedy."""
    if torch.accelerator.is_available():
        pytest.skip("torch can use a GPU here")
    monkeypatch.setattr(topology, "installed_gpus", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(StartError) as caught:
        World(2, log_dir="", share_gpus=True).start()
    wait_until(lambda: not new_children(), "no process is left")
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"the workers could not start: GPU 0 of {os.uname().nodename}: ")
    assert line.endswith("; `--env CUDA_VISIBLE_DEVICES=` uses the CPU.")


@pytest.mark.own_agent
def test_a_broken_torch_fails_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If torch cannot be imported, the start fails with the end of the import's traceback."""
    (tmp_path / "torch.py").write_text("raise ImportError('broken on purpose')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    world = World(2, log_dir="")
    with pytest.raises(StartError, match="broken on purpose"):
        world.start()
    assert world.state is WorldState.STOPPED
    world.shutdown()


@pytest.mark.own_agent
def test_variables_are_kept_over_restarts_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first restart that succeeds binds what failed restarts kept; later restarts do not."""
    with World(2, log_dir="") as world:
        world.execute("step, other = [rank, 7], 1")
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
        for keep in (["step"], []):
            with pytest.raises(StartError):
                world.restart(3, keep=keep)
        with pytest.raises(UsageError, match="no `other`; kept from before: step"):
            world.restart(keep=["other"])
        monkeypatch.undo()
        world.restart()
        assert world.gather("step, 'other' in globals()") == [([0, 7], False), ([1, 7], False)]
        world.restart()
        assert world.gather("'step' in globals()") == [False, False]
        world.execute("step = 1")
        with pytest.raises(UsageError):
            world.restart(keep=["step"], backend="bogus")
        world.shutdown()
        world.restart()
        assert world.gather("'step' in globals()") == [False, False]


@pytest.mark.own_agent
def test_variables_are_kept_if_a_setup_cell_ends_all_workers(tmp_path: Path) -> None:
    """If a set-up cell ends all workers in a restart, the next restart binds the kept variables."""
    fatal = tmp_path / "fatal"
    with World(2, log_dir="", on_failure="stop") as world:
        world.execute(f"import os\nif rank == 1 and os.path.exists({str(fatal)!r}): os._exit(3)",
                      setup=True)  # fmt: skip
        world.execute("step = [rank, 7]")
        fatal.touch()
        with pytest.raises(WorkerDied, match="rank 1"):
            world.restart(keep=["step"])
        assert not world.state.has_workers
        fatal.unlink()
        world.restart()
        assert world.gather("step") == [[0, 7], [1, 7]]


@pytest.mark.own_agent
def test_stop_ends_a_start_in_progress(new_children: Callable[[], list[psutil.Process]]) -> None:
    """Stop during a start ends all that was started; the world can be started afterwards."""
    world = World(2, log_dir="")
    starts = once(lambda: world.state is WorldState.STARTING and new_children(), press_stop)
    with starts, pytest.raises(KeyboardInterrupt):
        world.start()
    assert world.state is WorldState.STOPPED
    wait_until(lambda: not new_children(), "no process is left")
    assert world.gather("rank") == [0, 1]
    world.shutdown()


@pytest.mark.world
def test_a_restart_follows_an_interrupted_restart() -> None:
    """The next restart ends the old workers, and keeps the variables of the interrupted restart."""
    with World(1, log_dir="") as world:
        world.execute("import atexit, time; atexit.register(time.sleep, 60); step = 5")
        before = dict(world.pids)
        restarts = once(lambda: world.state is WorldState.STOPPING, press_stop)
        with restarts, pytest.raises(KeyboardInterrupt):
            world.restart(keep=["step"])
        world.restart()
        assert world.state is WorldState.READY
        assert not psutil.pid_exists(before[0])
        world.execute("assert step == 5 and 'atexit' not in globals()")


@pytest.mark.own_agent
def test_an_interrupted_restart_keeps_the_old_options() -> None:
    """If Stop interrupts a restart with other options, the next restart has the old options."""
    with World(1, log_dir="") as world:
        world.start()
        agent = psutil.Process(world.engine.connection.link.agent.pid)
        agent.suspend()  # so that no worker ends before Stop
        restarts = once(lambda: world.state is WorldState.STOPPING, press_stop)
        with restarts, pytest.raises(KeyboardInterrupt):
            world.restart(2)
        agent.resume()
        world.restart()
        assert world.gather("rank") == [0]


@pytest.mark.world
def test_an_unread_death_blocks_no_restart() -> None:
    """A death that an interrupted restart has left unhandled blocks no status and no restart."""
    with World(2, backend="none", log_dir="") as world:
        world.execute("import atexit, time; atexit.register(time.sleep, 60)", ranks=[0])
        os.kill(world.pids[1], signal.SIGKILL)
        arrived = world.engine.connection.link.events.waiting
        wait_until(lambda: any("Died(" in repr(item) for item in arrived))
        restarts = once(lambda: world.state is not WorldState.READY, press_stop)
        with restarts, pytest.raises(KeyboardInterrupt):
            world.restart()
        assert (world.state, world.status()) == (WorldState.STOPPING, ())
        world.restart()
        assert world.gather("rank") == [0, 1]


def test_unread_reports_do_not_count_for_new_workers(new_world: NewWorld) -> None:
    """A restart drops unhandled reports of old workers: no name, output or death is recorded."""
    source = """
import time
for number in range(10):
    print(number)
    time.sleep(0.05)
name = 1
if rank == 1:
    import os
    os.kill(os.getpid(), 9)
"""
    with new_world(2, backend="none", show=False) as world:
        world.submit(world.task(source))

        def have_ended() -> bool:
            rows = world.engine.ask_from_thread(GetStatus())
            return [row.state for row in rows] == ["idle", "dead"]

        wait_until(have_ended, "both have ended it")
        world.restart()
        world.execute("pass")
        engine = world.engine
        assert [
            (engine.rank_table.dead, engine.rank_table.pop_replaced()),
            engine.outputs.pop_late(),
        ] == [
            ({}, {}),
            [],
        ]
        assert [engine.names.bound(rank) for rank in (0, 1)] == [[], []]


def test_local_world_listens_for_gloo_alone(new_world: NewWorld) -> None:
    """Without a group no process listens on TCP; with gloo only gloo's sockets do, on loopback."""
    for backend, expected in (("none", set()), ("gloo", {"127.0.0.1"})):
        with new_world(2, backend=backend) as world:
            agent = psutil.Process(world.engine.connection.link.agent.pid)
            processes = agent, *agent.children(recursive=True)
            assert not any("NBDIST_TEST_RUN" in " ".join(command_line(each)) for each in processes)
            connections = [each for process in processes for each in connections_of(process)]
            listening = {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
            assert listening == expected


def connections_of(process: psutil.Process) -> list[Any]:
    """List a process's internet connections; psutil 6 renamed the method."""
    method = getattr(process, "net_connections", None) or process.connections
    return list(method("inet"))


# --- ranks follow the notebook's folder, path and environment -------------------------------------


FOLDER, PATH = "__import__('os').getcwd()", "__import__('sys').path"


@pytest.fixture
def here(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """The shared world; changes of the notebook's folder, `sys.path` and environment are undone."""
    monkeypatch.chdir(os.getcwd())
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("NBT_A", "NBT_B", "NBT_TOKEN", "CUDA_VISIBLE_DEVICES", "PYTHONHASHSEED"):
        monkeypatch.delenv(name, raising=False)
    return world


def on_ranks(world: World, name: str) -> list[str | None]:
    """Return the value of an environment variable on each rank."""
    return world.gather(f"__import__('os').environ.get({name!r})")


CELLS = ("import os", "os.environ.update(NBT_A='1', NBT_TOKEN='', NBT_B='', RANK='0')",
         "%env CUDA_VISIBLE_DEVICES=7\n%env PYTHONHASHSEED=7")  # fmt: skip
"""The notebook's cells: a line about changed variables names only those that occur in cells."""


def pop_note(world: World) -> str:
    """Run a cell, and return the line about variables that changed since the last call."""
    world.execute("pass")
    return world.engine.surroundings.pop_note(CELLS)


def test_ranks_follow_the_notebooks_folder(here: World, tmp_path: Path) -> None:
    """All ranks go to the notebook's new folder, also new ranks and a rank that was elsewhere."""
    os.chdir(tmp_path)
    assert here.gather(FOLDER) == [str(tmp_path)] * 2
    here.engine.surroundings.pop_note(CELLS)  # pytest sets a variable for each test
    here.execute("import os; os.chdir('/')", ranks=[1])
    sys.path.append("/more")  # the notebook's folder has not changed: the rank stays in /
    assert here.gather(FOLDER) == [str(tmp_path), "/"]
    (tmp_path / "below").mkdir()
    os.chdir("below")
    (tmp_path / "below" / "where.py").write_text("import os; print(os.getcwd())")
    result = here.run_script("where.py")
    assert result.stdout[0] == result.stdout[1] == f"{tmp_path / 'below'}\n"
    line = f"this rank has left / for the notebook's folder {tmp_path / 'below'}\n"
    assert (result.stderr[0], result.stderr[1]) == ("", line)
    assert here.gather(FOLDER) == [str(tmp_path / "below")] * 2
    here.replace([1])
    assert here.gather(FOLDER) == [str(tmp_path / "below")] * 2
    assert here.engine.surroundings.pop_note(CELLS) == ""
    shutil.rmtree(tmp_path / "below")
    assert here.gather("rank") == [0, 1]
    os.chdir(tmp_path)
    assert here.gather(FOLDER) == [str(tmp_path)] * 2


def test_ranks_follow_the_notebooks_import_path(here: World, tmp_path: Path) -> None:
    """Entries that the notebook adds to `sys.path` reach the ranks; a rank's own entries stay."""
    (tmp_path / "nbt_beside.py").write_text("x = 7")
    sys.path.insert(0, str(tmp_path))
    here.execute("import sys, nbt_beside; sys.path += ['/own']; x = nbt_beside.x")
    assert here.gather("x") == [7, 7]
    sys.path.remove(str(tmp_path))
    sys.path.insert(0, "/first")
    sys.path.append("/last")
    (path, _) = here.gather(PATH)
    assert (path[0], path[-2:]) == ("/first", ["/own", "/last"])
    assert str(tmp_path) not in path


def test_ranks_follow_the_environment(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed environment variables reach all ranks; a line names each once, without values."""
    pop_note(here)
    os.environ["NBT_A"], os.environ["NBT_TOKEN"] = "1", "hidden"
    changed = "environment variables `NBT_A`, `NBT_TOKEN` changed in the notebook"
    assert [pop_note(here), pop_note(here)] == [f"{changed}, and on the ranks too", ""]
    assert on_ranks(here, "NBT_A") == ["1", "1"]
    here.execute("import os; os.environ['NBT_A'] = 'own'", ranks=[1])
    del os.environ["NBT_TOKEN"]
    assert on_ranks(here, "NBT_TOKEN") == [None, None]
    assert on_ranks(here, "NBT_A") == ["1", "own"]
    pop_note(here)
    os.environ["NBT_A"] = "2"
    assert on_ranks(here, "NBT_A") == ["2", "2"]
    here.execute("os.environ['NBT_A'] = 'own'", ranks=[1])
    del os.environ["NBT_A"]
    assert pop_note(here).startswith("environment variable `NBT_A` changed")
    assert on_ranks(here, "NBT_A") == [None, None]
    here.execute("os.environ['WANDB_SERVICE'] = 'own'", ranks=[1])
    monkeypatch.setenv("WANDB_SERVICE", "1")  # ranks keep what a library sets on import
    assert on_ranks(here, "WANDB_SERVICE") == ["1", "own"]


def test_start_variables_wait_for_a_restart(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that a worker reads at its start reach only new workers, and a line says so.

    No line names variables that imports set, or variables such as RANK that nbdist sets.
    """
    pop_note(here)
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["PYTHONHASHSEED"] = "7"
    line = pop_note(here)
    assert "`CUDA_VISIBLE_DEVICES`, `PYTHONHASHSEED` changed in the notebook after the" in line
    assert line.endswith("`%dist_restart` gives it to them")
    assert on_ranks(here, "CUDA_VISIBLE_DEVICES") == [None, None]
    for name in ("KMP_INIT_AT_FORK", "_RJEM_MALLOC_CONF", "TORCHINDUCTOR_CACHE_DIR", "RANK"):
        monkeypatch.setenv(name, "FALSE")
    assert pop_note(here) == ""
    assert on_ranks(here, "KMP_INIT_AT_FORK") == ["FALSE", "FALSE"]


def test_other_machines_follow_copy_env(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ranks on other machines get only variables of `--copy-env`; a line says how to set others."""
    monkeypatch.chdir(tmp_path)
    config = WorldConfig(n=2, hosts="node1", copy_env="NBT_A*", env={"NBT_C": "1"})
    surroundings = NotebookSurroundings(make_spec(config)[0])
    assert surroundings.now() is None
    for name in "ABC":
        monkeypatch.setenv(f"NBT_{name}", "2")
    assert surroundings.now() == Surroundings(str(tmp_path), str(tmp_path), None, {"NBT_A": "2"})
    line = surroundings.pop_note(CELLS)
    assert "`NBT_A` changed in the notebook, and on the ranks too" in line
    assert line.endswith("`%dist_restart --env NBT_B=...` gives it to them")
    spec = replace(make_spec(WorldConfig(n=2))[0], cwd="/earlier")
    assert NotebookSurroundings(spec).now() == Surroundings(os.getcwd(), "/earlier")
