"""Tests of `nbdist.worker.steps`: steps counted and held, and SIGINT in a step."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nbdist.wire.control import StepCount
from nbdist.worker import steps as module
from nbdist.worker.steps import STEPS, StepCounter
from tests.waiting import wait_until

TASK = "a task"


@pytest.fixture
def steps() -> Iterator[StepCounter]:
    """The step counter of this process, during a task whose SIGINT it handles."""
    if not STEPS._ident:
        STEPS.watch()
    before = signal.signal(signal.SIGINT, STEPS.handle_sigint)
    STEPS.begin_task(TASK)
    yield STEPS
    STEPS.end_task()
    signal.signal(signal.SIGINT, before)


class Doing(torch.optim.SGD):
    """An optimizer that calls `do` in each step, and counts the steps that have ended."""

    def __init__(self, do: Callable[[], object] = lambda: None) -> None:
        super().__init__([torch.zeros(1, requires_grad=True)], lr=0.1)
        self.do, self.ended = do, 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.do()
        self.ended += 1


def make_steps(optimizer: Doing) -> None:
    while True:
        optimizer.step()


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_steps_are_counted(steps: StepCounter) -> None:
    """Steps of all optimizers in a task count, but not steps in steps or in other threads."""
    inner, other = Doing(), Doing()
    outer = Doing(inner.step)
    for optimizer in (outer, other, outer):
        optimizer.step()
    assert (steps.begun, steps.is_inside, inner.ended) == (3, False, 2)
    thread = threading.Thread(target=outer.step)
    thread.start()
    thread.join()
    assert steps.begun == 3
    steps.begin_task("another")
    assert steps.begun == 0


class Interrupted:
    """An object whose finalizer raises KeyboardInterrupt, as SIGINT may."""

    def __del__(self) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("is_none", [False, True])
def test_dropped_interrupts_count_despite_a_hook_of_the_user(
    steps: StepCounter, monkeypatch: pytest.MonkeyPatch, *, is_none: bool
) -> None:
    """After a cell has set `sys.unraisablehook`, both the hook and the counter see exceptions."""
    shown: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", None if is_none else shown.append)
    monkeypatch.setattr(sys, "__unraisablehook__", shown.append)
    for number in range(1, 3):
        steps.begin_task(TASK)
        assert steps.dropped_interrupts == 0
        Interrupted()
        assert (steps.dropped_interrupts, len(shown)) == (1, number)


def test_a_step_that_raises_has_not_ended(steps: StepCounter) -> None:
    """A task is inside of a step that has raised, until another step begins."""

    def fail() -> None:
        raise ValueError

    for number in (1, 2):
        with pytest.raises(ValueError, match=r"^$"):
            Doing(fail).step()
        assert (steps.begun, steps.is_inside) == (number, True)
    inner = Doing()
    Doing(inner.step).step()
    assert (steps.begun, steps.is_inside) == (3, False)


def test_sigint_waits_for_the_end_of_the_step(steps: StepCounter) -> None:
    """SIGINT in a step raises at the end of the outermost step; outside of steps, at once."""
    for inner in (Doing(press), Doing(Doing(press).step)):
        with pytest.raises(KeyboardInterrupt):
            inner.step()
        assert inner.ended == 1
        assert not steps.is_inside
    with pytest.raises(KeyboardInterrupt):
        press()


def test_sigint_interrupts_a_step_that_does_not_end(
    steps: StepCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGINT interrupts a step that lasts long; a second SIGINT interrupts any step at once.

    After an abort the first SIGINT interrupts a step at once, too.
    """
    monkeypatch.setattr(module, "MAX_DEFERRAL", 0.05)

    def stay() -> None:
        press()
        time.sleep(60)

    def press_twice() -> None:
        press()
        press()

    def press_after_abort() -> None:
        steps.raise_at_once()
        press()

    for do in (stay, press_twice, press_after_abort):
        optimizer = Doing(do)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        assert (optimizer.ended, steps.is_inside) == (0, True)


def test_a_held_rank_stops_at_its_step(steps: StepCounter) -> None:
    """A held rank waits before its next step, and goes on until the step that is set."""
    optimizer = Doing()
    optimizer.step()
    assert steps.hold("another task").begun == 0
    count = steps.hold(TASK)
    assert (count.begun, count.interval, count.has_stopped) == (1, 0.0, False)

    def name_step() -> None:
        wait_until(lambda: steps._is_waiting, "it waits")
        steps.stop_at(TASK, 4)

    thread = threading.Thread(target=name_step)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        make_steps(optimizer)
    thread.join()
    assert (steps.begun, optimizer.ended, steps.is_inside) == (3, 3, False)
    assert steps.release(TASK).has_stopped
    optimizer.step()  # code that catches KeyboardInterrupt goes on
    assert steps.begun == 4


class PressesAtEnd:
    """A lock whose release is followed by SIGINT."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        press()


def test_stop_step_raises_only_once(steps: StepCounter, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGINT at the step to stop at raises no second KeyboardInterrupt in code that cleans up."""
    monkeypatch.setattr(module, "MAX_DEFERRAL", 0.05)
    monkeypatch.setattr(steps, "_lock", PressesAtEnd())
    optimizer = Doing()
    optimizer.step()
    steps.hold(TASK)
    steps.stop_at(TASK, 2)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    time.sleep(0.2)  # raises, if SIGINT still waits for the end of the step
    assert (steps.begun, steps.is_inside) == (1, False)


def test_a_task_that_has_ended_has_a_last_count(steps: StepCounter) -> None:
    """Holding a task that has ended returns its last count if the task has succeeded, else 0."""
    optimizer = Doing()
    for has_succeeded, begun in ((True, 2), (False, 0)):
        steps.begin_task(TASK)
        optimizer.step()
        optimizer.step()
        steps.end_task(has_succeeded=has_succeeded)
        assert steps.hold(TASK) == StepCount(begun, has_succeeded=has_succeeded)
        assert steps.hold("another task") == StepCount()
        optimizer.step()  # no task is held
    steps.begin_task("another task")
    assert steps.hold(TASK) == StepCount()


def test_a_held_rank_goes_on_by_itself(steps: StepCounter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is held only after a step, and until a limit of time, its release, or SIGINT."""
    optimizer = Doing()
    assert steps.hold(TASK).begun == 0
    optimizer.step()  # not held, as the task had begun no step
    assert optimizer.ended == 1
    monkeypatch.setattr(module, "MAX_HOLD_SECONDS", 0.01)
    steps.hold(TASK)
    optimizer.step()
    monkeypatch.setattr(module, "MAX_HOLD_SECONDS", 60.0)
    steps.hold(TASK)
    assert not steps.release(TASK).has_stopped
    optimizer.step()
    assert optimizer.ended == 3
    steps.hold(TASK)
    timer = threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    timer.join()
    assert (steps.begun, optimizer.ended, steps.is_inside) == (3, 3, False)
