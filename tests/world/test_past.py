"""Tests of `nbdist.world.past`: which tasks made what is on the workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nbdist.config import Patience
from nbdist.output.events import Display, Done, Failure
from nbdist.values.payload import Identity
from nbdist.wire.work import Call, Script, Source, Task, Work
from nbdist.world import past as module
from nbdist.world.names import Shipped
from nbdist.world.past import Past
from nbdist.world.running import Crew, RunningTask
from nbdist.world.states import Machines

CREW = Crew(2, "gloo", Machines.one("here", 2), {0: 100, 1: 101}, {}, heals=True)
LR = Shipped(("float", "0.1"), Identity(0.1))


def ended(
    work: Work,
    *,
    key: str = "",
    status: str = "ok",
    bound: frozenset[str] = frozenset(),
    ranks: tuple[int, ...] = (0, 1),
    shipped: dict[str, Shipped] | None = None,
) -> RunningTask:
    """A task that all of its ranks have finished in this way."""
    task = Task("id", ranks, work, key=key, execution_count=5)
    running = RunningTask(task, Patience(), CREW, shipped)
    for rank in ranks:
        if status == "error":
            running.receive(rank, Failure("ValueError", "bad", (), 1))
        running.receive(rank, Done(status, 0.1, bound))  # type: ignore[arg-type]
    return running


def test_a_cell_is_kept_once() -> None:
    """In its last form, with where it first and last ran; a failed run beside what succeeded."""
    past = Past()
    past.add(ended(Source("x = 1"), key="a", bound=frozenset({"x"})))
    past.add(ended(Source("y = x"), key="b"))
    past.add(ended(Source("x = 2"), key="a"))
    past.add(ended(Source("x ="), key="a", status="error"))
    past.add(ended(Source("x = 0 / 0"), key="a", status="error"))
    told = [(each.text, each.status, each.first, each.last, each.runs) for each in past.tasks]
    assert told == [
        ("x = 2", "ok", 1, 3, 2),
        ("y = x", "ok", 2, 2, 1),
        ("x = 0 / 0", "failed", 4, 5, 2),
    ]
    past.add(ended(Source("x = 3"), key="a"))
    assert [(each.text, each.status) for each in past.tasks] == [("x = 3", "ok"), ("y = x", "ok")]


def test_cells_without_a_key_are_kept_each() -> None:
    """As in a terminal, where the same line twice is done twice."""
    past = Past()
    for _ in range(2):
        past.add(ended(Source("step()")))
    assert [each.text for each in past.tasks] == ["step()", "step()"]


@pytest.mark.parametrize(
    ("work", "bound", "kind"),
    [
        (Source("pass"), "", "cell"),
        (Source(""), "", None),
        (Call("memory.clean"), "", None),
        (Call("snapshot.read"), "x", "call"),
        (Script("file", "train.py", ("--lr", "1")), "", "script"),
    ],
)
def test_what_leaves_nothing_is_not_kept(work: Work, bound: str, kind: str | None) -> None:
    """Questions are no part of how the workers came to what they have."""
    past = Past()
    past.add(ended(work, bound=frozenset(bound)))
    assert [each.kind for each in past.tasks] == ([kind] if kind else [])


def test_facts() -> None:
    """Who ran it, what it bound, whether its last line's value and figures were shown."""
    past = Past()
    running = ended(Source("x"), ranks=(1,), bound=frozenset({"x"}))
    running.receive(1, Display({"text/plain": "1"}, {}, is_result=True))
    past.add(running)
    drawing = ended(Source("plot()"))
    drawing.receive(1, Display({"image/png": ""}, {}))
    past.add(drawing)
    first, second = past.tasks
    assert (first.ranks, first.on_all, first.number, first.made) == ((1,), False, 5, {"x"})
    assert (first.shows_value, first.draws) == (True, False)
    assert (second.on_all, second.shows_value, second.draws) == (True, False, True)


def test_set_up_cells() -> None:
    """One that runs again in a new rank is known, one of the workers before is not."""
    past, task = Past(), ended(Source("import os"), key="a").task
    assert not past.knows(task)
    past.add(ended(Source("import os"), key="a"))
    assert past.knows(task)
    assert past.knows(ended(Source("import os")).task)
    assert not past.knows(ended(Source("import sys")).task)


def test_a_stopped_cell() -> None:
    """It is told from one that failed."""
    past = Past()
    running = ended(Source("x"), status="error")
    running.stops = 1
    past.add(running)
    past.add(ended(Source("y"), status="error"))
    told = [(each.text, each.status, each.error) for each in past.tasks]
    assert told == [("x", "interrupted", "ValueError"), ("y", "failed", "ValueError")]


def test_names_that_went_along() -> None:
    """As they last were before each task; what went home is named."""
    past = Past()
    new = Shipped(("float", "0.01"), Identity(0.01))
    kept: Any = object()  # memory, which is not to be held for longer than the name
    past.add(ended(Source("pass"), shipped={"lr": replace(LR, kept=kept)}))
    assert past.sent[0].shipped.kept is None
    past.add(ended(Call("values.bind_pushed"), shipped={"lr": new}))
    past.add(ended(Call("values.gather", {"expressions": ("loss",)})))
    assert {name: each.shipped for name, each in past.sent_before(1).items()} == {"lr": LR}
    assert {name: each.shipped for name, each in past.sent_before(2).items()} == {"lr": new}
    assert [each.kind for each in past.tasks] == ["cell", "push"]
    assert [*past.gathered] == ["loss"]


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are forgotten, and counted."""
    monkeypatch.setattr(module, "MOST_TASKS", 3)
    past = Past()
    for number in range(5):
        past.add(ended(Source(f"x = {number}")))
    assert [each.text for each in past.tasks] == ["x = 2", "x = 3", "x = 4"]
    assert past.forgotten == 2
    monkeypatch.setattr(module, "MOST_CHARACTERS", 12)
    past.add(ended(Source("x = 1234567")))
    assert [each.text for each in past.tasks] == ["x = 1234567"]
