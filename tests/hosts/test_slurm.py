"""Worlds in a real Slurm: in an allocation, in one of their own, and when Slurm says no.

The tests' machine is one from which jobs are submitted, and is itself in no allocation's nodes.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest

from nbdist.errors import AgentLost, StartError, WorkerDied
from nbdist.system.processes import children_of
from nbdist.world.states import State
from nbdist.world.world import World
from tests.hosts.launched import allocated, lives
from tests.hosts.network import Host, Network
from tests.hosts.slurm import GPUS, Slurm
from tests.hosts.worlds import check_whole
from tests.waiting import once, press_stop, wait_until


def make_world(layout: str = "2x1", **options: object) -> World:
    return World(layout=layout, log_dir="", show=False, **options)


def dies_when(world: World, do: Callable[[], object]) -> str:
    """Do this while a cell runs, and return what that cell says."""
    running = once(lambda: world.state is State.RUNNING, do, "the cell runs")
    with running, pytest.raises(WorkerDied) as died:
        world.execute("import time; time.sleep(600)")
    return str(died.value)


def start_killed_in_queue(world: World) -> None:
    """Start it, and kill its head and the guard above that once it waits in the queue."""
    for text in world.session.starting_texts():
        if "waits in Slurm's queue" in text:
            guard = psutil.Process(world.session.link.agent.pid)
            for each in [guard, *guard.children()]:
                each.kill()


@pytest.fixture(scope="module")
def slurm_here(slurm: Slurm) -> Iterator[Slurm]:
    """Its commands work on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in slurm.environ.items():
            patch.setenv(name, value)
        yield slurm


@pytest.fixture
def job(slurm_here: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """This process is in an allocation of two nodes."""
    with slurm_here.inside("-N2", f"--gpus-per-node={GPUS}", "--ntasks-per-node=4") as job:
        # So it is in such a shell, and srun would start four agents on each node.
        monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4")
        monkeypatch.setenv("SLURM_NTASKS", "8")
        yield job


@pytest.fixture
def world(job: int, hosts: list[Host]) -> Iterator[World]:
    """One worker on each node, found without an option."""
    with make_world() as world:
        yield world


def test_a_world(slurm_here: Slurm, hosts: list[Host], network: Network) -> None:
    """In an allocation it lives as over ssh."""
    with slurm_here.inside("-N2") as job:
        steps = ("squeue", "--steps", "--noheader", "--format=%i", f"--jobs={job}")
        lives(allocated("slurm", lambda: slurm_here.run(*steps).stdout.split()), network)


def test_a_world_in_an_allocation(world: World, job: int, slurm_here: Slurm) -> None:
    """Found without an option, and a step of its name, whose ranks are not Slurm's.

    Where the allocation ends in mid-cell, the cell says why, and so does the next start.
    """
    world.execute("import os, socket\nplace = socket.gethostname(), os.environ['SLURM_JOB_ID']")
    assert world.gather("place") == [("node1", str(job)), ("node2", str(job))]
    assert [row.host for row in world.status()] == ["node1", "node2"]
    # By these Lightning would take the node's number for the rank.
    world.execute("told = {'SLURM_NTASKS', 'SLURM_PROCID', 'SLURM_NODEID'} & {*os.environ}")
    assert world.gather("told") == [set(), set()]
    steps = slurm_here.run("squeue", "--steps", "--noheader", "--format=%j", f"--jobs={job}")
    assert world.session.spec.name in steps.stdout.split()

    said = dies_when(world, lambda: slurm_here.cancel(job))
    assert f"allocation {job} has ended" in said
    with pytest.raises(StartError, match=f"allocation {job} has ended") as found:
        make_world().start()
    assert "\n" not in str(found.value)


NOTEBOOK = """
import time
from nbdist import World
world = World(layout="2x1", salloc="-p main", log_dir="", show=False)
world.start()
print("up", flush=True)
world.execute("import time; time.sleep(600)")
"""


def test_a_notebook_that_is_killed(slurm_here: Slurm, hosts: list[Host]) -> None:
    """Its allocation ends, and all that was in it."""
    command = [sys.executable, "-c", NOTEBOOK]
    notebook = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert notebook.stdout is not None
    with notebook.stdout:
        assert notebook.stdout.readline() == "up\n"
    assert len(slurm_here.jobs()) == 1
    notebook.kill()
    notebook.wait()
    wait_until(lambda: not slurm_here.jobs(), "the allocation has ended")


def test_a_salloc_that_is_killed(slurm_here: Slurm, hosts: list[Host]) -> None:
    """Its allocation ends with it, which the cell says; a restart has one of its own, and no more.

    With Slurm's controller away at the end it is said that the job may run on, and what ends it.
    """
    with make_world(salloc="-p main") as world:
        (before,) = slurm_here.jobs()
        guard = psutil.Process(world.session.link.agent.pid)
        below = guard.children(recursive=True)
        (salloc,) = (each for each in below if each.name() == "salloc")
        said = dies_when(world, salloc.kill)
        assert f"`--salloc -p main`: salloc was killed by SIGKILL, and job {before} ends" in said
        wait_until(lambda: not slurm_here.jobs(), "the allocation has ended")
        world.restart()
        (job,) = slurm_here.jobs()
        slurm_here.control.link_down()
        left = world.session.shutdown()
        slurm_here.control.link_up()
    assert re.search(rf"Slurm's job {job} may still run \(.+\): `scancel {job}` ends it$", left)
    slurm_here.cancel(job)


def test_a_range_of_nodes(slurm_here: Slurm, hosts: list[Host]) -> None:
    """As many as are free: here one of two."""
    other = slurm_here.allocate("-N2", "--exclusive")
    with make_world("1:2x1", salloc="-p main", name="range") as world:
        shown = slurm_here.run("squeue", "--noheader", "--name=range", "--format=%D").stdout
        assert shown.split() == ["1"]
        check_whole(world, 1)
    slurm_here.cancel(other)
    wait_until(lambda: not slurm_here.jobs(), "the allocation has ended")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"salloc": "-p nope"},
            "`--salloc -p nope`: Slurm says: invalid partition specified: nope; Job submit/allocate"
            " failed: Invalid partition name specified.",
        ),
        ({"salloc": "--bogus"}, "`--salloc --bogus`: Slurm says: unrecognized option '--bogus'."),
        (
            {"salloc": "--gpus-per-node=9"},
            "`--salloc --gpus-per-node=9`: Slurm says: Job submit/allocate failed: Requested node "
            "configuration is not available.",
        ),
    ],
)
def test_what_slurm_refuses(
    options: dict[str, str], told: str, slurm_here: Slurm, hosts: list[Host]
) -> None:
    """In one line."""
    with pytest.raises(StartError) as found:
        make_world(**options).start()
    assert str(found.value).startswith(f"the workers could not start: {told}")
    assert "\n" not in str(found.value)


@pytest.fixture
def all_taken(slurm_here: Slurm) -> Iterator[int]:
    """Somebody else's allocation has all nodes."""
    job = slurm_here.allocate("-N3", "--exclusive")
    yield job
    slurm_here.cancel(job)


def test_an_allocation_of_its_own(
    all_taken: int, slurm_here: Slurm, hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--salloc` waits in the queue for one of that name; it ends with the head, however that does.

    Nothing is left in the queue when the wait is stopped, or its head and the guard are killed.
    """
    monkeypatch.setenv("SALLOC_TIMELIMIT", "7")
    stopping = once(lambda: len(slurm_here.jobs()) == 2, press_stop, "it is time to stop")
    with stopping, pytest.raises(KeyboardInterrupt):
        make_world(salloc="-p main").start()
    wait_until(lambda: slurm_here.jobs() == [all_taken], "it is in the queue no more")

    with pytest.raises(AgentLost):
        start_killed_in_queue(make_world(salloc="-p main"))
    wait_until(lambda: slurm_here.jobs() == [all_taken], "it is in the queue no more")

    world = make_world(salloc=f"--gpus-per-node={GPUS} --mem=500", name="mine", cpus=2)
    said = False
    for text in world.session.starting_texts():
        if "waits in Slurm's queue" in text and not said:
            said = True
            slurm_here.cancel(all_taken)
    with world:
        assert said
        shown = slurm_here.run("squeue", "--noheader", "--format=%j %D %C %l").stdout
        assert shown.split() == ["mine", "2", "4", "7:00"]
        assert world.size == 2
        (head,) = children_of(world.session.link.agent.pid)
        os.kill(head, signal.SIGKILL)
        wait_until(lambda: not slurm_here.jobs(), "the allocation has ended")
        with pytest.raises(AgentLost):
            world.execute("pass")
