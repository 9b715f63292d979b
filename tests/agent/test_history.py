"""Tests of `nbdist.agent.history`: which task failed last, where, and with what."""

from __future__ import annotations

import signal

from nbdist.agent.history import LONGEST_LINE, MOST_LINES, WITH_LINES, History
from nbdist.output.events import Died, Failure, Output
from nbdist.wire.frames import pack
from nbdist.wire.messages import Abort, Located, Outputs, Run
from nbdist.wire.views import Findings, Place, from_line, to_line
from nbdist.wire.work import Source, Task

BAD = Failure("ValueError", "bad shard", ("a\n" * 100 + "b" * 1000,), 7)


def run(number: int, *ranks: int) -> Run:
    task = Task(f"task{number}", ranks, Source(f"x = {number}"), execution_count=number)
    return Run(task.id, ranks, pack(task))


def test_the_last_failure() -> None:
    """Stays known while later tasks end well; of a task that nobody ran late words are dropped."""
    history = History()
    assert (history.last, history.failed) == (None, None)
    history.take_down(run(1, 0, 1), 2)
    history.take_up(Outputs(((1, "task1", BAD),)))
    history.take_down(run(2, 0, 1), 2)
    history.take_up(Outputs(((0, "task1", BAD),)))
    last, failed = history.last, history.failed
    assert last is not None
    assert failed is not None
    assert (last.cell, last.title, last.troubles) == (2, "x = 2", ())
    assert (failed.cell, failed.ranks, failed.size) == (1, (0, 1), 2)
    (trouble,) = failed.troubles
    assert (trouble.rank, trouble.name, trouble.message) == (1, "ValueError", "bad shard")
    assert len(trouble.lines) == MOST_LINES
    assert max(map(len, trouble.lines)) == LONGEST_LINE
    # As it crosses the socket.
    found = Findings(last=last, failed=failed)
    assert from_line(to_line(found)) == found


def test_a_death_after_a_task() -> None:
    """Is told of apart from one in it; of very many ranks the first have lines."""
    history = History()
    ranks = tuple(range(WITH_LINES + 2))
    history.take_down(run(1, *ranks), len(ranks))
    died: Output = Died(-signal.SIGKILL, 9, 123, ("bye",))
    history.take_up(Outputs(tuple((rank, "", died) for rank in ranks)))
    assert history.failed is not None
    troubles = history.failed.troubles
    assert all(each.is_idle for each in troubles)
    assert [bool(each.lines) for each in troubles] == [True] * WITH_LINES + [False, False]


def test_where_ranks_were_released() -> None:
    """Those that a notebook has found in a collective before it aborted that."""
    history = History()
    history.take_down(run(1, 0, 1), 2)
    history.take_up(Located({0: Place(line=2, operation="barrier"), 1: Place()}))
    history.take_down(Abort((0, 1)), 2)
    assert history.last is not None
    assert [each.rank for each in history.last.aborted] == [0]
    assert [each.rank for each in history.last.places] == [0, 1]
