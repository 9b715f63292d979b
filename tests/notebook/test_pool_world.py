"""Tests of `nbdist.notebook.pool_world`: a notebook's own workers from Python code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.notebook.front_end import Notebook, body
from tests.notebook.test_jobs import SLEEPS, begin, sleep
from tests.waiting import SOON

pytestmark = pytest.mark.shared_world

WORLD = "import nbdist; world = nbdist.current_world()"


def test_current_world_is_what_cells_use(two: Notebook) -> None:
    """Functions of a library find the world, which has the variables and ranks of the cells."""
    assert two.run("%%distributed\nloss = rank + 0.5").errors == []
    library = (
        "import sys, types\nlibrary = types.ModuleType('library')\n"
        "exec('import nbdist\\ndef losses(): return nbdist.current_world().gather(\"loss\")', "
        "vars(library))\nsys.modules['library'] = library"
    )
    assert two.run(library).errors == []
    assert two.value("library.losses()") == [0.5, 1.5]
    assert two.run(WORLD).displays == []  # the workers run already
    assert two.value("world.size, world.gather('loss', rank=-1)") == (2, 1.5)
    assert two.value("isinstance(world, nbdist.World), repr(world)") == (
        True,
        "<World 2 ranks, ready>",
    )
    ran = two.run("found = world.execute('made = rank * 2\\nprint(7)\\nmade', ranks='1:')")
    assert "".join(ran.streams) == "[1] 7\n[1] 2\n"
    assert two.value("dict(found)") == {1: 2}
    assert body(two.run("%%distributed -r 1\nmade"))[-1] == "2"
    assert two.run("y = 3\ndef add(x): return x + y").errors == []
    assert two.value("dict(world.run(add, 4, rank=0))") == {0: 7}


def test_calls_use_the_names_that_the_notebook_has_now(two: Notebook) -> None:
    """A call uses the newest form of a helper that was edited after a cell had sent the helper."""
    two.run(WORLD)
    two.run("step = 1\ndef helper(x): return ('old', x + step)\ndef f(x): return helper(x)")
    two.run("mine = 1")
    assert two.run("%%distributed\nhelper(1)\nmine = 2").errors == []
    two.run("def helper(x): return ('new', x + step)\nstep = 5\ndef g(x): return helper(x), mine")
    assert two.value("world.map(f, [1])") == [("new", 6)]
    assert two.value("world.run(f, 1).rank(0)") == ("new", 6)
    assert two.value("world.map(g, [1])") == [(("new", 6), 2)]


def test_calls_wait_for_the_job(two: Notebook) -> None:
    """A call waits for a job, as a line says; `status`, `stacks` and `interrupt` do not wait."""
    two.run(WORLD)
    begin(two, "import time; time.sleep(1); late = rank + 5")
    waited = two.run("print(world.gather('late'))")
    assert waited.streams == ["[5, 6]\n"]
    assert any("Waiting for `job`" in text for text in waited.drawn)
    two.value("job.done() or job.wait()")
    begin(two, "import time; time.sleep(1)")
    assert two.value("world.map(abs, [-1, 2])") == [1, 2]
    sleep(two)
    assert two.value("len(world.status()), len(world.stacks(rank=0)), job.done()") == (2, 1, False)
    stop = two.stop_at("Waiting for `job` (running for ")
    error = two.run("world.execute('never = 1')", stop).error
    assert error.startswith("KeyboardInterrupt: Stopped. This cell has not run; `job`")
    assert two.run("world.interrupt(); job.wait()").errors != []
    assert two.value("world.gather(\"'never' in globals()\")") == [False, False]


def test_a_call_replaces_a_dead_worker_with_a_line(two: Notebook) -> None:
    """A call replaces a worker that has died, and lines below the call's cell say so."""
    two.run(WORLD)
    cell = """
import os, signal, time
os.kill(world.pids[1], signal.SIGKILL)
link = world.engine.connection.link
while not any("Died" in repr(news) for news in [*link.events.waiting]): time.sleep(0.01)
print(world.gather("rank"))
"""
    ran = two.run(cell)
    assert ran.streams == ["[0, 1]\n"]
    assert "rank 1 was killed by SIGKILL while no cell was running" in ran.texts[-1]
    assert "rank 1 was restarted and its variables" in ran.texts[-1]


def test_the_world_has_the_new_workers_after_a_restart(two: Notebook) -> None:
    """After a restart the same `World` has the new workers; a `with` statement ends no workers.

    `World.restart` also ends jobs, as `%dist_restart` does.
    """
    two.run(WORLD)
    before = two.value("dict(world.pids)")
    assert two.run("%dist_restart").errors == []
    assert two.value("world.gather('rank')") == [0, 1]
    assert {*two.value("dict(world.pids)").values()}.isdisjoint(before.values())
    begin(two, SLEEPS)
    restarted = two.run("world.restart(3)")
    assert restarted.errors == []
    assert restarted.texts[-1].startswith("3 workers ready · gloo")
    assert two.run("job.wait()").error.endswith(": its workers were restarted.")
    assert two.run("%%distributed -n 3\nkept = rank").errors == []
    assert two.run("with world: print(world.gather('kept'))").streams == ["[0, 1, 2]\n"]
    scaled = two.run("world.scale(2); world.size, world.gather('kept')")
    assert (scaled.displays, scaled.results) == ([], [{"text/plain": "(2, [0, 1])"}])
    assert two.run("world.shutdown()").errors == []
    assert two.run("%dist_status").text.startswith("no workers are running · ")
    error = two.run("world.gather('kept')").error
    assert error.startswith("WorldNotStarted: ")
    assert two.run("%dist_init -n 2").errors == []
    assert two.value("world.gather('rank')") == [0, 1]


def test_workers_start_as_with_a_first_cell(kernel: Notebook) -> None:
    """`current_world` starts workers if none are running, and says how many."""
    kernel.run("%dist_shutdown")
    started = kernel.run(WORLD)
    number = kernel.value("world.size")
    assert started.text == f"{number} worker{'s' if number > 1 else ''} ready · gloo"
    assert body(kernel.run("%%distributed\nrank in range(world_size)"))[-1] == "True"
    kernel.run("world.shutdown()")
    assert kernel.run("world.start()").text == started.text
    kernel.run("%dist_shutdown")


def test_a_pool_has_a_world_of_its_own(kernel: Notebook) -> None:
    """`current_world("eval")` has that pool's workers; without any, it says how to start some."""
    error = kernel.run("import nbdist; nbdist.current_world('eval')").error
    assert error == (
        "WorldNotStarted: `nbdist.current_world('eval')` needs workers, and none are running. "
        "A `%%distributed -n 4` cell or `%dist_init --pool eval -n 4` starts them."
    )
    kernel.run("%%distributed --pool eval -n 1\nmine = 'eval'")
    assert kernel.value("nbdist.current_world('eval').gather('mine')") == ["eval"]
    assert kernel.run("%dist_shutdown --pool eval").errors == []
    assert kernel.run("nbdist.current_world(pool='eval')").error == error


def test_the_world_belongs_to_the_notebooks_main_thread(two: Notebook, tmp_path: Path) -> None:
    """On ranks, in threads, forked children and scripts, an error says where to use the world."""
    error = two.run("%%distributed\nimport nbdist; nbdist.current_world()").error
    assert (
        "UsageError: `nbdist.current_world()` belongs to the notebook, and this is a rank" in error
    )
    two.run(WORLD)
    cell = """
import threading
def call():
    try: world.execute("1")
    except nbdist.UsageError as error: print(error)
thread = threading.Thread(target=call); thread.start(); thread.join()
"""
    (text,) = two.run(cell).streams
    assert text.startswith("`nbdist.current_world()`: the notebook's workers can only be used on ")
    cell = """
import os
read, write = os.pipe()
if not (pid := os.fork()):
    try: nbdist.current_world()
    except Exception as error: os.write(write, str(error).encode())
    os._exit(0)
_ = os.waitpid(pid, 0)
print(os.read(read, 1000).decode())
"""
    (text,) = two.run(cell).streams
    assert text.startswith(
        "`nbdist.current_world()`: this process is a forked child of the notebook"
    )
    script = tmp_path / "script.py"
    script.write_text(
        "import nbdist\ntry: nbdist.current_world()\nexcept nbdist.UsageError as e: print(e)"
    )
    ran = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=SOON, check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert ran.stdout == (
        "`nbdist.current_world()` needs a notebook with nbdist: `%load_ext nbdist`. "
        "In a script `nbdist.World(n=4)` starts workers.\n"
    )
    assert two.run("%unload_ext nbdist").errors == []
    assert "needs a notebook with nbdist" in two.run("nbdist.current_world()").error
