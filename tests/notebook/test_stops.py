"""Tests of `nbdist.notebook.idle`: Ctrl-C is counted, or noticed between cells."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest

from nbdist.notebook.idle import (
    IdleStop,
    command_stops,
    counted_stops,
    held_stops,
    met_stops,
    raised_stops,
)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def fail() -> None:
    pytest.fail("called")


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_stops_are_counted():
    """And raised again afterwards; of a command's, who counts them goes on counting."""
    with counted_stops() as stops:
        press()
        press()
    assert stops.count == 2
    with pytest.raises(KeyboardInterrupt):
        press()
    with counted_stops() as stops, command_stops(), met_stops(fail):
        press()
    assert stops.count == 1


def test_a_stop_comes_later():
    """What is inside is done first; who counts around it counts one."""
    done: list[int] = []

    def hold() -> None:
        with held_stops():
            press()
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        hold()
    with counted_stops() as stops:
        with held_stops():
            press()
            assert stops.count == 0
        done.append(2)
    assert (stops.count, done) == (1, [1, 2])


def test_a_stop_at_any_moment():
    """Whatever line of ours it comes at, it is a KeyboardInterrupt, and it is as before then."""
    passed = held_with_a_stop(at=0)
    assert passed > 8
    for number in range(1, passed + 1):
        with pytest.raises(KeyboardInterrupt):
            held_with_a_stop(at=number)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def held_with_a_stop(at: int) -> int:
    """Enter and leave `held_stops`, with Stop at this line of all that are passed: how many."""
    passed = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal passed
        if not frame.f_code.co_filename.endswith("notebook/idle.py"):
            return None
        if event == "line" and frame.f_code.co_name in ("held_stops", "counted_stops"):
            passed += 1
            if passed == at:
                press()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with held_stops():
            pass
    finally:
        sys.settrace(before)
    return passed


def test_a_stop_while_somebody_types():
    """It raises at once, also where others are counted; elsewhere nothing is changed."""
    with counted_stops() as stops:
        with pytest.raises(KeyboardInterrupt), raised_stops():
            press()
        press()
    assert stops.count == 1
    before = signal.getsignal(signal.SIGINT)
    with raised_stops():
        assert signal.getsignal(signal.SIGINT) is before


def test_stops_of_a_command():
    """They are met by who can, innermost first, and raised else; also where somebody types."""
    met: list[int] = []

    def meet(number: int, *, takes: bool = True) -> bool:
        met.append(number)
        return takes

    with met_stops(partial(meet, 0)), pytest.raises(KeyboardInterrupt):
        press()  # no command runs
    with command_stops():
        with pytest.raises(KeyboardInterrupt):
            press()
        with met_stops(partial(meet, 1)):
            press()
            with command_stops(), met_stops(partial(meet, 2)):
                press()
            with pytest.raises(KeyboardInterrupt), raised_stops():
                press()
            with pytest.raises(KeyboardInterrupt), met_stops(partial(meet, 3, takes=False)):
                press()
        with pytest.raises(KeyboardInterrupt):
            press()
    assert met == [1, 2, 3]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def idle_stop(pressed: list[str], wanted: list[str]) -> IdleStop:
    return IdleStop(lambda: pressed.append("once"), lambda: bool(wanted))


def test_a_kernel_that_ignores_it_between_cells():
    """It is called as long as that is wanted; once no cell runs, Stop is ignored again."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pressed, wanted = [], ["a job"]

    async def main() -> None:
        stop = idle_stop(pressed, wanted)
        for _ in range(2):
            stop.update(asyncio.get_running_loop())
        press()
        await asyncio.sleep(0.01)
        assert pressed == ["once"]
        # While a cell runs ipykernel has a handler of its own, and puts back what it found.
        found = signal.signal(signal.SIGINT, signal.default_int_handler)
        wanted.clear()
        stop.update()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, found)
        for _ in range(1000):
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
                await asyncio.sleep(0.01)
        press()
        await asyncio.sleep(0.01)
        assert pressed == ["once"]

    asyncio.run(asyncio.wait_for(main(), 20))


def test_what_somebody_else_has_set_stays():
    """Where it is not ignored, Stop means something already."""

    def mine(*_: object) -> None: ...

    signal.signal(signal.SIGINT, mine)
    loop = asyncio.new_event_loop()
    for wanted in (["a job"], []):
        idle_stop([], wanted).update(loop)
        assert signal.getsignal(signal.SIGINT) is mine
    loop.close()
