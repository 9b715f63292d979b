"""Tests of `nbdist.agent.worker_death`: which reasons of a worker's exit are known."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from nbdist.agent import worker_death
from nbdist.agent.worker_death import WorkerDeath

GLOO = "terminate: [../gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4"


class FakeKills:
    """In place of `OomKills`: reports a lack of memory for each process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def text(self, exit_code: int) -> str:
        return f"{self.pid} exited with {exit_code}"


def test_the_first_reason_of_a_kill_counts() -> None:
    """The output has the first reason that is not empty, and is kept for later tasks."""
    death = WorkerDeath()
    assert (death.is_killed, death.died) == (False, None)
    for why in ("", "it is in the way", "it is late"):
        death.record_kill(why)
    died = death.record_exit(-signal.SIGKILL, 5, ("last",))
    assert (died.exit_code, died.pid, died.last_lines) == (-signal.SIGKILL, 5, ("last",))
    assert (died.why, death.is_killed, death.died) == ("it is in the way", True, died)


@pytest.mark.parametrize(
    ("code", "line", "is_known"),
    [(-signal.SIGABRT, GLOO, True), (-signal.SIGABRT, "", False), (1, GLOO, False)],
)
def test_gloo_ends_a_rank_that_receives_too_much(code: int, line: str, *, is_known: bool) -> None:
    """An abort with a certain line of gloo says that the rank has received too much."""
    assert WorkerDeath().record_exit(code, 5, ("", line)).received_too_much == is_known


async def test_memory_lacked_only_if_the_agent_has_not_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A count of OOM kills explains a death, but none that the agent has caused."""
    monkeypatch.setattr(worker_death, "OomKills", FakeKills)
    monkeypatch.setattr(worker_death, "COUNT_AFTER", 0.01)
    death, pid = WorkerDeath(), os.getpid()
    assert death.oom_text(1) == ""
    death.count_oom_kills_soon(pid)
    death.cancel_count()
    await asyncio.sleep(0.05)
    assert death.oom_text(1) == ""
    death.count_oom_kills_soon(pid)
    await asyncio.sleep(0.05)
    assert death.oom_text(1) == f"{pid} exited with 1"
    death.record_kill("")
    assert death.oom_text(1) == ""
