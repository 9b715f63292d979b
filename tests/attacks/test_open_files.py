"""Too few descriptors: for a world, and in a rank whose user code has used them up."""

from __future__ import annotations

import resource
import subprocess
import sys
import textwrap

import pytest

from nbdist import World
from nbdist.errors import WorkerError
from tests.waiting import SOON

pytestmark = pytest.mark.shared_world(3)

SUM = "t = torch.ones(1); dist.all_reduce(t); assert t.item() == world_size"

USE_UP = """
import os
open_files = []
try:
    while True:
        open_files.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
"""

TAKE_ALL = f"""
import resource, threading, time
{USE_UP}
def take_all():
    while True:
        try:
            os.open(os.devnull, os.O_RDONLY)
        except OSError:
            time.sleep(0.0001)
if rank == 1:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    threading.Thread(target=take_all, daemon=True).start()
    os.open(os.devnull, os.O_RDONLY)
dist.barrier()
"""
"""Rank 1 has a lowered hard limit, and takes every descriptor that is closed."""


@pytest.fixture(autouse=True)
def ranks_with_a_variable(world: World) -> None:
    """Before each test, and few enough descriptors to use them up."""
    world.execute(
        "import resource\n"
        "for fd in globals().pop('open_files', ()): __import__('os').close(fd)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 300))\n"
        f"kept = rank\n{SUM}"
    )


def all_go_on(world: World, pids: dict[int, int], lost: int | None = None) -> None:
    """The group is whole again, and nobody but this rank has lost anything."""
    world.execute(SUM)
    assert [rank for rank in pids if world.pids[rank] != pids[rank]] == [lost][: lost is not None]
    kept = [None if rank == lost else rank for rank in range(3)]
    assert world.gather("globals().get('kept')") == kept


def under_limit(soft: int, hard: int, source: str) -> subprocess.CompletedProcess[str]:
    """Run source in a process of its own, which is the notebook."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=SOON,
        check=False,
    )


def test_limits_that_are_too_low() -> None:
    """A soft limit is raised for the workers alone; beyond the hard one a line says what to do.

    Before anything is started: with figures and the remedy.
    """
    ran = under_limit(
        96,
        256,
        """
        import resource
        from nbdist import World
        world = World(3, log_dir="")
        def says(do, *args, **options):
            try:
                do(*args, **options)
            except Exception as error:
                print(type(error).__name__, error)
        for n in (16, 3):
            says(world.restart, n=n)
        world.execute("import resource; t = torch.ones(1); dist.all_reduce(t)")
        says(world.scale, 10)
        print(world.gather("rank"))
        workers = min(world.gather("resource.getrlimit(resource.RLIMIT_NOFILE)[0]"))
        print(workers > 96, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        world.shutdown()
        """,
    )
    assert ran.returncode == 0, ran.stderr
    start, scale, *rest = ran.stdout.splitlines()
    for line, said in (
        (start, "StartError 16 workers take 384 open files in one process"),
        (scale, "ScaleError 10 workers take 264 open files in one process"),
    ):
        assert said.partition(" ")[0] == line.partition(" ")[0]
        assert said.partition(" ")[2] in line
        assert "`ulimit -Hn` allows 256. Raise it before the notebook is started, or use 9" in line
    assert rest == ["[0, 1, 2]", "True 96"]


def test_a_notebook_without_descriptors() -> None:
    """`%load_ext` says why there are no magics, and no library ends the notebook's process."""
    ran = under_limit(
        24,
        24,
        """
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance()
        shell.run_cell("%load_ext nbdist")
        print("distributed" in shell.magics_manager.magics["cell"])
        """,
    )
    assert ran.returncode == 0, ran.stderr
    said, is_there = ran.stdout.splitlines()
    assert "UsageError\x1b[0m: nbdist cannot be used here, neither its magics nor workers" in said
    assert "`ulimit -n` is 24). Start the notebook after `ulimit -n 1024`." in said
    assert is_there == "False"


def test_a_rank_without_descriptors_fails_while_others_wait(world: World) -> None:
    """They are freed, the group is whole again, and nobody loses anything."""
    pids = dict(world.pids)
    with pytest.raises(WorkerError, match="OSError"):
        world.execute(f"{USE_UP}\nif rank == 1: os.open(os.devnull, os.O_RDONLY)\ndist.barrier()")
    all_go_on(world, pids)


def test_ranks_without_descriptors_are_stopped(world: World) -> None:
    """Stop frees them out of a collective, and they keep what they have."""
    pids = dict(world.pids)
    source = f"import time\n{USE_UP}\ndist.barrier() if rank else time.sleep(600)"
    running = world.submit(world.task(source))
    for _ in world.follow(running):
        if running.age > 1.0:  # the moment is arbitrary
            break
    world.interrupt()
    world.session.wait(running)
    all_go_on(world, pids)


def test_a_rank_that_cannot_take_part_is_replaced_alone(world: World) -> None:
    """It has no descriptor in reserve; other ranks are unaffected."""
    pids = dict(world.pids)
    with pytest.raises(WorkerError, match=r"OSError.* Rank 1 was restarted and its var"):
        world.execute(TAKE_ALL)
    all_go_on(world, pids, lost=1)
