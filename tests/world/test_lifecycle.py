"""Tests of `nbdist.world.lifecycle`: how worlds begin and end, and what changes meanwhile."""

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
from nbdist.errors import StartError
from nbdist.wire.messages import GetStatus
from nbdist.wire.work import Surroundings
from nbdist.world.spec import NotebookSurroundings, make_spec
from nbdist.world.states import WorldState
from nbdist.world.world import World
from tests.waiting import once, press_stop, wait_until
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world(2)


@pytest.fixture
def new_children() -> Callable[[], list[psutil.Process]]:
    """A question to ask in mid-test: what has been started since it began, and lives?

    What forked workers may be there for a moment longer, until the fork server runs and reaps it.
    """
    before = psutil.Process().children(recursive=True)
    return lambda: [
        child for child in psutil.Process().children(recursive=True) if child not in before
    ]


@pytest.mark.world
def test_worker_that_cannot_form_its_group(
    monkeypatch: pytest.MonkeyPatch,
    traces_left: Callable[[], list[str]],
    new_children: Callable[[], list[psutil.Process]],
) -> None:
    """A start that fails says which rank, where, why, how it was started, and its last lines."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    world = World(2, log_dir="")
    with pytest.raises(StartError) as caught:
        world.start()
    error = caught.value
    assert (error.rank in (0, 1), error.host) == (True, os.uname().nodename)
    assert "-m nbdist.worker" in error.command
    (said,) = error.log_lines
    assert said.startswith("GLOO_SOCKET_IFNAME=nowhere0: this network interface does not exist. ")
    assert said.endswith("; without the variable workers use lo.")
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
def test_worker_whose_gpu_torch_cannot_use(
    monkeypatch: pytest.MonkeyPatch, new_children: Callable[[], list[psutil.Process]]
) -> None:
    """It is one line that says which GPU, of which machine, why, and what to do."""
    if torch.accelerator.is_available():
        pytest.skip("torch can use one here")
    monkeypatch.setattr(topology, "installed_gpus", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(StartError) as caught:
        World(2, log_dir="", share_gpus=True).start()
    wait_until(lambda: not new_children(), "no process is left")
    (said,) = str(caught.value).splitlines()
    assert said.startswith(f"the workers could not start: GPU 0 of {os.uname().nodename}: ")
    assert said.endswith("; `--env CUDA_VISIBLE_DEVICES=` uses the CPU.")


@pytest.mark.own_agent
def test_worker_whose_import_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A broken torch fails the start within seconds, with the end of its traceback."""
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
    """The restart that succeeds gives the variables to its workers; a later one does not."""
    with World(2, log_dir="") as world:
        world.execute("step, other = [rank, 7], 1")
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
        for keep in (["step"], []):
            with pytest.raises(StartError):
                world.restart(3, keep=keep)
        monkeypatch.undo()
        world.restart()
        assert world.gather("step, 'other' in globals()") == [([0, 7], False), ([1, 7], False)]
        world.restart()
        assert world.gather("'step' in globals()") == [False, False]


@pytest.mark.own_agent
def test_start_interrupted(new_children: Callable[[], list[psutil.Process]]) -> None:
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
def test_restart_interrupted() -> None:
    """A restart that Stop has cut short is asked for again, and ends the old workers."""
    with World(1, log_dir="") as world:
        world.execute("import atexit, time; atexit.register(time.sleep, 60)")
        before = dict(world.pids)
        restarts = once(lambda: world.state is not WorldState.READY, press_stop)
        with restarts, pytest.raises(KeyboardInterrupt):
            world.restart()
        world.restart()
        assert world.state is WorldState.READY
        assert not psutil.pid_exists(before[0])
        world.execute("assert 'atexit' not in globals()")


@pytest.mark.own_agent
def test_restart_with_other_options_interrupted() -> None:
    """After Stop the old options are valid: they are those of the next restart."""
    with World(1, log_dir="") as world:
        world.start()
        agent = psutil.Process(world.session.link.agent.pid)
        agent.suspend()  # until Stop comes the workers do not end
        restarts = once(lambda: world.state is WorldState.STOPPING, press_stop)
        with restarts, pytest.raises(KeyboardInterrupt):
            world.restart(2)
        agent.resume()
        world.restart()
        assert world.gather("rank") == [0]


@pytest.mark.world
def test_what_is_read_after_a_restart_was_interrupted() -> None:
    """A death that was not read before does not keep anything from being asked or begun."""
    with World(2, backend="none", log_dir="") as world:
        world.execute("import atexit, time; atexit.register(time.sleep, 60)", ranks=[0])
        os.kill(world.pids[1], signal.SIGKILL)
        arrived = world.session.link.arrived
        wait_until(lambda: any("Died(" in repr(item) for item in arrived))
        restarts = once(lambda: world.state is not WorldState.READY, press_stop)
        with restarts, pytest.raises(KeyboardInterrupt):
            world.restart()
        assert (world.state, world.status()) == (WorldState.STOPPING, ())
        world.restart()
        assert world.gather("rank") == [0, 1]


def test_what_was_not_read_before_a_restart(new_world: NewWorld) -> None:
    """It is not the new workers': they own no name of it, and none of them has died."""
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
            rows = world.session.ask_from_thread(GetStatus())
            return [row.state for row in rows] == ["idle", "dead"]

        wait_until(have_ended, "both have ended it")
        world.restart()
        world.execute("pass")
        session = world.session
        assert [(session.dead, session.pop_replaced()), session.pop_late_outputs()] == [
            ({}, {}),
            [],
        ]
        assert [session.names.bound(rank) for rank in (0, 1)] == [[], []]


def test_local_world_listens_for_gloo_alone(new_world: NewWorld) -> None:
    """Without a group nothing listens on TCP; gloo's own sockets do, on the loopback device."""
    for backend, expected in (("none", set()), ("gloo", {"127.0.0.1"})):
        with new_world(2, backend=backend) as world:
            agent = psutil.Process(world.session.link.agent.pid)
            processes = agent, *agent.children(recursive=True)
            assert not any("NBDIST_TEST_RUN" in " ".join(each.cmdline()) for each in processes)
            connections = [each for process in processes for each in connections_of(process)]
            listening = {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
            assert listening == expected


def connections_of(process: psutil.Process) -> list[Any]:
    """psutil 6 has another name for it."""
    ask = getattr(process, "net_connections", None) or process.connections
    return list(ask("inet"))


# --- the notebook's surroundings --------------------------------------------------------------


FOLDER, PATH = "__import__('os').getcwd()", "__import__('sys').path"


@pytest.fixture
def here(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """What a test changes is for it alone."""
    monkeypatch.chdir(os.getcwd())
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("NBT_A", "NBT_B", "NBT_TOKEN", "CUDA_VISIBLE_DEVICES", "PYTHONHASHSEED"):
        monkeypatch.delenv(name, raising=False)
    return world


def value(world: World, name: str) -> list[str | None]:
    return world.gather(f"__import__('os').environ.get({name!r})")


CELLS = ("import os", "os.environ.update(NBT_A='1', NBT_TOKEN='', NBT_B='', RANK='0')",
         "%env CUDA_VISIBLE_DEVICES=7\n%env PYTHONHASHSEED=7")  # fmt: skip
"""Of the notebook: they name the variables that a line may name."""


def note(world: World) -> str:
    world.execute("pass")
    return world.session.surroundings.pop_note(CELLS)


def test_the_folder(here: World, tmp_path: Path) -> None:
    """Ranks go where the notebook goes, also new ones, and one that has gone elsewhere before."""
    os.chdir(tmp_path)
    assert here.gather(FOLDER) == [str(tmp_path)] * 2
    here.session.surroundings.pop_note(CELLS)  # pytest has variables of its own for each test
    here.execute("import os; os.chdir('/')", ranks=[1])
    sys.path.append("/more")  # the folder is the same: the rank stays where it is
    assert here.gather(FOLDER) == [str(tmp_path), "/"]
    (tmp_path / "below").mkdir()
    os.chdir("below")
    (tmp_path / "below" / "where.py").write_text("import os; print(os.getcwd())")
    ran = here.run_script("where.py")
    assert ran.stdout[0] == ran.stdout[1] == f"{tmp_path / 'below'}\n"
    said = f"this rank has left / for the notebook's folder {tmp_path / 'below'}\n"
    assert (ran.stderr[0], ran.stderr[1]) == ("", said)
    assert here.gather(FOLDER) == [str(tmp_path / "below")] * 2
    here.replace([1])
    assert here.gather(FOLDER) == [str(tmp_path / "below")] * 2
    assert here.session.surroundings.pop_note(CELLS) == ""
    shutil.rmtree(tmp_path / "below")
    assert here.gather("rank") == [0, 1]
    os.chdir(tmp_path)
    assert here.gather(FOLDER) == [str(tmp_path)] * 2


def test_the_path(here: World, tmp_path: Path) -> None:
    """What the notebook adds to `sys.path` is importable in the next cell; a rank's own stays."""
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


def test_the_environment(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables follow, named in a line once and without values; also after a rank's own value."""
    note(here)
    os.environ["NBT_A"], os.environ["NBT_TOKEN"] = "1", "hidden"
    changed = "environment variables `NBT_A`, `NBT_TOKEN` changed in the notebook"
    assert [note(here), note(here)] == [f"{changed}, and on the ranks too", ""]
    assert value(here, "NBT_A") == ["1", "1"]
    here.execute("import os; os.environ['NBT_A'] = 'own'", ranks=[1])
    del os.environ["NBT_TOKEN"]
    assert value(here, "NBT_TOKEN") == [None, None]
    assert value(here, "NBT_A") == ["1", "own"]
    note(here)
    os.environ["NBT_A"] = "2"
    assert value(here, "NBT_A") == ["2", "2"]
    here.execute("os.environ['NBT_A'] = 'own'", ranks=[1])
    del os.environ["NBT_A"]
    assert note(here).startswith("environment variable `NBT_A` changed")
    assert value(here, "NBT_A") == [None, None]
    here.execute("os.environ['WANDB_SERVICE'] = 'own'", ranks=[1])
    monkeypatch.setenv("WANDB_SERVICE", "1")  # a library sets it in each process
    assert value(here, "WANDB_SERVICE") == ["1", "own"]


def test_variables_for_which_it_is_too_late(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read at a start is for new workers; what imports set is sent, and not mentioned.

    Nor is what says which rank each is: nobody can set that.
    """
    note(here)
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["PYTHONHASHSEED"] = "7"
    said = note(here)
    assert "`CUDA_VISIBLE_DEVICES`, `PYTHONHASHSEED` changed in the notebook after the" in said
    assert said.endswith("`%dist_restart` gives it to them")
    assert value(here, "CUDA_VISIBLE_DEVICES") == [None, None]
    for name in ("KMP_INIT_AT_FORK", "_RJEM_MALLOC_CONF", "TORCHINDUCTOR_CACHE_DIR", "RANK"):
        monkeypatch.setenv(name, "FALSE")
    assert note(here) == ""
    assert value(here, "KMP_INIT_AT_FORK") == ["FALSE", "FALSE"]


def test_on_other_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only what `--copy-env` names is right there; of all else is said how to set it."""
    monkeypatch.chdir(tmp_path)
    config = WorldConfig(n=2, hosts="node1", copy_env="NBT_A*", env={"NBT_C": "1"})
    found = NotebookSurroundings(make_spec(config)[0])
    assert found.now() is None
    for name in "ABC":
        monkeypatch.setenv(f"NBT_{name}", "2")
    assert found.now() == Surroundings(str(tmp_path), str(tmp_path), None, {"NBT_A": "2"})
    said = found.pop_note(CELLS)
    assert "`NBT_A` changed in the notebook, and on the ranks too" in said
    assert said.endswith("`%dist_restart --env NBT_B=...` gives it to them")
    spec = replace(make_spec(WorldConfig(n=2))[0], cwd="/earlier")
    assert NotebookSurroundings(spec).now() == Surroundings(os.getcwd(), "/earlier")
