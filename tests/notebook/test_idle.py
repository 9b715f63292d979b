"""Tests of `nbdist.notebook.idle`: messages and Stop between cells, and Stop in commands."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import pytest

from nbdist.notebook.idle import (
    IDLE_PAUSE,
    IdleStop,
    IdleWatch,
    Stops,
    command_stops,
    delay_stops,
    raise_stops,
    redirect_stops,
)
from nbdist.notebook.jobs import CellPlace, Job
from nbdist.world.event_queue import EventQueue


@dataclass
class Events:
    """The part of a link that `IdleWatch` uses."""

    events: EventQueue


@pytest.fixture
def link() -> Iterator[Any]:
    events = EventQueue()
    yield Events(events)
    events.close()


async def test_many_bytes_cause_few_calls_of_notice(link: Any):
    """`notice` is called once per `IDLE_PAUSE` at most, and once more when the link has closed."""
    noticed: list[float] = []
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def notice() -> None:
        noticed.append(loop.time())
        if repr(watch) == "<IdleWatch of None>":
            ended.set()

    watch = IdleWatch(notice, lambda: False)
    watch.follow(link)
    while len(noticed) < 2:
        link.events.idle_signal.wake()
        await asyncio.sleep(0.01)
    link.events.close()
    await ended.wait()
    assert noticed[1] - noticed[0] >= IDLE_PAUSE


async def test_an_active_watch_calls_notice_periodically(link: Any):
    """While a task runs, `notice` is called every `IDLE_PAUSE`, and at once after a message.

    After `stop`, `notice` is not called any more, and all descriptors are closed.
    """
    noticed: list[float] = []
    loop, third = asyncio.get_running_loop(), asyncio.Event()
    before = os.listdir("/proc/self/fd")

    def notice() -> None:
        noticed.append(loop.time())
        if len(noticed) == 3:
            third.set()

    tasks = ["a task"]
    watch = IdleWatch(notice, lambda: bool(tasks))
    for _ in range(2):
        watch.follow(link)
    watch.update()
    assert link.events.signals_all
    await third.wait()
    link.events.idle_signal.wake()
    await asyncio.sleep(0.01)
    assert len(noticed) == 4
    tasks.clear()
    watch.update()
    assert not link.events.signals_all
    await asyncio.sleep(2.5 * IDLE_PAUSE)
    watch.stop()
    assert noticed[2] - noticed[0] >= 2 * IDLE_PAUSE
    assert len(noticed) <= 5
    noticed.clear()
    link.events.idle_signal.wake()
    await asyncio.sleep(0.01)
    assert noticed == []
    assert os.listdir("/proc/self/fd") == before


# --- Stop -----------------------------------------------------------------------------------


@pytest.fixture
def _as_before() -> Iterator[None]:
    """Restore the handler of SIGINT after the test."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_stops_are_counted_and_raise_nothing():
    """`Stops` only counts each Stop; within `raise_stops`, or after the block, Stop raises."""
    with Stops() as stops:
        press()
        with pytest.raises(KeyboardInterrupt), raise_stops():
            press()
        with command_stops(), redirect_stops(lambda: pytest.fail("called")):
            press()
    assert stops.count == 2
    with pytest.raises(KeyboardInterrupt):
        press()
    before = signal.getsignal(signal.SIGINT)
    with raise_stops():
        assert signal.getsignal(signal.SIGINT) is before


def test_delay_stops_delays_a_stop_to_its_end():
    """A delayed Stop raises at the end of the block; a `Stops` around the block counts it once."""
    done: list[int] = []

    def press_in_block() -> None:
        with delay_stops():
            press()
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        press_in_block()
    with Stops() as stops:
        with delay_stops():
            press()
            assert stops.count == 0
        done.append(2)
    assert (stops.count, done) == (1, [1, 2])


def test_a_stop_at_any_line_raises_and_restores_the_handler():
    """A Stop at any line of `delay_stops` raises, and then Python's own signal handler is back.

    After a Stop at any line of a job's step, the job's next step runs.
    """
    steps_run: list[int] = []
    steps: Any = (steps_run.append(each) for each in itertools.count())
    nothing: Any = object()
    job = Job(steps, nothing, "job", CellPlace(nothing))
    next(steps)

    def delay() -> None:
        with delay_stops():
            pass

    for action, names in (
        (delay, ("delay_stops", "__enter__", "__exit__")),
        (job.step, ("step", "_run_step")),
    ):
        line_count = with_a_stop(action, names, at=0)
        assert line_count > 7
        for number in range(1, line_count + 1):
            with pytest.raises(KeyboardInterrupt):
                with_a_stop(action, names, at=number)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            before = len(steps_run)
            job.step()
            assert len(steps_run) == before + 1


def with_a_stop(action: Callable[[], None], names: Sequence[str], at: int) -> int:
    """Call `action`, with Stop at the `at`-th line run in `names`; return how many lines ran."""
    line_count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal line_count
        if not frame.f_code.co_filename.endswith(("notebook/idle.py", "notebook/jobs.py")):
            return None
        if event == "line" and frame.f_code.co_name in names:
            line_count += 1
            if line_count == at:
                press()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return line_count


def test_the_innermost_redirection_handles_a_stop():
    """Stop calls a command's innermost `on_stop`, or raises if that is missing or returns False."""
    called: list[int] = []

    def stop(number: int, *, accepts: bool = True) -> bool:
        called.append(number)
        return accepts

    with redirect_stops(partial(stop, 0)), pytest.raises(KeyboardInterrupt):
        press()  # outside of `command_stops`
    with command_stops():
        with pytest.raises(KeyboardInterrupt):
            press()
        with redirect_stops(partial(stop, 1)):
            press()
            with command_stops(), redirect_stops(partial(stop, 2)):
                press()
            with pytest.raises(KeyboardInterrupt), raise_stops():
                press()
            with pytest.raises(KeyboardInterrupt), redirect_stops(partial(stop, 3, accepts=False)):
                press()
        with pytest.raises(KeyboardInterrupt):
            press()
    assert called == [1, 2, 3]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def idle_stop(pressed: list[str], jobs: list[str]) -> IdleStop:
    return IdleStop(lambda: pressed.append("once"), lambda: bool(jobs))


@pytest.mark.usefixtures("_as_before")
def test_idle_stop_replaces_an_ignored_stop():
    """Stop calls `stop` while a job runs; later, once no cell runs, Stop is ignored again."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pressed, jobs = [], ["a job"]

    async def main() -> None:
        stop = idle_stop(pressed, jobs)
        for _ in range(2):
            stop.update(asyncio.get_running_loop())
        press()
        await asyncio.sleep(0.01)
        assert pressed == ["once"]
        # While a cell runs, ipykernel has its own handler; afterwards it restores the former one.
        installed = signal.signal(signal.SIGINT, signal.default_int_handler)
        jobs.clear()
        stop.update()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, installed)
        for _ in range(1000):
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
                await asyncio.sleep(0.01)
        press()
        await asyncio.sleep(0.01)
        assert pressed == ["once"]

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.usefixtures("_as_before")
def test_a_handler_of_other_code_stays():
    """`IdleStop` installs its handler only where Stop is ignored, and not over other code's."""

    def mine(*_: object) -> None: ...

    signal.signal(signal.SIGINT, mine)
    loop = asyncio.new_event_loop()
    for jobs in (["a job"], []):
        idle_stop([], jobs).update(loop)
        assert signal.getsignal(signal.SIGINT) is mine
    loop.close()
