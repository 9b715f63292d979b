"""Tests of `nbdist.worker.kernel`: cells run as IPython runs them, and end one by one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist.errors import WorkerError
from nbdist.output.layout import final_layout
from nbdist.output.text import panel_text
from nbdist.wire.work import CellCode
from nbdist.world import dispatch
from nbdist.world.world import World
from tests.cells import run, run_well
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world


@pytest.fixture(scope="module")
def world(new_world: NewWorld) -> Iterator[World]:
    """Workers of a user whose IPython runs a start-up file."""
    startup = Path(os.environ["IPYTHONDIR"], "profile_default", "startup", "00.py")
    startup.parent.mkdir(parents=True, exist_ok=True)
    startup.write_text("started_up = True")
    with new_world(2) as world:
        yield world
    startup.unlink()


def test_ipython_syntax_works_in_cells(world: World) -> None:
    """`await`, `!command`, its result, line magics, a cell magic as first line, and `x?` work."""
    ran = run_well(
        world,
        "import asyncio\nawait asyncio.sleep(0)\n!echo from a child\nlisting = !echo a b\n"
        "print(listing)\n%env NBDIST_TEST_X=3\nimport os\nprint(os.environ['NBDIST_TEST_X'])",
    )
    for rank in range(world.size):
        assert ran.lines(rank) == ["from a child", "['a b']", "env: NBDIST_TEST_X=3", "3"]
    assert run_well(world, "%%capture said\nprint('quiet')").lines() == []
    assert world.gather("said.stdout") == ["quiet\n"] * world.size
    ran = run_well(world, "def documented():\n    'Says hello.'\ndocumented?")
    assert "Says hello." in "\n".join(ran.lines())


def test_last_value_is_shown_and_kept(world: World) -> None:
    """The value of the last expression is shown, and `_`, `Out` and `_7` have it."""
    ran = run(world, "x = 40\nx + rank", count=7)
    for rank in range(world.size):
        assert ran.lines(rank) == [f"<{40 + rank}>"]
    expected = [(40 + rank, 40 + rank, 40 + rank) for rank in range(world.size)]
    assert world.gather("(_, Out[7], _7)") == expected
    assert run_well(world, "x + 1;").lines() == []


def test_cells_run_in_main_and_have_source(world: World) -> None:
    """Cells run in `__main__`, and `inspect` finds the source of their functions and methods."""
    run_well(
        world,
        "import inspect, sys\ny = 5\nhere = sys.modules['__main__'].y, __name__\n"
        "def f():\n    return 1  # here\n"
        "class C:\n    def m(self):\n        return 2  # there\n"
        "found = inspect.getsource(f), inspect.getsource(C.m)",
    )
    assert world.gather("here") == [(5, "__main__")] * world.size
    f, m = world.gather("found")[0]
    assert f == "def f():\n    return 1  # here\n"
    assert m == "    def m(self):\n        return 2  # there\n"


def test_deep_traceback_shows_cell_lines(world: World) -> None:
    """A function of an earlier cell appears in the traceback with its own line."""
    run(world, "def divide(a, b):\n    return a / b  # the culprit", count=3)
    ran = run(world, "divide(1, 0)", count=4)
    traceback = ran.traceback()
    assert "Cell In[3], line 2" in traceback
    assert "return a / b  # the culprit" in traceback
    assert "Cell In[4], line 1" in traceback


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("quit", "SystemExit"),
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
        ("raise SystemExit('bye')", "SystemExit: bye"),
    ],
)
def test_exit_ends_the_cell_not_the_worker(world: World, source: str, message: str) -> None:
    """`quit`, `sys.exit` and SystemExit fail the cell and say so in a line; the worker runs on."""
    run_well(world, "kept = 1")
    # IPython takes a bare `quit` for a call in a cell of one line.
    ran = run(world, source if source == "quit" else f"{source}\nprint('not reached')")
    assert isinstance(ran.error, WorkerError)
    assert message in str(ran.error)
    assert "None" not in str(ran.error)
    assert "the worker is still running" in "\n".join(ran.failure().traceback)
    assert ran.lines() == ran.stderr() == []
    assert world.gather("kept") == [1] * world.size


def test_wrong_source_and_wrong_displays_fail_a_cell(world: World) -> None:
    """Source with a SyntaxError does not run at all; a display that is no JSON fails the cell."""
    ran = run(world, "print('a')\nx = = 1")
    assert isinstance(ran.error, WorkerError)
    assert ran.error.errors.keys() == {*range(world.size)}
    assert ran.lines() == []
    assert "SyntaxError" in str(ran.error)
    ran = run(world, "display({'application/json': object()}, raw=True)")
    assert isinstance(ran.error, WorkerError)
    assert run_well(world, "print('next')").lines() == ["next"]


STOPPED = {
    "among IPython's lines": """
class Stop:
    def visit(self, _):
        shell.ast_transformers.remove(self)
        signal.raise_signal(signal.SIGINT)
shell.ast_transformers.append(Stop())""",
    "in a callback": """
def stop():
    shell.events.unregister('pre_execute', stop)
    signal.raise_signal(signal.SIGINT)
shell.events.register('pre_execute', stop)""",
    "when its task has been made": """
import asyncio
whole = asyncio.ensure_future
def stop(work):
    task = whole(work)
    if getattr(work, '__name__', '') == 'run_cell_async':
        asyncio.ensure_future = whole
        signal.raise_signal(signal.SIGINT)
    return task
asyncio.ensure_future = stop""",
}
"""Code that interrupts the next cell before any code of that cell has begun."""


@pytest.mark.parametrize("where", STOPPED)
def test_stop_before_the_first_line_runs_nothing(world: World, where: str) -> None:
    """Stop before a cell's first line ends the cell with KeyboardInterrupt, and no line runs."""
    run_well(world, f"import signal\nbegun, shell = False, get_ipython()\n{STOPPED[where]}")
    awaits = "await asyncio.sleep(0)" if "asyncio" in STOPPED[where] else ""
    ran = run(world, f"begun = True\n{awaits}")
    assert {ran.failure(rank).name for rank in range(world.size)} == {"KeyboardInterrupt"}
    assert world.gather("begun") == [False] * world.size


def test_stop_after_the_last_line_fails_the_cell(world: World) -> None:
    """Stop after a cell's last line, while IPython stores the cell's history, fails the cell."""
    ran = run(
        world,
        "import signal\nhistory = get_ipython().history_manager\n"
        "def stop(_):\n    del history.store_output\n    signal.raise_signal(signal.SIGINT)\n"
        "history.store_output = stop\ndone = True",
    )
    assert {ran.failure(rank).name for rank in range(world.size)} == {"KeyboardInterrupt"}
    assert world.gather("done") == [True] * world.size


def test_the_shell_is_that_of_a_notebook(world: World) -> None:
    """Libraries see a notebook's shell, without prompts, history, start-up file or widgets."""
    world.execute(SHELL)
    found = world.gather("is_notebook, is_rich_of_a_page, has_bars_of_a_page")
    assert found == [(True, False, False)] * 2
    assert world.gather("is_started_up, has_history, prompts") == [(False, False, [])] * 2
    told = "import warnings\nwarnings.warn('To exit: use quit', stacklevel=1)"
    assert run_well(world, told).lines() == []


SHELL = """
import rich, rich.console, sys
kind = type(get_ipython())
is_notebook = kind.__name__ == "ZMQInteractiveShell" and "ipykernel.zmqshell" in str(kind)
is_rich_of_a_page = rich.get_console().is_jupyter or rich.console.Console().is_jupyter
has_bars_of_a_page = "IPKernelApp" in get_ipython().config
is_started_up, has_history = "started_up" in globals(), get_ipython().history_manager.enabled
prompts = [name for name in ("ps1", "ps2") if hasattr(sys, name)]
"""


def test_reset_keeps_names_of_every_worker(world: World) -> None:
    """`%reset` deletes variables; names that every worker has from its start come back."""
    world.execute("x = 1; rank = 'mine'; del dist")
    world.execute("%reset -f")
    assert world.gather("'x' in globals(), rank, world_size, local_rank, str(device)") == [
        (False, rank, 2, rank, "cpu") for rank in range(2)
    ]
    world.execute("dist.all_reduce(torch.ones(1))")
    assert "the worker is still running" in "\n".join(run(world, "exit()").failure().traceback)
    run_well(world, "pass")


WARNS = """# %%distributed
import warnings
weight = torch.zeros(1, requires_grad=True)
scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([weight], lr=0.1), 1)

def careless():
    warnings.warn("not like this", stacklevel=2)

careless()
scheduler.step()
warnings.warn_explicit("from elsewhere", UserWarning, "elsewhere.py", 7)
"""


def shown(world: World, source: str) -> str:
    """Return the text of a cell's panel; the cell is the seventh of its notebook."""
    running = world.submit(world.task(CellCode(source), execution_count=7))
    dispatch.wait(world.engine, running)
    running.result()
    text = panel_text(final_layout(running.transcript))
    world.engine.connection.release_values(running)
    return text


def test_warnings_name_the_cells_line(world: World) -> None:
    """Equal warnings of ranks are shown once, with the line of the cell that led to the warning.

    A warning in a thread, which no line of the cell has called, keeps its own line.
    """
    _head, header, *lines = shown(world, WARNS).split("\n")
    assert header == "── ranks 0-1 (same) ──"
    assert lines[:2] == ["Cell In[7], line 9: UserWarning: not like this", "  careless()"]
    assert lines[2].startswith("Cell In[7], line 10: UserWarning: Detected call of `lr_scheduler")
    assert lines[3] == "  scheduler.step()"
    assert lines[4].startswith("Cell In[7], line 11: UserWarning: from elsewhere")
    assert lines[5].endswith("(elsewhere.py:7)")
    warns = "target=warnings.warn_explicit, args=('quiet', UserWarning, 'e.py', 7)"
    source = f"import threading, warnings\nt = threading.Thread({warns})\nt.start(); t.join()"
    assert "\ne.py:7: UserWarning: quiet" in shown(world, source)
