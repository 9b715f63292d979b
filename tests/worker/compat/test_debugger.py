"""Tests of `nbdist.worker.compat.debugger`: where it stops, and what it shows of a stack."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nbdist.output.ansi import strip
from nbdist.worker.compat.debugger import own_part
from nbdist.world.world import World

pytestmark = pytest.mark.shared_world(2)


@pytest.fixture
def debug(
    world: World, enter: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs a cell on all ranks, types these lines, and gives what is seen."""

    def run(source: str, *lines: str) -> str:
        enter(*lines)
        world.execute(source)
        return strip(capsys.readouterr().out)

    return run


def test_own_part():
    """What is around the user's calls at both ends is left out, what is between them is not."""
    assert own_part([True, True, False, True, False, True]) == (2, 5)
    assert own_part([False]) == (0, 1)
    assert own_part([True, True]) == (0, 2)


def test_statements_of_a_cell_are_lines(debug: Callable[..., str]) -> None:
    """Stepping goes from one to the next, not into what IPython does between them."""
    source = "if rank == 1: breakpoint()\nx = 1\nx += 1\nx"
    said = debug(source, "n", "n", "n")
    stops = [line.split("---> ")[1] for line in said.splitlines() if "---> " in line]
    assert stops == ["2 x = 1", "3 x += 1", "4 x"]
    assert "Cell In[" in said
    assert said.endswith("ipdb> [1] 2\n")
    assert debug("print('through')") == "[0-1] through\n"


def test_statements_that_await(debug: Callable[..., str]) -> None:
    """They are lines too."""
    source = "import asyncio\nbreakpoint()\nawait asyncio.sleep(0.01)\nx = 5\nx + 1"
    said = debug(source, "n", "n", "n", "-r all c")
    stops = [line.split("---> ")[1] for line in said.splitlines() if "[0] ----> " in line]
    assert stops == ["4 x = 5", "5 x + 1"]
    assert "[0] 6" in said
    assert "StopIteration" not in said


def test_torchs_own_breakpoint(debug: Callable[..., str]) -> None:
    """`torch.distributed.breakpoint` stops on one rank, and the others wait for it."""
    said = debug("dist.breakpoint(1)\nprint('after')", "up", "c")
    assert "[rank 1] ipdb> " in said
    assert "--> 1 dist.breakpoint(1)" in said
    assert said.endswith("[0-1] after\n")


def test_an_exception_is_looked_at(debug: Callable[..., str]) -> None:
    """`%debug` on the ranks begins at the user's innermost call."""
    debug("def f(a):\n    return 1 / a\ntry:\n    f(0)\nexcept ZeroDivisionError:\n"
          "    get_ipython().showtraceback()")  # fmt: skip
    said = debug("%debug", "p a", "q", "p a", "q")
    assert "[0-1] ----> 2     return 1 / a" in said.splitlines()
    assert "[rank 0] ipdb> [0] 0" in said.splitlines()
    assert "[1] 0" in said
