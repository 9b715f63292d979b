"""Worlds with too few descriptors or too little memory, and more displays than can be read."""

from __future__ import annotations

import resource
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from nbdist import World
from nbdist.agent.outbox import SHOWN_KEPT
from nbdist.errors import WorkerError
from nbdist.output.rank_transcript import SHOWN_AT_MOST
from nbdist.world import dispatch
from nbdist.world.task_error import error_of
from tests.cells import press_stop, run_for
from tests.notebook.front_end import Notebook
from tests.traces import command_line
from tests.waiting import SOON, wait_until

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


@pytest.fixture
def limited(world: World) -> World:
    """A world whose ranks have a variable, and few enough descriptors to use all of them."""
    world.execute(
        "import resource\n"
        "for fd in globals().pop('open_files', ()): __import__('os').close(fd)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 300))\n"
        f"kept = rank\n{SUM}"
    )
    return world


def all_go_on(world: World, pids: dict[int, int], lost: int | None = None) -> None:
    """Check that the group works, and that only rank `lost` has lost its process and variable."""
    world.execute(SUM)
    assert [rank for rank in pids if world.pids[rank] != pids[rank]] == [lost][: lost is not None]
    kept = [None if rank == lost else rank for rank in range(3)]
    assert world.gather("globals().get('kept')") == kept


def under_limit(soft: int, hard: int, source: str) -> subprocess.CompletedProcess[str]:
    """Run `source`, as a notebook, in a new process with these limits of open files."""

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


def test_a_low_limit_of_files_is_raised_or_named() -> None:
    """A soft limit is raised for the workers alone; beyond the hard limit a line says what to do.

    The line has the figures and the remedy, and comes before any start.
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


def test_a_notebook_without_descriptors_gets_no_magics() -> None:
    """`%load_ext` says why no magics are defined, and no library ends the notebook's process."""
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


def test_a_rank_without_descriptors_fails_and_loses_nothing(limited: World) -> None:
    """Ranks that wait for a rank without descriptors are released, and no rank loses variables."""
    pids = dict(limited.pids)
    with pytest.raises(WorkerError, match="OSError"):
        limited.execute(f"{USE_UP}\nif rank == 1: os.open(os.devnull, os.O_RDONLY)\ndist.barrier()")
    all_go_on(limited, pids)


def test_stop_releases_ranks_without_descriptors(limited: World) -> None:
    """Stop ends a collective of ranks without descriptors, and the ranks keep variables."""
    pids = dict(limited.pids)
    source = f"import time\n{USE_UP}\ndist.barrier() if rank else time.sleep(600)"
    press_stop(limited, run_for(limited, source, 1.0))  # the moment is arbitrary
    all_go_on(limited, pids)


def test_a_rank_without_spare_descriptors_is_replaced_alone(limited: World) -> None:
    """A rank that has no descriptor in reserve is restarted; other ranks are unaffected."""
    pids = dict(limited.pids)
    with pytest.raises(WorkerError, match=r"OSError.* Rank 1 was restarted and its var"):
        limited.execute(TAKE_ALL)
    all_go_on(limited, pids, lost=1)


# --- memory, and displays --------------------------------------------------------------------

SIZE = 100 << 20

FILL_UP = f"""
import resource
kept, hog = rank, []
if rank == 1:
    used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + {SIZE},) * 2)
    while True: hog.append(bytearray(1 << 16))
dist.barrier()
"""


@pytest.fixture
def group(control_group: Callable[..., Path]) -> Path:
    return control_group("memory", "memory.stat")


@pytest.fixture
def notebook(group: Path) -> Iterator[Notebook]:
    """A notebook whose kernel, with all its children, is in the control group."""
    notebook = Notebook()
    try:
        (group / "cgroup.procs").write_text(str(notebook.process.pid))
        yield notebook
    finally:
        notebook.close()


def test_values_that_do_not_fit_are_refused(notebook: Notebook, group: Path) -> None:
    """A cell whose values do not fit is refused with the figures; kernel and workers live on."""
    version_2 = (group / "memory.max").exists()
    names = ("max", "current") if version_2 else ("limit_in_bytes", "usage_in_bytes")
    limit, used = (group / f"memory.{name}" for name in names)
    refused = "NotEnoughMemory: sending 0.10 GB"

    def leave(free: int) -> None:
        limit.write_text(str(int(used.read_text()) + free))

    notebook.run("%load_ext nbdist")
    notebook.run("%%distributed -n 2\nkept = rank")
    notebook.run(f"import numpy as np\nx = np.ones({SIZE}, dtype=np.uint8)")
    leave(SIZE // 2)
    said = notebook.run("%%distributed\nx.sum()").error
    assert said.startswith(f"{refused} needs as much shared memory, but only")
    assert f"its group {group} may use" in said
    limit.write_text("max" if version_2 else "-1")
    assert notebook.run("%%distributed\nassert x.sum() == x.size\nassert kept == rank").errors == []
    # Bytes and strings are copied twice: into the pickle, and out of the pickle.
    notebook.run(f"b = bytes({SIZE})")
    for free in (SIZE // 2, SIZE * 3 // 2):
        leave(free)
        assert notebook.run("%%distributed\nlen(b)").error.startswith(refused)
    # Values that a rank sends back are checked in the same way.
    leave(SIZE // 2)
    assert refused in notebook.run("%dist_gather x -r 0 --as y").error
    limit.write_text("max" if version_2 else "-1")
    assert notebook.run("%%distributed\nassert kept == rank").errors == []


def test_a_rank_without_address_space_is_replaced_alone(world: World) -> None:
    """A rank without room to form the group again with ranks that waited is restarted alone."""
    pids = dict(world.pids)
    with pytest.raises(WorkerError, match="Rank 1 was restarted and its va") as raised:
        world.execute(FILL_UP)
    assert "MemoryError" in str(raised.value)  # reported even if rank 1 has no memory for a report
    assert "no variables were lost" not in str(raised.value)
    all_go_on(world, pids, lost=1)


PAGE, PAGES = 900_000, 200

FLOOD = f"""
from IPython.display import HTML, display
from pathlib import Path
for page in range({PAGES}):
    display(HTML(f"{{page}} {{'x' * {PAGE}}}"))
"""


def megabytes_of_agent(guard: int) -> float:
    """Return the memory of the agent below the guard."""
    found = psutil.Process(guard).children()
    (agent,) = (each for each in found if "nbdist.agent" in command_line(each))
    return float(agent.memory_info().rss / 2**20)


def test_displays_that_nobody_takes_are_limited(world: World, tmp_path: Path) -> None:
    """An agent keeps displays up to a limit; the notebook gets the newest and a count of others."""
    guard, file = world.engine.connection.link.agent.pid, tmp_path / "shown"
    before = megabytes_of_agent(guard)
    running = world.submit(world.task(f"{FLOOD}Path({str(file)!r}).touch()", ranks=[1]))
    wait_until(file.exists, "the rank has shown all of it")
    assert megabytes_of_agent(guard) - before < 2.5 * SHOWN_KEPT / 2**20 < PAGES * PAGE / 2**20
    dispatch.wait(world.engine, running)
    assert error_of(running) is None
    said = [shown.plain for shown in running.transcript[1].displays]
    pages = said.count(said[-1])
    assert f"… {PAGES - pages} displays left out; the newest are kept" in said
    assert SHOWN_AT_MOST / 4 < PAGE * pages < SHOWN_AT_MOST
    world.execute("pass")
    sys.stdout.write(f"{megabytes_of_agent(guard) - before:.0f} MB more afterwards\n")
    assert megabytes_of_agent(guard) - before < SHOWN_KEPT / 2 / 2**20
