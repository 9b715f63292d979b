"""Tests of `nbdist.notebook.outcome`: how the last failure is told."""

from __future__ import annotations

import time

import pytest

from nbdist.config import Patience
from nbdist.errors import WorkerDied
from nbdist.notebook.outcome import Why, idle_end, why_died, why_of
from nbdist.output.events import IGNORES_STOP, Died, Text
from nbdist.wire.work import Source, Task
from nbdist.world.running import Crew, RunningTask
from nbdist.world.states import Machines
from tests.output.lab import Panel


def test_both_forms() -> None:
    """HTML and text say the same, the text without colours."""
    why = Why("12:00:00 · rank 1", "\x1b[31mKeyError\x1b[0m: 'x'", ("rank 0: Freed",), "1.log")
    lines = ["12:00:00 · rank 1", "KeyError: 'x'", "rank 0: Freed", "all of its lines: 1.log"]
    assert why.shown.text.split("\n") == lines
    assert Panel(why.shown.html).lines == lines


@pytest.mark.parametrize(
    ("died", "end"),
    [
        (Died(-9, 1), "was killed by SIGKILL while no cell was running"),
        (Died(3, 1, why="it left"), "exited with code 3 while no cell was running: it left"),
        (Died(-9, 1, why=IGNORES_STOP), "ignored Stop and was killed"),
    ],
)
def test_ends_of_idle_ranks(died: Died, end: str) -> None:
    """How, and why where that is known; one that was stopped had a cell before."""
    assert idle_end(died) == end


def test_a_rank_whose_machine_is_lost() -> None:
    """Of its end nobody has said anything: its last lines are those that were shown."""
    crew = Crew(1, "gloo", Machines.one("node1", 1), {0: 4711}, {}, True)  # noqa: FBT003
    running = RunningTask(Task("id", (0,), Source("print(1)")), Patience(), crew)
    running.receive(0, Text("stdout", "loading shards\nepoch 7\n"))
    running.receive(0, Died(None, time.time_ns(), why="its machine counts as lost"))
    error = running.error()
    assert isinstance(error, WorkerDied)
    why = why_of(running, error, {})
    assert why is not None
    assert why.body == "its last lines:\nloading shards\nepoch 7"


def test_a_rank_that_died() -> None:
    """Who, where, how, and its last lines, or that there are none."""
    why = why_died(2, "node1", Died(-11, 1, 4711, ("Fatal error", "stack")), "2.log")
    assert "rank 2 on node1 (pid 4711)" in why.title
    assert why.title.endswith("the process was killed by SIGSEGV while no cell was running")
    assert why.shown.text.split("\n")[1:] == [
        "its last lines:",
        "Fatal error",
        "stack",
        "all of its lines: 2.log",
    ]
    assert why_died(2, "node1", Died(1, 1), "").body == "it had printed nothing"
