"""Tests of `nbdist.agent.world_record`: what a next notebook and what assistants learn."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from nbdist.agent.group_formation import Formation
from nbdist.agent.world_record import (
    MAX_RECORD_LINE_LENGTH,
    MAX_RECORD_LINES,
    WITH_LINES,
    WorldRecord,
)
from nbdist.config import WorldConfig
from nbdist.output import events
from nbdist.output.events import Died, Display, Done, Failure, Output, Text
from nbdist.values.payload import Payload, SegmentRef
from nbdist.wire import messages
from nbdist.wire.frames import pack
from nbdist.wire.messages import Outputs
from nbdist.wire.places import RankPosition
from nbdist.wire.queries import Inspection, from_line, to_line
from nbdist.wire.spec import WorldSpec
from nbdist.wire.work import CellCode, InputReply, Task
from nbdist.wire.world_facts import Renumbering, WorldFacts


def spec(size: int = 2) -> WorldSpec:
    return WorldSpec(size, "gloo", {}, "/", (), 1, "python", config=WorldConfig(name="exp"))


def formed(*pids: int, **fields: Any) -> Formation:
    """Return the result of an attempt after which the ranks have these process ids."""
    size, folders = len(pids), dict.fromkeys(range(len(pids)), "")
    change = fields.pop("change", Renumbering.none(size))
    return Formation(spec(size), dict(enumerate(pids)), folders, change, **fields)


DONE = Done("ok", 1.0, frozenset({"x"}))


class Lab:
    """A record of a world that has started, and methods that pass messages to the record."""

    def __init__(self, *, detach: bool = True) -> None:
        self.record = WorldRecord()
        self._calls = 0
        self.record.record_received(messages.HandoverState(WorldConfig(detach=detach)))
        self.ask(messages.StartWorld(spec()))
        self.reply(self.record.record_start(formed(10, 11)))

    def ask(self, request: Any) -> None:
        self._calls += 1
        self.record.record_received(messages.AgentRequest(self._calls, request))

    def reply(self, reply: Any = None) -> None:
        """Answer the last request."""
        self.record.record_sent(messages.AgentReply(self._calls, reply))

    def change(self, request: Any, result: Formation, **facts: Any) -> messages.Healed:
        """Change the world as the notebook requests, and return the answer to the notebook."""
        self.ask(request)
        healed = self.record.record_change(result, **facts)
        self.reply(healed)
        return healed

    def run(self, name: str = "task", *ranks: int, packed: bytes = b"") -> None:
        self.record.record_received(messages.RunTask(name, ranks or (0, 1), packed))

    def begin(self, number: int, *ranks: int) -> None:
        """Run a task whose code the record can read: `task1` is cell 1."""
        task = Task(f"task{number}", ranks, CellCode(f"x = {number}"), execution_count=number)
        self.run(task.id, *ranks, packed=pack(task))

    def say(self, rank: int, output: Output, name: str = "task") -> None:
        self.record.record_sent(Outputs(((rank, name, output),)))

    @property
    def said(self) -> list[Any]:
        return [(rank, o) for batch in self.record.replay_batches() for rank, _, o in batch.items]

    @property
    def there(self) -> messages.Attached:
        return self.record.attached(0.0)


@pytest.fixture
def lab() -> Lab:
    return Lab()


def test_a_world_exists_from_start_to_stop(lab: Lab) -> None:
    """A world exists while its workers start, until the workers stop or fail to start."""
    lab.record.record_received(messages.AgentRequest(7, messages.GetStatus()))
    there = lab.there
    assert there.facts == WorldFacts(spec(), {0: 10, 1: 11}, {0: "", 1: ""})
    # The next call gets a new number: answers to old calls are for nobody.
    assert (there.tasks, there.next_call) == ((), 8)
    assert (lab.said, lab.record.state) == ([], "ready")
    lab.ask(messages.StopWorld(1.0))
    lab.reply()
    assert (lab.record.has_world, lab.record.facts) == (False, WorldFacts(spec()))
    lab.ask(messages.StartWorld(spec()))
    assert (lab.record.has_world, bool(lab.record.pending_calls)) == (True, True)
    lab.record.record_sent(messages.AgentReply(3, messages.StartFailure(0, "", "", "", ())))
    assert (lab.record.has_world, bool(lab.record.pending_calls)) == (False, False)


def test_a_death_before_the_end_of_a_start_counts(lab: Lab) -> None:
    """A rank that dies while other ranks still start counts as dead, and as new after healing."""
    lab.say(0, Died(-9, 0, pid=10), "")
    lab.ask(messages.StartWorld(spec()))
    died = Died(-9, 0, pid=21)
    lab.say(1, died, "")
    lab.reply(lab.record.record_start(formed(20, 21)))
    assert lab.there.facts.dead == {1: died}
    assert lab.change(messages.Heal(), formed(20, 22)).replaced == {1: died}
    lab.ask(messages.StartWorld(spec()))
    lab.reply(lab.record.record_start(formed(30, 21)))  # Linux uses process ids again
    assert lab.there.facts.dead == {}


def test_an_unfinished_cell_is_replayed_whole(lab: Lab) -> None:
    """All outputs of a running cell are replayed, even acknowledged ones, and its end is known."""
    lab.run()
    lab.say(0, Text("stdout", "one"))
    lab.record.mark_all_acknowledged()
    lab.say(1, Text("stdout", "two"))
    assert lab.said == [(0, Text("stdout", "one")), (1, Text("stdout", "two"))]
    (task,) = lab.there.tasks
    assert task.run == messages.RunTask("task", (0, 1), b"")
    assert task.started > 0
    assert lab.record.state == "busy"
    for rank in (0, 1):
        lab.say(rank, DONE)
    assert lab.there.tasks[0].ended.keys() == {0, 1}
    assert (lab.there.bound, lab.there.forgotten) == ({0: {"x": None}, 1: {"x": None}}, 0)


def test_a_finished_cell_is_not_replayed(lab: Lab) -> None:
    """A cell whose end was acknowledged is not replayed; the names that it bound are known."""
    lab.run()
    for rank in (0, 1):
        lab.say(rank, Done("ok", 1.0, frozenset({"np"}), {"np": "numpy"}))
    lab.record.mark_all_acknowledged()
    assert (lab.there.tasks, lab.said, lab.there.forgotten) == ((), [], 1)
    assert lab.there.bound[0] == {"np": "numpy"}
    lab.run("next")
    lab.say(0, Done("ok", 1.0, gone=frozenset({"np"})), "next")
    assert lab.there.bound[0] == {}


def test_tasks_side_by_side_are_replayed_until_each_has_finished(lab: Lab) -> None:
    """Each of two tasks has its own outputs; the end of the shorter task forgets only this task."""
    lab.begin(2, 0)
    lab.say(0, Text("stdout", "a"), "task2")
    lab.run("cell", 1)
    lab.say(1, Text("stdout", "b"), "cell")
    lab.say(0, Text("stdout", "c"), "task2")
    assert [task.run.id for task in lab.there.tasks] == ["task2", "cell"]
    assert lab.said == [(0, Text("stdout", "ac")), (1, Text("stdout", "b"))]
    lab.say(1, DONE, "cell")
    assert [[*task.ended] for task in lab.there.tasks] == [[], [1]]
    lab.record.mark_all_acknowledged()
    assert [task.run.id for task in lab.there.tasks] == ["task2"]
    assert (lab.said, lab.record.running_ranks) == ([(0, Text("stdout", "ac"))], {0})
    assert (lab.record.state, lab.there.forgotten) == ("busy", 1)
    lab.begin(3, 1)
    lab.say(0, Died(-9, 1, pid=10), "task2")
    assert (lab.record.running_ranks, [*lab.there.facts.dead]) == ({1}, [0])
    found = lab.record.tasks
    assert (found.last.ranks, found.failed.ranks, found.failed.troubles[0].rank) == ((1,), (0,), 0)


def test_dead_ranks_stay_dead_until_replaced(lab: Lab) -> None:
    """Ranks are dead until new processes replace their workers, and their names are forgotten."""
    lab.run()
    lab.say(0, DONE)
    lab.say(1, DONE)
    died = Died(-9, 1, pid=11)
    lab.say(1, died)
    lab.record.mark_all_acknowledged()
    assert (lab.record.state, [*lab.there.facts.dead]) == ("broken", [1])
    failed = lab.change(messages.Heal(), formed(10, 12, problem="no"))
    assert (failed.facts.dead, failed.replaced, failed.facts.problem) == ({1: died}, {}, "no")
    healed = lab.change(messages.Heal(), formed(10, 13), hosts={0: "a", 1: "b"}, rejoin_hint="come")
    assert (healed.facts, healed.replaced) == (lab.there.facts, {1: died})
    assert healed.facts == WorldFacts(
        *(spec(), {0: 10, 1: 13}, {0: "", 1: ""}, {0: "a", 1: "b"}), rejoin_hint="come"
    )
    assert (lab.there.bound, lab.record.state) == ({0: {"x": None}}, "ready")


def test_a_new_worker_that_dies_at_once_breaks_the_group(lab: Lab) -> None:
    """A group is not whole if a rank of it has died before the answer, and no rank is replaced."""
    lab.say(0, Died(-9, 1, pid=10))
    lab.say(1, again := Died(-9, 1, pid=12))
    healed = lab.change(messages.Heal(), formed(13, 12))
    assert (healed.facts.is_whole, healed.facts.problem) == (False, "rank 1 died again")
    assert ([*healed.facts.dead], healed.facts.dead[1], healed.replaced) == ([0, 1], again, {})
    assert lab.record.state == "broken"
    assert [*lab.change(messages.Heal(), formed(13, 14)).replaced] == [0, 1]


def test_deaths_and_names_follow_the_numbers_of_ranks(lab: Lab) -> None:
    """Ranks keep their names under new numbers; a number's death is not its next rank's death."""
    lab.change(messages.Scale(spec(3), (0, 1)), formed(10, 11, 12))
    lab.run("task", 0, 1, 2)
    for rank in range(3):
        lab.say(rank, Done("ok", 1.0, frozenset({f"x{rank}"})))
    lab.say(1, Died(-9, 1, pid=11))
    healed = lab.change(messages.Heal(), formed(10, 12, change=Renumbering(3, 2, {0: 0, 2: 1})))
    assert (healed.facts.dead, healed.replaced, healed.change.moved) == ({}, {}, {2: 1})
    assert lab.there.bound == {0: {"x0": None}, 1: {"x2": None}}


@pytest.mark.parametrize(
    "news", [messages.Aborted({}), Outputs(((0, "t", Failure("E", "", (), 1, (), "ended")),))]
)
def test_an_aborted_group_is_broken_until_a_heal(lab: Lab, news: Any) -> None:
    """After an abort the group is not whole until it has been formed again."""
    lab.record.record_sent(news)
    assert not lab.there.facts.is_whole
    lab.change(messages.Heal(), formed(10, 11))
    assert lab.there.facts.is_whole


def test_a_record_follows_the_size_of_its_world(lab: Lab) -> None:
    """Only a successful scale changes the spec; a machine that has joined is listed until used."""
    scaled = lab.change(messages.Scale(spec(4), (0, 1)), formed(10, 11, not_scaled="no"))
    assert (lab.there.facts.spec, scaled.not_scaled) == (spec(), "no")
    grown = Renumbering(2, 3, {0: 0, 1: 1})
    lab.change(messages.Scale(spec(3), (0, 1)), formed(10, 11, 12, change=grown))
    assert lab.there.facts.spec == spec(3)
    for host in ("node3", "node3"):
        lab.record.record_sent(messages.NodeJoined(host))
    assert lab.there.facts.joined == ("node3",)
    lab.ask(messages.Grow())
    lab.record.record_sent(messages.NodeJoined("node4"))  # too late for this request
    lab.reply(lab.record.record_change(formed(10, 11, 12, 13)))
    assert (lab.there.facts.joined, lab.there.facts.spec) == (("node4",), spec(4))


def test_answered_prompts_and_unread_values_are_dropped(lab: Lab) -> None:
    """Answered prompts are not replayed, and values that nobody will read are released.

    Values of the last task are kept, since the next notebook may see its end.
    """
    lab.run("gather")
    lab.say(0, events.InputRequest(1, "? "), "gather")
    lab.record.record_received(messages.SendInput(0, InputReply(1, "yes")))
    assert lab.said == []
    lent = SegmentRef("/proc/1/fd/2#3", (1,))
    for rank, values in enumerate([Payload(segment=lent), Payload(within=((lent.path, lent),))]):
        lab.say(rank, Done("ok", 1.0, values=values), "gather")
    assert lab.record.pop_unreleased_values() == []
    lab.run("next")
    assert lab.record.pop_unreleased_values() == [messages.ReleaseRankValues("gather", (0, 1))]
    assert lab.record.pop_unreleased_values() == []


def test_outputs_are_kept_only_for_a_next_notebook(lab: Lab) -> None:
    """Many outputs come in several batches; a world that ends with its notebook keeps none."""
    lab.run()
    for rank in (0, 1, 0, 1):
        lab.say(rank, Display({"image/png": "x" * (5 << 20)}, {}))
    assert (len(lab.record.replay_batches()), len(lab.said)) == (2, 4)
    lab = Lab(detach=False)
    lab.run()
    lab.say(0, Text("stdout", "one"))
    assert lab.said == []


BAD = Failure("ValueError", "bad shard", ("a\n" * 100 + "b" * 1000,), 7)


def test_the_last_failure_stays_known(lab: Lab) -> None:
    """The last failure stays known during later tasks; late outputs of old tasks are dropped.

    If a notebook aborts collectives, the task's record has the places of all ranks, and the ranks
    whose collective was aborted.
    """
    assert lab.record.tasks == Inspection()
    lab.begin(1, 0, 1)
    lab.say(1, BAD, "task1")
    lab.begin(2, 0, 1)
    lab.say(0, BAD, "task1")
    lab.record.record_sent(
        messages.Located({0: RankPosition(line=2, operation="barrier"), 1: RankPosition()})
    )
    lab.record.record_received(messages.AbortRanks((0, 1)))
    found = lab.record.tasks
    last, failed = found.last, found.failed
    assert (last.cell, last.title, last.troubles) == (2, "x = 2", ())
    assert [each.rank for each in last.aborted] == [0]
    assert [each.rank for each in last.places] == [0, 1]
    assert (failed.cell, failed.ranks, failed.size) == (1, (0, 1), 2)
    (trouble,) = failed.troubles
    error = trouble.error
    assert isinstance(error, Failure)
    assert (trouble.rank, error.name, error.message) == (1, "ValueError", "bad shard")
    assert len(error.traceback) == MAX_RECORD_LINES
    assert max(map(len, error.traceback)) == MAX_RECORD_LINE_LENGTH
    assert from_line(to_line(found)) == found  # the form in which the record crosses the socket


def test_a_death_after_a_task_is_marked_idle(lab: Lab) -> None:
    """A death after a task is marked as idle; only the first of many ranks have last lines."""
    ranks = range(WITH_LINES + 2)
    lab.begin(1, *ranks)
    for rank in ranks:
        lab.say(rank, Died(-signal.SIGKILL, 9, 123, ("bye",)), "")
    found = lab.record.tasks
    troubles = found.failed.troubles
    assert all(each.is_idle for each in troubles)
    assert [each.error.last_lines for each in troubles] == [("bye",)] * WITH_LINES + [(), ()]
    assert from_line(to_line(found)) == found
