"""Tests of `nbdist.worker.control`: a worker answers requests, whatever its task does."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from collections import deque
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nbdist.output.events import Failure
from nbdist.wire import control
from nbdist.wire.control import Complete, Completions, Description, Inspect, TypingQuestion
from nbdist.wire.frames import FrameCutter, framed, pack
from nbdist.world import dispatch, inbox
from nbdist.world.hangs import RELEASED_ERROR
from nbdist.world.world import World
from tests.waiting import SOON, wait_until
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world(2)


class Asker:
    """A further client of a rank's control thread, beside its agent."""

    def __init__(self, rank: int) -> None:
        (path,) = Path(os.environ["XDG_RUNTIME_DIR"]).glob(f"nbdist-*/*r{rank}.tasks")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(SOON)
        self._socket.connect(str(path))
        self._cutter = FrameCutter()
        self._frames: deque[Any] = deque()

    def ask(self, request: control.ControlRequest) -> control.ControlReply:
        self.send(7, request)
        number, answer = self.receive()
        assert number == 7
        return answer

    def send(self, number: int, request: control.ControlRequest) -> None:
        self._socket.sendall(framed(pack((number, request))))

    def receive(self) -> tuple[int, control.ControlReply]:
        """Return the next answer, with the number of its request."""
        while not self._frames:
            data = self._socket.recv(1 << 16)
            assert data, "the connection was closed"
            self._frames.extend(self._cutter.feed(data))
        return control.answer_from(self._frames.popleft())

    def close(self) -> None:
        self._socket.close()


def test_a_worker_without_a_group_answers(new_world: NewWorld) -> None:
    """A worker of `--backend none` lists no groups, and answers requests about a group with Ok."""
    with new_world(1, backend="none") as w, closing(Asker(0)) as alone:
        assert alone.ask(control.ListGroups()) == control.HeldGroups(0, 1, {})
        asks = (
            control.LastCollective(),
            control.AbortCollectives(),
            control.Regroup(2, {}, w.engine.rank_table.spec, {}),
        )
        assert {*map(alone.ask, asks)} == {control.Ok()}


def test_aborting_a_collective_ends_its_wait(world: World) -> None:
    """Aborting a collective ends the rank's wait with an error; healing forms the group again."""
    world.execute("pass")
    with closing(Asker(1)) as rank1:
        assert rank1.ask(control.Check()) == ()
        running = world.submit(world.task("dist.barrier()", ranks=[1]))
        while not rank1.ask(control.LocateMainThread()).operation:
            inbox.receive(world.engine, 0.01)
        assert rank1.ask(control.AbortCollectives()) == control.Ok()
        dispatch.wait(world.engine, running)
        (error,) = running.transcript.errors.values()
        assert isinstance(error, Failure)
        assert error.name == RELEASED_ERROR
        dispatch.make_whole(world.engine)
        assert rank1.ask(control.LastCollective()) == control.Ok()
    world.execute("dist.barrier()")


def test_a_debugger_that_waits_for_the_last_one_delays_no_other_request(world: World) -> None:
    """A second debugger starts once the first has given up; other requests are answered before."""
    world.execute("pass")
    with closing(Asker(1)) as rank1, tempfile.TemporaryDirectory() as folder:
        start = control.StartDebugger(f"{folder}/debugger")
        assert rank1.ask(start) == control.Ok()
        rank1.send(1, start)
        rank1.send(2, control.ListGroups())
        answers = dict([rank1.receive(), rank1.receive()])
        assert [*answers] == [2, 1]
        assert answers[1] == control.Ok()


# --- questions of a front end --------------------------------------------------------------


def ask(world: World, question: TypingQuestion, *ranks: int) -> Completions | Description:
    """Ask again until an answer comes in time, and return the answer; fail after SOON seconds."""
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline:
        if answer := answered(world, question, *ranks):
            return answer
    raise AssertionError(f"no answer within {SOON} s")


def answered(world: World, question: TypingQuestion, *ranks: int) -> Any:
    asked = world.engine.consult(question, ranks or (0, 1))
    assert asked is not None
    return asked.result(SOON)


def texts(world: World, code: str, *ranks: int) -> set[str]:
    answer = ask(world, Complete(code, len(code)), *ranks)
    assert isinstance(answer, Completions)
    return {each.text for each in answer.candidates}


def test_an_idle_rank_answers_for_a_busy_one(world: World, tmp_path: Path) -> None:
    """While rank 0 is busy, rank 1 completes and describes names, with jedi once it is imported."""
    gate = tmp_path / "gate"
    world.execute("import pathlib, time, torch.nn as nn\nmine, layer = rank + 5, nn.Linear(1, 1)")
    wait = f"while not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.01)"
    running = world.submit(world.task(wait, ranks=[0]))
    try:
        assert "mine" in texts(world, "mi")
        assert "weight" in texts(world, "layer.we")
        told = ask(world, Inspect("mine", 4))
        assert isinstance(told, Description)
        kind, value, *_, last = told.data["text/plain"].splitlines()
        assert (kind.split()[-1], value.split()[-1], last) == ("int", "6", "Rank:      1")
        wait_until(lambda: "weight" in texts(world, "nn.Linear(1, 1).wei"))
        assert answered(world, Complete("mi", 2), 0) is None
    finally:
        gate.touch()
    dispatch.wait(world.engine, running)
    dispatch.check(world.engine, running)


SLOW = """
import os, pathlib, time
class Slow:
    def __repr__(self):
        while not pathlib.Path({gate!r}).exists():
            time.sleep(0.01)
        return "slow"
slow, pid = Slow(), os.getpid()
"""


def test_another_rank_answers_for_a_slow_rank(world: World, tmp_path: Path) -> None:
    """A slow or paused rank gives no answer; if all ranks are asked, another rank answers."""
    gate = tmp_path / "gate"
    pids = world.execute(SLOW.format(gate=str(gate)), fetch=("pid",))
    try:
        assert answered(world, Inspect("slow", 4), 0) is None
        assert answered(world, Complete("sl", 2), 0) is None
        assert "slow" in texts(world, "sl")  # by rank 1
    finally:
        gate.touch()
    assert "slow" in texts(world, "sl", 0)
    os.kill(pids[0], signal.SIGSTOP)
    try:
        assert answered(world, Complete("sl", 2), 0) is None
        assert "slow" in texts(world, "sl")
    finally:
        os.kill(pids[0], signal.SIGCONT)
