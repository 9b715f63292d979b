"""Tests of `nbdist.worker.compat.debugger`: every way into it, where it stops, what it shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nbdist.errors import WorkerError
from nbdist.output.ansi import strip
from nbdist.world.world import World

pytestmark = pytest.mark.shared_world(2)


Debug = Callable[..., str]


@pytest.fixture
def debug(world: World, enter: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> Debug:
    """Runs a cell, types these lines, and gives what is seen."""

    def run(source: str, *lines: str, ranks: list[int] | None = None) -> str:
        enter(*lines)
        capsys.readouterr()
        world.execute(source, ranks=ranks)
        return strip(capsys.readouterr().out)

    return run


@pytest.fixture
def debug_one(debug: Debug) -> Debug:
    """The same on rank 1 alone, without its number before each line."""
    return lambda *lines: debug(*lines, ranks=[1]).replace("[1] ", "")


def test_statements_of_a_cell_are_lines(debug: Debug) -> None:
    """Stepping goes from one to the next, also of those that await, and not into IPython."""
    source = "if rank == 1: breakpoint()\nx = 1\nx += 1\nx"
    said = debug(source, "n", "n", "n")
    stops = [line.split("---> ")[1] for line in said.splitlines() if "---> " in line]
    assert stops == ["2 x = 1", "3 x += 1", "4 x"]
    assert "Cell In[" in said
    assert said.endswith("ipdb> [1] 2\n")
    assert debug("print('through')") == "[0-1] through\n"
    source = "import asyncio\nbreakpoint()\nawait asyncio.sleep(0.01)\nx = 5\nx + 1"
    said = debug(source, "n", "n", "n", "-r all c")
    stops = [line.split("---> ")[1] for line in said.splitlines() if "[0] ----> " in line]
    assert stops == ["4 x = 5", "5 x + 1"]
    assert "[0] 6" in said
    assert "StopIteration" not in said
    # torch's own stops on one rank, and the others wait for it.
    said = debug("dist.breakpoint(1)\nprint('after')", "up", "c")
    assert "[rank 1] ipdb> " in said
    assert "--> 1 dist.breakpoint(1)" in said
    assert said.endswith("[0-1] after\n")


def test_an_exception_is_looked_at(debug: Debug) -> None:
    """`%debug` on the ranks begins at the user's innermost call."""
    debug("def f(a):\n    return 1 / a\ntry:\n    f(0)\nexcept ZeroDivisionError:\n"
          "    get_ipython().showtraceback()")  # fmt: skip
    said = debug("%debug", "p a", "q", "p a", "q")
    assert "[0-1] ----> 2     return 1 / a" in said.splitlines()
    assert "[rank 0] ipdb> [0] 0" in said.splitlines()
    assert "[1] 0" in said


def test_ways_in(debug_one: Debug, world: World) -> None:
    """It stops at the next line, and what is bound there stays."""
    for begin in (
        "breakpoint()",
        "import pdb; pdb.set_trace()",
        "from IPython.core.debugger import set_trace; set_trace()",
        "get_ipython().debugger_cls().set_trace()",  # as ipdb does
        "import sys, types; sys.modules['debugpy'] = types; breakpoint(header='here')",
    ):
        source = f"def f(a):\n    {begin}\n    return a\nresult = f(5)"
        said = debug_one(source, "p a + 1", "!a = 7", "c")
        assert "----> 3     return a" in said
        assert "[rank 1] ipdb> 6\n" in said
        assert world.gather("result", ranks=[1]) == [7]


def test_a_variable_says_what_a_breakpoint_is(debug_one: Debug) -> None:
    """PYTHONBREAKPOINT=0 switches all of them off."""
    off = "import os; os.environ['PYTHONBREAKPOINT'] = '0'\n"
    on = "\ndel os.environ['PYTHONBREAKPOINT']\nprint('ran')"
    assert debug_one(f"{off}breakpoint(){on}") == "ran\n"


def test_leaving_ends_the_cell(
    debug_one: Debug, world: World, enter: Callable[..., None], write: Callable[..., Path]
) -> None:
    """By `q`, which one line says; the next cell runs, and what was ended is not run again."""
    with pytest.raises(WorkerError, match="BdbQuit: `q` left the debugger") as found:
        debug_one("kept = 1\nbreakpoint()\nkept = 2", "q")
    assert "bdb.py" not in "".join(map(str, found.value.__notes__))
    assert debug_one("print(kept)") == "1\n"
    script = write("asks.py", "breakpoint()\nx = 1")
    enter("q", "c", "c")
    with pytest.raises(WorkerError, match="BdbQuit"):
        world.run_script(str(script), ranks=[1], max_restarts=3)
    assert world.session.running is not None
    assert world.session.running.task.attempt.number == 0
    world.run_script(str(script), max_restarts=3)
    assert world.gather("x") == [1, 1]


def test_the_debugger_keeps_nothing(debug_one: Debug, world: World) -> None:
    """A tensor of a call in which it stopped is let go with the call."""
    source = "import weakref\ndef f():\n    t = torch.ones(9)\n    breakpoint()\n"
    debug_one(f"{source}    return weakref.ref(t)\nleft = f()", "n", "n", "n")
    debug_one("import gc; gc.collect(); import sys")
    assert world.gather("left() is None, sys.gettrace()", ranks=[1]) == [(True, None)]


def test_in_functions_of_the_caller(
    world: World, enter: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """With none of nbdist's own calls among those that are shown."""
    enter("w", "!b = 9", "c")

    def function(a: int) -> int:
        import torch.distributed as dist

        b = a
        if dist.get_rank() == 0:
            breakpoint()
        return b

    assert [*world.run(function, 3)] == [9, 3]
    said = strip(capsys.readouterr().out)
    assert said.count("function()") == 2
    assert "nbdist/worker" not in said
