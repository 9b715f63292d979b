"""Tests of `nbdist.worker.control`: who answers, and that nobody waits for it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from nbdist.wire.control import Complete, Completions, Description, Inspect, Question
from nbdist.world.world import World
from tests.waiting import SOON

pytestmark = pytest.mark.shared_world(2)


SLOW = """
import pathlib, time
class Slow:
    quick = 1
    def __repr__(self):
        while not pathlib.Path({gate!r}).exists():
            time.sleep(0.01)
        return "slow"
slow = Slow()
"""


def ask(world: World, question: Question, *ranks: int) -> Completions | Description:
    """The first answer that comes in time; on a busy machine a rank may take too long."""
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline:
        asked = world.session.consult(question, ranks or (0, 1))
        assert asked is not None
        if isinstance(answer := asked.result(SOON), Completions | Description):
            return answer
    raise AssertionError(f"no answer within {SOON} s")


def texts(world: World, code: str, *ranks: int) -> set[str]:
    answer = ask(world, Complete(code, len(code)), *ranks)
    assert isinstance(answer, Completions)
    return {each.text for each in answer.candidates}


def until_there(world: World, text: str, code: str, *ranks: int) -> None:
    """Until jedi, which has much to read at first, knows it: longer than an answer takes."""
    deadline = time.monotonic() + SOON
    while text not in texts(world, code, *ranks):
        assert time.monotonic() < deadline


def test_of_an_idle_rank(world: World) -> None:
    """IPython answers, who follows what an expression gives."""
    world.execute("import torch.nn as nn")
    world.execute("import sys\nlimit = sys.getrecursionlimit()\nmine = 1", ranks=[1])
    until_there(world, "weight", "nn.Linear(1, 1).wei", 1)
    as_before = "(sys.getrecursionlimit() == limit, 'jedi' in sys.modules)"
    assert world.gather(as_before, ranks=[1]) == [(True, True)]
    assert "mine" in texts(world, "mi", 1)
    assert "mine" not in texts(world, "mi", 0)
    told = ask(world, Inspect("nn.Linear(", 10))
    assert isinstance(told, Description)
    assert "in_features" in told.data["text/plain"]


def test_an_idle_one_is_asked_first(world: World, tmp_path: Path) -> None:
    """Here rank 1, while rank 0 runs a cell; of rank 0 alone what is there is told."""
    gate = tmp_path / "gate"
    world.execute(SLOW.format(gate=str(gate)) + "mine = rank\nimport torch.nn as nn")
    running = world.submit(world.task("str(slow)", ranks=[0]))
    try:
        until_there(world, "weight", "nn.Linear(1, 1).wei")
        assert "quick" in texts(world, "slow.qu", 0)
        assert texts(world, "nn.Linear(1, 1).wei", 0) == set()
        told = ask(world, Inspect("mine", 4), 0)
        assert isinstance(told, Description)
        assert told.data["text/plain"].splitlines()[:2] == ["Type:      int", "Value:     0"]
        assert told.data["text/plain"].endswith("\nRank:      0")
    finally:
        gate.touch()
        world.session.wait(running)
    world.session.check(running)


def test_users_code_that_takes_long(world: World, tmp_path: Path) -> None:
    """The answer comes without it, cells run meanwhile, and so does the next question."""
    gate = tmp_path / "gate"
    world.execute(SLOW.format(gate=str(gate)))
    try:
        told = ask(world, Inspect("slow", 4), 0)  # IPython waits for its `repr`
        assert isinstance(told, Description)
        assert told.data["text/plain"] == "Type:      Slow\nRank:      0"
        assert "quick" in texts(world, "slow.qu", 0)
        assert [*world.execute("rank + 1", fetch=("rank",))] == [0, 1]
    finally:
        gate.touch()


def test_a_rank_that_holds_the_gil(world: World, tmp_path: Path) -> None:
    """The other one answers; where there is none, nobody does, within a second."""
    fifo = tmp_path / "fifo"
    world.execute(f"import ctypes, os\nos.path.exists({str(fifo)!r}) or os.mkfifo({str(fifo)!r})",
                  ranks=[0])  # fmt: skip
    world.execute(f"gate = os.open({str(fifo)!r}, os.O_RDWR)\nmine = 1", ranks=[0])
    world.execute("mine = 1", ranks=[1])
    held = "ctypes.PyDLL(None).read(gate, ctypes.create_string_buffer(1), 1)"
    running = world.submit(world.task(held, ranks=[0]))
    try:
        assert "mine" in texts(world, "mi")
        asked = world.session.consult(Complete("mi", 2), (0,))
        assert asked is not None
        assert asked.result(SOON) is None
    finally:
        fifo.write_bytes(b"x")
        world.session.wait(running)


def test_without_workers() -> None:
    """There is nobody to ask."""
    assert World(2).session.consult(Complete("x", 1), (0, 1)) is None
