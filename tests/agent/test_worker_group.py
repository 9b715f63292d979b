"""Tests of `nbdist.agent.worker_group`: starts that fail, and deaths while a group is formed.

What a node makes of the spec that all share.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nbdist import topology
from nbdist.agent import worker_group
from nbdist.agent.worker_group import WorkerGroup, interface_of, problem_in, spec_here
from nbdist.system import folders
from nbdist.topology import Position, usable_cores
from nbdist.wire.control import Answer, Failed, Ok
from nbdist.wire.messages import StartFailure
from nbdist.wire.node_messages import Renumber, StartPart
from nbdist.wire.spec import WorldSpec
from nbdist.world.states import State
from nbdist.world.world import World
from tests.agent.sources import Source, worker_start
from tests.faults.test_deaths import SUM

pytestmark = pytest.mark.shared_world(4)

Program = Callable[[str], Path]


# --- starts that fail -----------------------------------------------------------------------


async def started_with(
    source: Source, runtime: Path, program: Path | str, size: int = 3
) -> StartFailure:
    """What a start says whose workers run this program."""
    group = WorkerGroup(runtime, source.children, None, lambda *_: None, lambda _: None)
    spec = replace(worker_start(runtime).world, world_size=size, python=str(program))
    try:
        failure = await group.do(StartPart(spec, tuple(range(size)), 1))
    finally:
        group.close()
    assert isinstance(failure, StartFailure)
    assert (group.all, group.all_alive()) == ({}, [])
    assert failure.command == f"{program} -P -m nbdist.worker"
    assert failure.host == socket.gethostname()
    return failure


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Makes a program for workers to run."""

    def make(text: str) -> Path:
        path = tmp_path / "worker.sh"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    return make


@pytest.mark.world
async def test_one_rank_cannot_start(source: Source, runtime: Path, program: Program) -> None:
    """It is said which, why, and what it wrote last; the others are ended at once."""
    ends = program("[ $RANK = 1 ] || exec sleep 600\necho last words; exit 3")
    async with asyncio.timeout(5.0):
        found = await started_with(source, runtime, ends)
    assert (found.rank, found.reason) == (1, "it exited with code 3")
    assert found.last_lines == ("last words",)


@pytest.mark.world
async def test_ranks_that_are_never_ready(
    source: Source, runtime: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not waited for longer than a start may take."""
    monkeypatch.setattr(worker_group, "START_TIMEOUT", 1.0)
    found = await started_with(source, runtime, program("echo starting; exec sleep 600"))
    assert (found.rank, found.reason) == (0, "it was not ready after 1 s")
    assert found.last_lines == ("starting",)


async def test_what_is_known_before(source: Source, runtime: Path) -> None:
    """More than there can be is said before anything starts; of no program the system's word."""
    found = await started_with(source, runtime, "python", size=10**7)
    assert "10000000 workers take" in found.reason.replace(",", "")
    assert os.listdir(runtime) == []
    found = await started_with(source, runtime, "/nowhere/python")
    assert "/nowhere/python" in found.reason
    assert "No such file or directory" in found.reason


@pytest.mark.world
async def test_a_runtime_folder_that_was_removed(source: Source, runtime: Path) -> None:
    """It is made again, private and ours; another's of that name is not taken."""
    folder = runtime / "nbdist-gone"
    await started_with(source, folder, "/bin/false")
    assert os.stat(folder).st_mode & 0o777 == 0o700
    assert folders.is_ours(folder, folders.runtime(folder))
    folder.chmod(0o755)
    with pytest.raises(PermissionError, match="only this user can open"):
        await started_with(source, folder, "/bin/false")


@pytest.mark.world
async def test_other_numbers(source: Source, runtime: Path, tmp_path: Path) -> None:
    """What ranks write from then on is apart from what others wrote under these numbers."""
    spec = replace(worker_start(runtime).world, python="/bin/false", log_dir=str(tmp_path))
    group = WorkerGroup(runtime, source.children, None, lambda *_: None, lambda _: None)
    await group.do(StartPart(spec, (0,), 1))
    await group.do(Renumber({}))
    group.close()
    found = {folder.rpartition("/")[2] for folder, *_ in os.walk(tmp_path)}
    assert {"attempt_0", "attempt_1"} <= found


# --- what is decided --------------------------------------------------------------------------


START = "rank 1 could not start: x"


@pytest.mark.parametrize(
    ("starts", "answers", "problem"),
    [
        ([""], [Ok()], ""),
        (["", START], [None], START),
        ([], [Ok(), None], "a rank did not answer"),
        ([], [Failed("broken", unfit=True), None], "broken"),
        ([START], [Failed("can't start new thread", unfit=False)], "no further process or thread"),
    ],
)
def test_the_first_problem_counts(
    starts: list[str], answers: list[Answer | None], problem: str
) -> None:
    """That of a new worker before a survivor's; a lack of threads is why the others failed."""
    said = problem_in(starts, answers)
    assert said.startswith(problem)
    assert bool(said) == bool(problem)


# --- deaths while a group is formed -----------------------------------------------------------


@pytest.fixture
def world(world: World) -> World:
    """Four ready ranks with `kept`, and no earlier test's replacements."""
    world.session.take_replaced()
    world.execute("kept = rank")
    return world


def end(world: World, rank: int) -> None:
    """Kill a rank while no cell runs, until that is known."""
    os.kill(world.pids[rank], signal.SIGKILL)
    deadline = time.monotonic() + 10
    while world.state is not State.BROKEN:
        assert time.monotonic() < deadline
        world.session.receive(0.1)


def test_a_survivor_dies_while_it_forms_the_group(world: World) -> None:
    """The others, who wait for it in the store, are called off and form another one."""
    world.execute(
        "import nbdist.worker.group.group as group_module, os, threading, time\n"
        "def slow(*_): time.sleep(1); os._exit(4)\n"
        "if rank == 0: group_module.Group.regroup = slow"
    )
    end(world, 1)
    world.execute(SUM)
    assert world.session.take_replaced().keys() == {0, 1}
    assert world.gather("globals().get('kept')") == [None, None, 2, 3]


def test_a_survivor_that_fails_once_all_have_its_address(world: World) -> None:
    """The others, who wait in gloo for its connection, are called off, and lose nothing."""
    world.execute(
        "import gc, socket, time\n"
        "from nbdist.worker.group.gloo import Gloo\n"
        "from nbdist.worker.group.stores import AbortableStore\n"
        "awaited = AbortableStore.awaited\n"
        "def fail(*args, **options):\n"
        "    awaited(*args, **options)\n"
        "    time.sleep(0.5)  # the others are further by then\n"
        "    raise MemoryError\n"
        "(port,) = [each._port for each in gc.get_objects() if type(each) is Gloo]\n"
        "port = socket.htons(port)"
    )
    ports = world.gather("port")
    fails = ports.index(max(ports))  # who has less waits until the other connects
    world.execute(f"if rank == {fails}: AbortableStore.awaited = fail")
    lost = {fails, (fails + 1) % 4}
    end(world, max(lost - {fails}))
    world.execute(SUM)
    assert world.session.take_replaced().keys() == lost
    kept = [None if rank in lost else rank for rank in range(4)]
    assert world.gather("globals().get('kept')") == kept


SEATS = (Position(0, 0), Position(1, 0), Position(1, 1))


def spec(cwd: str, threads: int = 0) -> WorldSpec:
    """One of three ranks, for the second node, which has two of them."""
    environ = {"SEED": "1", "CUDA_VISIBLE_DEVICES": ""}
    return WorldSpec(3, "gloo", environ, cwd, (), threads, "", seats=SEATS, node=1)


def test_the_environment_is_the_nodes_own(tmp_path: Path) -> None:
    """With what was asked for besides; so are interpreter, interface, GPUs and cores."""
    here = spec_here(spec(str(tmp_path)), {"HOME": "/root", "SEED": "0"}, "eth0")
    assert here.environ == {"HOME": "/root", "SEED": "1", "CUDA_VISIBLE_DEVICES": ""}
    assert (here.python, here.interface, here.gpus) == (sys.executable, "eth0", ())
    assert (here.cwd, here.threads) == (str(tmp_path), max(1, usable_cores() // 2))
    assert spec_here(spec(str(tmp_path), threads=7), {}, "eth0").threads == 7
    assert spec_here(spec("/nowhere/at/all"), {}, "eth0").cwd == str(Path.home())
    assert (interface_of("127.0.0.1"), interface_of("203.0.113.7")) == ("lo", "")


def test_gpus_that_were_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their numbers, of those that this node has."""
    monkeypatch.setattr(topology, "installed_gpus", lambda: 4)
    asked = replace(spec(str(tmp_path)), environ={}, gpus_asked="1,3")
    assert spec_here(asked, {}, "eth0").gpus == ("1", "3")
    assert spec_here(asked, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, "eth0").gpus == ("1", "3")
    assert spec_here(replace(asked, gpus_asked=""), {}, "eth0").gpus == ("0", "1", "2", "3")
