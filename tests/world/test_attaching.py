"""Tests of `nbdist.world.world`: a script's world goes on in another process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nbdist.errors import UsageError, WorkerDied
from nbdist.world.agents import Found, worlds
from nbdist.world.states import State
from nbdist.world.world import attach
from tests.waiting import wait_until

pytestmark = pytest.mark.own_agent

NAME = f"exp-{os.getpid()}"
"""Others run the same tests on this machine."""

BEGIN = f"""
import os, sys, time
import numpy as np
import nbdist

if __name__ == "__main__":
    world = nbdist.World(2, detach=True, name="{NAME}", log_dir="", backend=%r)
    world.start()
    world.execute("big = weights.sum()", names={{"weights": np.ones(100_000)}}, setup=True)
    world.execute("import time; x = rank")
    %s
    print("ready", flush=True)
    time.sleep(600)
"""


class Script:
    """A process that has a world, which outlives it."""

    def __init__(self, line: str, backend: str) -> None:
        command = [sys.executable, "-c", BEGIN % (backend, line)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        if "submit" in line:  # the link's thread sends it
            wait_until(lambda: here()[0].info.state != "ready", "the task has been sent")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        wait_until(lambda: [each.is_detached for each in here()] == [True], "it is detached")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def here() -> list[Found]:
    return [each for each in worlds() if each.info.name == NAME]


@pytest.fixture
def begin() -> Iterator[Callable[[str], Script]]:
    """Starts one that does this last; ends it, and what is left of its world."""
    made: list[Script] = []

    def one(line: str = "pass", backend: str = "none") -> Script:
        made.append(Script(line, backend))
        return made[-1]

    yield one
    for script in made:
        script.close()
    for each in here():
        os.kill(each.agent, signal.SIGTERM)


LOOP = "i = 0; print('begun')\\nwhile not __import__('os').path.exists('%s'): time.sleep(0.1)"
LOOP += "\\nprint('ended', x)\\ny = 2 * x"


def test_it_goes_on(
    begin: Callable[[str], Script], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its task comes to its end, variables and set-up cells are there, ranks can be replaced.

    It can be let go again, and had again; then nothing was missed.
    """
    script = begin(f'world.submit(world.task("{LOOP % (tmp_path / "seen")}"))')
    with pytest.raises(
        UsageError, match=f"the notebook of process {script.process.pid} still uses it"
    ):
        attach(NAME)
    script.kill()
    with attach(NAME) as world:
        assert world.state is State.RUNNING
        with pytest.raises(UsageError, match="this notebook uses it"):
            attach(NAME)
        (tmp_path / "seen").touch()
        assert world.catch_up() is not None
        assert sorted(capsys.readouterr().out.splitlines()) == [
            "[0-1] begun",
            "[0] ended 0",
            "[1] ended 1",
        ]
        assert world.catch_up() is None
        assert world.gather("y") == [0, 2]
        assert world.session.names.bound(0) == ["big", "i", "x", "y"]
        # The names of the set-up cell lay in memory of the process that was killed.
        world.replace([1])
        assert world.gather("big") == [100_000, 100_000]
        world.scale(3)
        assert world.gather("big", rank=2) == 100_000
        assert world.session.config.detach
        link = world.session.detach_link()
        assert link is not None
        link.detach()
        wait_until(lambda: [each.is_detached for each in here()] == [True], "it is detached again")
    world = attach(NAME)
    assert (world.state, world.size, world.catch_up()) == (State.READY, 3, None)
    with world:
        assert world.gather("x", ranks=[0]) == [0]
        world.restart(1)
        assert world.gather("big") == [100_000]
    assert here() == []


def test_a_rank_that_dies_meanwhile(begin: Callable[..., Script]) -> None:
    """Those that wait for it are freed though nobody is there; then it is replaced.

    What the task has raised is raised where it is caught up with, after as long as it took.
    """
    source = "import os\\nif rank: time.sleep(0.5); os._exit(3)\\ndist.barrier()"
    begin(f'world.submit(world.task("{source}"))', "gloo").kill()
    wait_until(lambda: here()[0].info.state == "broken", "all ranks have ended the task")
    with attach(NAME) as world:
        with pytest.raises(WorkerDied, match=r"rank 1 .* exited with code 3"):
            world.catch_up()
        assert world.session.running is not None
        assert 0.5 <= world.session.running.transcript.elapsed() < 10
        world.execute("dist.barrier()")
        assert world.gather("x", ranks=[0]) == [0]


WHILE_STARTING = f"""
import os, nbdist
world = nbdist.World(1, detach=True, name="{NAME}", log_dir="", backend="none")
for far in world.session.starting():
    if far.up:
        os._exit(9)
"""


def test_killed_while_starting(begin: Callable[..., Script]) -> None:
    """The start comes to its end without anybody, and the next one has what was wanted."""
    assert begin  # which ends what is left
    assert subprocess.run([sys.executable, "-c", WHILE_STARTING]).returncode in (0, 9)
    wait_until(lambda: [each.is_detached for each in here()] == [True], "it has started")
    with attach(NAME) as world:
        assert world.gather("rank") == [0]
