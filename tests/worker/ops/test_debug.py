"""Tests of `nbdist.worker.ops.call`: a rank's last exception, as long as it keeps it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nbdist.errors import WorkerError
from nbdist.output.ansi import strip
from nbdist.world.world import World

pytestmark = pytest.mark.shared_world(2)

HOLDS = """
import weakref
def fails(x):
    tensor = torch.ones(x)
    global left
    left = weakref.ref(tensor)
    raise ValueError("bad")
try:
    fails(3)
except ValueError as error:
    raise KeyError("worse") from error
"""


Look = Callable[..., tuple[list[bool], str]]


@pytest.fixture
def look(world: World, enter: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> Look:
    """Debugs rank 1 post mortem, with these lines; whether it could, and what was seen."""

    def run(*lines: str) -> tuple[list[bool], str]:
        enter(*lines)
        capsys.readouterr()
        return [*world.call("call.debug", ranks=[1])], strip(capsys.readouterr().out)

    return run


def test_where_it_came_from(world: World, look: Look) -> None:
    """As often as one likes, until something else has failed, or `clean` released it."""
    assert look() == ([False], "")
    with pytest.raises(WorkerError):
        world.execute(HOLDS)
    for _ in range(2):
        found, said = look("where", "q")
        assert found == [True]
        assert said.splitlines()[0] == "[1] KeyError: 'worse'"
        assert "raise KeyError" in said
        assert "nbdist/worker" not in said
    world.execute("import gc; _ = gc.collect()")
    assert world.gather("left() is None") == [False, False]
    world.clean()
    assert world.gather("left() is None") == [True, True]
    assert look() == ([False], "")


def test_also_of_a_script(world: World, look: Look, write: Callable[..., Path]) -> None:
    """In the script's own lines."""
    script = write("train.py", "def step(n):\n    return 1 / n\nstep(0)\n")
    with pytest.raises(WorkerError):
        world.run_script(str(script))
    _, said = look("p n", "u", "q")
    assert "[rank 1] ipdb> [1] 0" in said.splitlines()
    assert "train.py(3)<module>()" in said
