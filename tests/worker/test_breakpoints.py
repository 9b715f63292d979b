"""Tests of `nbdist.worker.tracebacks`: every way in leads to whoever types."""

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
    """Runs a cell on rank 1, types these lines, and gives what is seen."""

    def run(source: str, *lines: str) -> str:
        enter(*lines)
        capsys.readouterr()
        world.execute(source, ranks=[1])
        return strip(capsys.readouterr().out).replace("[1] ", "")

    return run


@pytest.mark.parametrize(
    "begin",
    [
        "breakpoint()",
        "import pdb; pdb.set_trace()",
        "from IPython.core.debugger import set_trace; set_trace()",
        "get_ipython().debugger_cls().set_trace()",  # as ipdb does
        "import sys, types; sys.modules['debugpy'] = types; breakpoint(header='here')",
    ],
)
def test_ways_in(begin: str, debug: Debug, world: World) -> None:
    """It stops at the next line, and what is bound there stays."""
    said = debug(f"def f(a):\n    {begin}\n    return a\nresult = f(5)", "p a + 1", "!a = 7", "c")
    assert "----> 3     return a" in said
    assert "[rank 1] ipdb> 6\n" in said
    assert world.gather("result", ranks=[1]) == [7]


def test_a_variable_says_what_a_breakpoint_is(debug: Debug) -> None:
    """PYTHONBREAKPOINT=0 switches all of them off."""
    off = "import os; os.environ['PYTHONBREAKPOINT'] = '0'\n"
    on = "\ndel os.environ['PYTHONBREAKPOINT']\nprint('ran')"
    assert debug(f"{off}breakpoint(){on}") == "ran\n"


def test_leaving_ends_the_cell(debug: Debug, world: World) -> None:
    """By `q`: one line says so, and the next cell runs without the debugger."""
    with pytest.raises(WorkerError, match="BdbQuit: `q` left the debugger") as found:
        debug("kept = 1\nbreakpoint()\nkept = 2", "q")
    assert "bdb.py" not in "".join(map(str, found.value.__notes__))
    assert debug("print(kept)") == "1\n"


def test_who_leaves_is_not_asked_again(
    world: World, enter: Callable[..., None], write: Callable[..., Path]
) -> None:
    """What `q` has ended is not run again, as after Stop."""
    script = write("asks.py", "breakpoint()\nx = 1")
    enter("q", "c", "c")
    with pytest.raises(WorkerError, match="BdbQuit"):
        world.run_script(str(script), ranks=[1], max_restarts=3)
    assert world.session.running is not None
    assert world.session.running.task.attempt.number == 0
    world.run_script(str(script), max_restarts=3)
    assert world.gather("x") == [1, 1]


def test_the_debugger_keeps_nothing(debug: Debug, world: World) -> None:
    """A tensor of a call in which it stopped is let go with the call."""
    source = "import weakref\ndef f():\n    t = torch.ones(9)\n    breakpoint()\n"
    debug(f"{source}    return weakref.ref(t)\nleft = f()", "n", "n", "n")
    debug("import gc; gc.collect(); import sys")
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
