"""Tests of `nbdist.world.result`: what each rank brought back, and how it is found."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest
from IPython.lib.pretty import pretty

from nbdist.errors import UsageError
from nbdist.output.events import Failure, Text
from nbdist.output.transcript import Transcript
from nbdist.wire.task import Call, Task
from nbdist.world.result import CellResult

HOSTS = {0: (socket.gethostname(), 0), 1: ("far", 0), 2: ("far", 1)}
RESULT = CellResult(
    Task("a", (0, 1, 2)), Transcript((0, 1, 2)), 0.5, {}, {0: "a", 1: "b", 2: None}, HOSTS
)


def test_values_come_in_rank_order() -> None:
    """By rank, and one after the other; None is a value like any other."""
    assert (RESULT.rank(1), RESULT.rank(2)) == ("b", None)
    assert (list(RESULT), len(RESULT), RESULT.ok) == (["a", "b", None], 3, True)
    assert (RESULT[0], dict(RESULT)) == ("a", {0: "a", 1: "b", 2: None})
    assert ([*RESULT.keys()], [*RESULT.values()]) == ([0, 1, 2], ["a", "b", None])


def test_it_shows_its_values() -> None:
    """Those that were asked for, as much as fits into a line, or pretty in a notebook."""
    assert repr(RESULT) == "<CellResult of ranks 0-2, ok>"
    asked = replace(RESULT, task=Task("a", (0, 1, 2), Call("call")))
    assert repr(asked) == "<CellResult of ranks 0-2, ok: {0: 'a', 1: 'b', 2: None}>"
    assert pretty(asked, max_width=40) == (
        "<CellResult of ranks 0-2, ok:\n{0: 'a', 1: 'b', 2: None}>"
    )
    long = repr(replace(asked, by_rank={0: "x" * 5000}))
    assert long.endswith("more characters>")
    assert len(long) < 2100


def test_what_ranks_have_written() -> None:
    """A text for each rank and stream, as a terminal would show it."""
    said = Transcript((0, 1))
    for output in (Text("stdout", "50%\r100%\nend\n"), Text("stderr", "\x1b[31mbad\x1b[0m\n")):
        said.receive(1, output, 0.0)
    result = replace(RESULT, transcript=said)
    assert result.stdout == {0: "", 1: "100%\nend\n"}
    assert result.stderr[1] == "bad\n"


def test_a_rank_by_its_machine() -> None:
    """`localhost` is the notebook's own machine, which has a name too."""
    assert RESULT.index("far", 1) is None
    assert RESULT.index("far", local_rank=0) == "b"
    assert RESULT.index("localhost", 0) == RESULT.index(socket.gethostname(), 0) == "a"


@pytest.mark.parametrize("asked", [("elsewhere", 0), ("far", 2), ("localhost", 1)])
def test_a_rank_that_is_not_there(asked: tuple[str, int]) -> None:
    """One line says which there are."""
    host, number = asked
    there = ", ".join(f"{name} {local}" for name, local in HOSTS.values())
    with pytest.raises(UsageError) as caught:
        RESULT.index(*asked)
    assert str(caught.value) == f"No result of local rank {number} on {host}; there are {there}."


def test_a_rank_that_failed() -> None:
    """It has an error and no value: neither by its number nor by its machine."""
    failure = Failure("ValueError", "bad", (), 5)
    failed = CellResult(RESULT.task, RESULT.transcript, 0.5, {1: failure}, {0: 5}, HOSTS)
    assert (failed.ok, list(failed)) == (False, [5])
    assert repr(failed) == "<CellResult of ranks 0-2, failed on rank 1>"
    with pytest.raises(KeyError):
        failed.rank(1)
    with pytest.raises(UsageError):
        failed.index("far", 0)
