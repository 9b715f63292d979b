"""Stop (SIGINT) where it must not raise: while something waits that is to be left whole, and
while the notebook is idle.

In the notebook's kernel, on its main thread; elsewhere nothing is changed.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from types import FrameType

LOOK_AGAIN = 0.25
"""Seconds until it is looked again whether a cell still runs."""


class Stops:
    """How often Stop was pressed while this was in use."""

    def __init__(self) -> None:
        self.count = 0

    def __repr__(self) -> str:
        return f"<Stops {self.count}>"

    def take(self, _number: int, _frame: FrameType | None) -> None:
        """Count one more; called as a signal handler."""
        self.count += 1


class CommandStops(Stops):
    """Those while a command of the notebook runs: met by who follows a task, else raised.

    A KeyboardInterrupt that comes between any two lines of a loop ends the loop: its ranks would
    run on, and what they had shown be lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self.meet: Callable[[], bool] | None = None

    def take(self, number: int, frame: FrameType | None) -> None:
        """Have it met; raise KeyboardInterrupt where nobody does."""
        if self.meet is None or not self.meet():
            signal.default_int_handler(number, frame)


@contextmanager
def command_stops() -> Iterator[None]:
    """Have `met_stops` inside meet Stops, where these raise KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or not is_main_thread():
        yield
        return
    signal.signal(signal.SIGINT, CommandStops().take)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def met_stops(meet: Callable[[], bool]) -> Iterator[None]:
    """Call this at each Stop inside, in its handler; False has it raised after all."""
    stops = _in_use()
    if not isinstance(stops, CommandStops):
        yield
        return
    before, stops.meet = stops.meet, meet
    try:
        yield
    finally:
        stops.meet = before


@contextmanager
def counted_stops(stops: Stops | None = None) -> Iterator[Stops]:
    """Count Stops, in these, instead of raising KeyboardInterrupt where one happens to come."""
    stops = stops or Stops()
    if not is_main_thread():
        yield stops
        return
    before = signal.signal(signal.SIGINT, stops.take)
    try:
        yield stops
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def held_stops() -> Iterator[None]:
    """Have a Stop that comes inside come once this has been left."""
    stops = Stops()  # it is there, should one come before they are counted
    try:
        with counted_stops(stops):
            yield
    finally:
        if stops.count:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def raised_stops() -> Iterator[None]:
    """Have Stop raise KeyboardInterrupt again inside `counted_stops` and `held_stops`."""
    if _in_use() is None or not is_main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _in_use() -> Stops | None:
    """Say who takes Stops now, if it is one of these."""
    taker = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    return taker if isinstance(taker, Stops) else None


def is_main_thread() -> bool:
    """Say whether signals are handled in this thread."""
    return threading.current_thread() is threading.main_thread()


class IdleStop:
    """Have Stop call something while no cell runs: ipykernel ignores SIGINT then.

    It has a handler of its own while it runs a cell, and puts back after it what was there
    before; so ours is put in place, and taken away, by the event loop between cells.
    """

    def __init__(self) -> None:
        self._stops: list[Callable[[], None]] = []
        self._is_there = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        return f"<IdleStop of {len(self._stops)}>"

    def watch(self, loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
        """Call this too from now on; does nothing where SIGINT means something already."""
        if stop not in self._stops:
            self._stops.append(stop)
        self._loop = loop
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._take)
            self._is_there = True

    def clear(self, stop: Callable[[], None]) -> None:
        """Call it no more; after the last one put back what was there, once no cell runs."""
        if stop in self._stops:
            self._stops.remove(stop)
        self._put_back()

    def _put_back(self) -> None:
        if self._stops or not self._is_there:
            return
        if signal.getsignal(signal.SIGINT) == self._take:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            self._is_there = False
        elif self._loop is not None and not self._loop.is_closed():
            self._loop.call_later(LOOK_AGAIN, self._put_back)

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        self._put_back()
        if self._loop is not None:
            for stop in self._stops:  # not here: it may come in the middle of a drawing
                self._loop.call_soon_threadsafe(stop)
