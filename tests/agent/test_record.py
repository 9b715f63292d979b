"""Tests of `nbdist.agent.outbox`: what the next notebook is told, by what the one before was."""

from __future__ import annotations

from typing import Any

import pytest

from nbdist.agent.outbox import WorldRecord
from nbdist.output.events import Died, Display, Done, Failure, InputRequest, Output, Text
from nbdist.values.payload import Payload, SegmentRef
from nbdist.wire.messages import (
    Aborted,
    Answer,
    Ask,
    Came,
    Enter,
    GetStatus,
    Grow,
    Heal,
    Healed,
    LetGo,
    Outputs,
    Remember,
    Run,
    Scale,
    StartFailure,
    StartWorld,
    StopWorld,
    WorldStarted,
)
from nbdist.wire.spec import WorldSpec
from nbdist.wire.work import InputReply


def spec(size: int = 2) -> WorldSpec:
    return WorldSpec(size, "gloo", {}, "/", (), 1, "python", name="exp")


STARTED = WorldStarted({0: 10, 1: 11}, {0: "", 1: ""})


class Lab:
    """A record, and the messages that it is fed with."""

    def __init__(self, *, detach: bool = True) -> None:
        self.record = WorldRecord()
        self._calls = 0
        self.record.take_down(Remember({"detach": detach}))
        self.ask(StartWorld(spec()), STARTED)

    def ask(self, request: Any, reply: Any = None) -> None:
        self._calls += 1
        self.record.take_down(Ask(self._calls, request))
        if reply is not None or isinstance(request, StopWorld):
            self.record.take_up(Answer(self._calls, reply))

    def run(self, name: str = "task") -> None:
        self.record.take_down(Run(name, (0, 1), b""))

    def say(self, rank: int, output: Output, name: str = "task") -> None:
        self.record.take_up(Outputs(((rank, name, output),)))

    @property
    def said(self) -> list[Any]:
        return [(rank, o) for batch in self.record.again() for rank, _, o in batch.items]


@pytest.fixture
def lab() -> Lab:
    return Lab()


def test_a_world_that_is_ready(lab: Lab) -> None:
    """Its processes, and the number of the next call: answers to old ones are for nobody."""
    lab.record.take_down(Ask(7, GetStatus()))
    there = lab.record.attached(0.0)
    assert (there.pids, there.spec, there.run) == (STARTED.pids, spec(), None)
    assert there.next_call == 8
    assert (there.is_whole, there.dead, lab.said) == (True, {}, [])
    assert lab.record.state == "ready"


def test_a_cell_that_runs(lab: Lab) -> None:
    """All that it has shown so far, also what the notebook before has seen."""
    lab.run()
    lab.say(0, Text("stdout", "one"))
    lab.record.seen()
    lab.say(1, Text("stdout", "two"))
    assert lab.said == [(0, Text("stdout", "one")), (1, Text("stdout", "two"))]
    there = lab.record.attached(0.0)
    assert there.run == Run("task", (0, 1), b"")
    assert there.started > 0
    assert lab.record.state == "busy"


def test_a_cell_that_nobody_saw_end(lab: Lab) -> None:
    """Is there with its end, and when that was."""
    lab.run()
    for rank in (0, 1):
        lab.say(rank, Done("ok", 1.0, frozenset({"x"})))
    there = lab.record.attached(0.0)
    assert there.run is not None
    assert there.ended.keys() == {0, 1}
    assert there.bound == {0: {"x": None}, 1: {"x": None}}
    assert there.forgotten == 0


def test_a_cell_that_was_seen_to_its_end(lab: Lab) -> None:
    """Is none that anybody has missed; what it has bound is there."""
    lab.run()
    for rank in (0, 1):
        lab.say(rank, Done("ok", 1.0, frozenset({"np"}), {"np": "numpy"}))
    lab.record.seen()
    there = lab.record.attached(0.0)
    assert (there.run, lab.said, there.forgotten) == (None, [], 1)
    assert there.bound[0] == {"np": "numpy"}
    lab.run("next")
    lab.say(0, Done("ok", 1.0, gone=frozenset({"np"})), "next")
    assert lab.record.attached(0.0).bound[0] == {}


def test_ranks_that_died(lab: Lab) -> None:
    """Are dead until they are replaced, and their names gone with them."""
    lab.run()
    lab.say(0, Done("ok", 1.0, frozenset({"x"})))
    lab.say(1, Died(-9, 1, pid=11))
    lab.record.seen()
    assert lab.record.state == "broken"
    assert lab.record.attached(0.0).dead.keys() == {1}
    lab.ask(Heal(), Healed({0: 10, 1: 12}, {0: "", 1: ""}))
    there = lab.record.attached(0.0)
    assert (there.dead, there.pids) == ({}, {0: 10, 1: 12})
    assert there.bound == {0: {"x": None}}


@pytest.mark.parametrize(
    "news", [Aborted({}), Outputs(((0, "t", Failure("E", "", (), 1, (), "ended")),))]
)
def test_collectives_that_were_aborted(lab: Lab, news: Any) -> None:
    """The group is to be formed anew, until it has been."""
    lab.record.take_up(news)
    assert not lab.record.attached(0.0).is_whole
    lab.ask(Heal(), Healed(STARTED.pids, STARTED.logs))
    assert lab.record.attached(0.0).is_whole


def test_more_workers(lab: Lab) -> None:
    """The spec is that of those that there are."""
    lab.ask(Scale(spec(3), (0, 1)), Healed({0: 10, 1: 11, 2: 12}, {}))
    assert lab.record.attached(0.0).spec == spec(3)
    lab.ask(Scale(spec(4), (0, 1, 2)), Healed({0: 10, 1: 11, 2: 12}, {}, not_scaled="no room"))
    assert lab.record.attached(0.0).spec == spec(3)


def test_machines_that_have_come(lab: Lab) -> None:
    """Are told to the next notebook, until the world has taken them in."""
    lab.record.take_up(Came("node3"))
    assert lab.record.attached(0.0).came == ("node3",)
    lab.ask(Grow(), Healed({0: 10, 1: 11, 2: 12}, {}, spec=spec(3)))
    there = lab.record.attached(0.0)
    assert (there.came, there.spec) == ((), spec(3))


def test_what_workers_become(lab: Lab) -> None:
    """While they start there is a world; once they were stopped, or could not, there is none."""
    lab.ask(StopWorld(1.0))
    assert not lab.record.has_world
    lab.ask(StartWorld(spec()))
    assert (lab.record.has_world, lab.record.changes) == (True, True)
    lab.record.take_up(Answer(3, StartFailure(0, "", "", "", ())))
    assert (lab.record.has_world, lab.record.changes) == (False, False)


def test_prompts_that_were_answered(lab: Lab) -> None:
    """Are not asked again."""
    lab.run()
    lab.say(0, InputRequest(1, "? "))
    lab.record.take_down(Enter(0, InputReply(1, "yes")))
    assert lab.said == []


def test_values_that_nobody_will_read(lab: Lab) -> None:
    """Are let go of, but for those of a task that the next notebook sees to its end."""
    lent = Payload(segment=SegmentRef("/proc/1/fd/2#3", (1,)))
    lab.run("gather")
    lab.say(0, Done("ok", 1.0, values=lent), "gather")
    assert lab.record.unread() == []
    lab.run("next")
    assert lab.record.unread() == [LetGo("gather", (0,))]
    assert lab.record.unread() == []


def test_a_world_that_ends_with_its_notebook() -> None:
    """Keeps nothing of what was shown."""
    lab = Lab(detach=False)
    lab.run()
    lab.say(0, Text("stdout", "one"))
    assert lab.said == []


def test_batches_are_bounded(lab: Lab) -> None:
    """Many outputs come in several."""
    lab.run()
    for rank in (0, 1, 0, 1):
        lab.say(rank, Display({"image/png": "x" * (5 << 20)}, {}))
    assert len(lab.record.again()) == 2
    assert len(lab.said) == 4
