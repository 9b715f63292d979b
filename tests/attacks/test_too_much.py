"""More than anybody can look at, or there is memory for: what is newest is there, nobody's ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from nbdist.agent.outbox import SHOWN_KEPT
from nbdist.errors import WorkerError
from nbdist.output.rank_transcript import SHOWN_AT_MOST
from nbdist.world.world import World
from tests.notebook.front_end import Notebook
from tests.waiting import wait_until
from tests.worlds import NewWorld

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
    """One whose kernel is in the group, and so is all that it starts."""
    notebook = Notebook()
    try:
        (group / "cgroup.procs").write_text(str(notebook.process.pid))
        yield notebook
    finally:
        notebook.close()


def test_values_that_do_not_fit(notebook: Notebook, group: Path) -> None:
    """The cell is refused with the figures; the notebook's kernel and its workers live."""
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
    # Bytes and strings are copied twice: into the pickle, and from there.
    notebook.run(f"b = bytes({SIZE})")
    for free in (SIZE // 2, SIZE * 3 // 2):
        leave(free)
        assert notebook.run("%%distributed\nlen(b)").error.startswith(refused)
    # What a rank sends back is looked at in the same way.
    leave(SIZE // 2)
    assert refused in notebook.run("%dist_gather x -r 0 --as y").error
    limit.write_text("max" if version_2 else "-1")
    assert notebook.run("%%distributed\nassert kept == rank").errors == []


def test_a_rank_at_its_limit_of_address_space(new_world: NewWorld) -> None:
    """It has no room to form the group again with those that waited: it alone is restarted."""
    with new_world(3) as world:
        pids = dict(world.pids)
        with pytest.raises(WorkerError, match="Rank 1 was restarted and its va") as raised:
            world.execute(FILL_UP)
        assert "MemoryError" in str(raised.value)  # which it may have no memory to report itself
        assert "no variables were lost" not in str(raised.value)
        world.execute("dist.barrier()")
        assert world.gather("globals().get('kept')") == [0, None, 2]
        assert [world.pids[rank] == pids[rank] for rank in range(3)] == [True, False, True]


pytestmark = pytest.mark.shared_world(2)

PAGE, PAGES = 900_000, 200

FLOOD = f"""
from IPython.display import HTML, display
from pathlib import Path
for page in range({PAGES}):
    display(HTML(f"{{page}} {{'x' * {PAGE}}}"))
"""


def megabytes_of_agent(guard: int) -> float:
    """Of the one that is below its guard, beside the fork server."""
    found = psutil.Process(guard).children()
    (agent,) = (each for each in found if "nbdist.agent" in each.cmdline())
    return float(agent.memory_info().rss / 2**20)


def test_displays_that_nobody_takes(world: World, tmp_path: Path) -> None:
    """They are kept up to a limit; then the notebook gets the newest, and how many it does not."""
    guard, file = world.session.link.agent.pid, tmp_path / "shown"
    before = megabytes_of_agent(guard)
    running = world.submit(world.task(f"{FLOOD}Path({str(file)!r}).touch()", ranks=[1]))
    wait_until(file.exists, "the rank has shown all of it")
    assert megabytes_of_agent(guard) - before < 2.5 * SHOWN_KEPT / 2**20 < PAGES * PAGE / 2**20
    world.session.wait(running)
    assert running.error() is None
    said = [shown.plain for shown in running.transcript[1].displays]
    pages = said.count(said[-1])
    assert f"… {PAGES - pages} displays left out; the newest are kept" in said
    assert SHOWN_AT_MOST / 4 < PAGE * pages < SHOWN_AT_MOST
    world.execute("pass")
    sys.stdout.write(f"{megabytes_of_agent(guard) - before:.0f} MB more afterwards\n")
    assert megabytes_of_agent(guard) - before < SHOWN_KEPT / 2 / 2**20
