"""What workers do while no cell runs: seen on IPython's own thread, and added to past cells."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any, Self

from IPython.core.interactiveshell import InteractiveShell

from nbdist.notebook.cell_text import request_of
from nbdist.notebook.display import REDRAW, CellDisplay
from nbdist.output.ansi import strip
from nbdist.output.events import Display, Failure, Output, Text, Update, Visible, plain_of
from nbdist.output.transcript import Transcript
from nbdist.output.wording import fold_ranks, traceback_text
from nbdist.words import name_ranks
from nbdist.world.link import Link

PAUSE, LONGEST_PAUSE = 0.25, 1.0  # seconds between two times
PAUSES_PER_NOTICE = 4  # what a drawing takes, four times as long is none


class IdleWatch:
    """Calls `notice` on the event loop of the notebook's cells, at deaths and late output.

    While `goes_on()` is true, for a task in the background, it does so at all other news too, and
    every `PAUSE` seconds.  An ipykernel's loop runs between cells; in a terminal each prompt has
    a loop of its own.
    """

    def __init__(self, notice: Callable[[], None], goes_on: Callable[[], bool]) -> None:
        self._notice = notice
        self._goes_on = goes_on
        self._link: Link | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self._asides = -1
        self._notice_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<IdleWatch of {self._link}>"

    def follow(self, link: Link | None) -> None:
        """Watch this link from now on, and none that was watched before."""
        if link is self._link and not (self.loop and self.loop.is_closed()):
            return
        self.stop()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        if link is None or not is_main_thread():
            return
        # A descriptor of our own, which stays ours when the link is closed.
        self._link, self.loop, self._asides = link, loop, os.dup(link.asides)
        # In no cell's context: what is shown belongs to the cell that ran last, not to this one.
        contextvars.Context().run(loop.add_reader, self._asides, self._wake)

    def update(self) -> None:
        """Begin to look again and again, or end that; called where what `goes_on` has changed."""
        if self._link is not None:
            self._link.tells_all = self._goes_on()
        # The loop of a terminal's last prompt is closed while a cell runs; the next prompt follows.
        if self.loop is None or self.loop.is_closed():
            return
        if self._goes_on() and self._timer is None:
            # In no cell's context, as in `follow`.
            self._timer = contextvars.Context().run(self.loop.call_later, PAUSE, self._notice_now)

    def stop(self) -> None:
        """Watch nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.loop is not None:
            if not self.loop.is_closed():
                self.loop.remove_reader(self._asides)
            os.close(self._asides)
        self._link = self.loop = None

    def _wake(self) -> None:
        is_closed = False
        with suppress(BlockingIOError):  # read already
            is_closed = os.read(self._asides, 4096) == b""
        loop = self.loop
        if is_closed:
            self.stop()
        if loop is None or is_closed:
            self._notice()
        elif self._timer is None:
            # A rank may write without end; each time what is shown is drawn anew.
            wait = max(0.0, self._notice_at - time.monotonic())
            self._timer = loop.call_later(wait, self._notice_now)
        elif self._goes_on():
            # It shows what there is as often as it should; more waits to be taken in.
            self._timer.cancel()
            self._timer = loop.call_later(0.0, self._notice_now)

    def _notice_now(self) -> None:
        self._timer = None
        started = time.monotonic()
        contextvars.Context().run(self._notice)
        now = time.monotonic()
        self._notice_at = now + min(LONGEST_PAUSE, max(PAUSE, PAUSES_PER_NOTICE * (now - started)))
        self.update()


# --- what ranks say after their cell has ended, and later changes of what it has shown --------

OUTPUTS_KEPT = 1000

CELLS_KEPT = 20  # cells whose displays can still change
MOST_CHARACTERS = 300  # of what one rank has said, where it cannot be shown under its cell


class FinishedCells:
    """The cells that have ended, newest last, with the displays that they have."""

    def __init__(self) -> None:
        # Without a display those of workers before, which say nothing more.
        self._cells: deque[tuple[Transcript, CellDisplay | None]] = deque(maxlen=CELLS_KEPT)
        self._left: deque[tuple[int, Output]] = deque(maxlen=OUTPUTS_KEPT)
        self._changed = set[Transcript]()
        self._last_update: tuple[Transcript, int] | None = None
        self._show_at = 0.0

    def add(self, transcript: Transcript, display: CellDisplay) -> None:
        """Keep one more that has ended."""
        self._cells.append((transcript, display))

    def past(self, last: Transcript) -> list[Transcript]:
        """Return what cells have shown, also those of workers before; `last` is the newest."""
        return [*(each for each, _ in self._cells if each is not last), last]

    def forget(self) -> None:
        """Show nothing more in these cells: the workers are new."""
        self._cells = deque([(each, None) for each, _ in self._cells], CELLS_KEPT)
        self._changed.clear()
        self._last_update = None
        self._left.clear()

    def receive(self, late: Iterable[tuple[int, Output]]) -> None:
        """Take in what has come since; what belongs under no cell is for the next one."""
        for rank, output in late:
            if not isinstance(output, Visible):
                continue
            if (cell := self._cell_of(rank, output)) is None:
                self._left.append((rank, output))
            else:
                cell.receive(rank, output, time.monotonic())
                self._changed.add(cell)

    def lose_widgets(self, gone: Mapping[str, int]) -> None:
        """Show a line where there was a widget of a rank that has ended; widgets are by id."""
        for transcript, _ in self._cells:
            lost = [each.lose_widgets(gone) for each in transcript]
            if any(lost):
                self._changed.add(transcript)

    def again(self, transcript: Transcript) -> None:
        """Show this one once more, with what changes next."""
        self._changed.add(transcript)

    def update(self, transcript: Transcript) -> None:
        """Show this one once more if its ranks have said something since the last `update`."""
        state = transcript, sum(each.version for each in transcript)
        if state != self._last_update:
            self._last_update = state
            self._changed.add(transcript)

    def show(self, logs: Mapping[int, str], *, at_once: bool = True) -> None:
        """Show the cells that have changed; unless `at_once`, a few times a second at most."""
        if self._changed and (at_once or time.monotonic() >= self._show_at):
            for transcript, display in self._cells:
                if transcript in self._changed and display is not None:
                    display.end_again(transcript, logs)
            self._changed.clear()
            self._show_at = time.monotonic() + REDRAW

    def take_texts(self) -> list[str]:
        """Return what could not be shown under a cell: a line for all that said the same."""
        left = [*self._left]
        self._left.clear()
        return late_texts(left)

    def _cell_of(self, rank: int, output: Output) -> Transcript | None:
        for transcript, display in reversed(self._cells):
            if rank not in transcript.by_rank or display is None:
                continue
            if not isinstance(output, Update) or transcript[rank].has_display(output.display_id):
                return transcript if display.can_change else None
        return None


def late_texts(late: Iterable[tuple[int, Output]]) -> list[str]:
    """Write `ranks 0-1 printed after their last cell: bye`, where it cannot be shown there."""
    said: dict[int, str] = {}
    for rank, output in late:
        said[rank] = said.get(rank, "") + _text_of(output)
    lines = {rank: map(str.strip, strip(text).splitlines()) for rank, text in said.items()}
    same = fold_ranks({rank: " / ".join(filter(None, found)) for rank, found in lines.items()})
    texts: list[str] = []
    for text, ranks in same.items():
        if text:
            whose = "its" if len(ranks) == 1 else "their"
            more = len(text) - MOST_CHARACTERS
            shown = text if more <= 0 else f"{text[:MOST_CHARACTERS]} … {more:,} more characters"
            texts.append(f"{name_ranks(ranks)} printed after {whose} last cell: {shown}")
    return texts


def _text_of(output: Output) -> str:
    match output:
        case Text(text=text):
            return text
        case Display(data=data):
            return f"{plain_of(data)}\n"
        case Failure():
            return f"{traceback_text(output)}\n"
    return ""


def is_in_subshell(shell: InteractiveShell) -> bool:
    """Return True if the cell that asks runs in one."""
    return request_of(shell).get("header", {}).get("subshell_id") is not None


# --- stop (SIGINT) where it must not raise ----------------------------------------------------

LOOK_AGAIN = 0.25  # seconds until it is looked again whether a cell still runs


class Stops:
    """Handles Stop inside: it is counted, or `meet` is called, and False has it raised.

    A KeyboardInterrupt that comes between any two lines of a loop ends the loop: its ranks would
    run on, and what they had shown be lost.  In other threads than the main one there are none.
    """

    def __init__(self, meet: Callable[[], bool] | None = None) -> None:
        self.count = 0
        self.meet = meet
        self._before: Any = None

    def __enter__(self) -> Self:
        if is_main_thread():
            self._before = signal.signal(signal.SIGINT, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.meet is None:
            self.count += 1
        elif not self.meet():
            signal.default_int_handler(number, frame)


def command_stops() -> AbstractContextManager[object]:
    """Let `met_stops` inside meet Stops, where these raise KeyboardInterrupt."""
    is_raised = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return Stops(lambda: False) if is_raised else nullcontext()


def raised_stops() -> AbstractContextManager[object]:
    """Raise KeyboardInterrupt at Stop again, where `Stops` handle it."""
    return Stops(lambda: False) if _in_use() else nullcontext()


@contextmanager
def met_stops(meet: Callable[[], bool]) -> Iterator[None]:
    """Call this at each Stop of a command inside, in its handler; False raises it after all."""
    stops = _in_use()
    if stops is None or stops.meet is None:
        yield
        return
    # No handler of its own: a job's steps go on in later cells, which have theirs.
    before, stops.meet = stops.meet, meet
    try:
        yield
    finally:
        stops.meet = before


@contextmanager
def held_stops() -> Iterator[None]:
    """Hold back a Stop that comes inside until this has been left."""
    stops = Stops()  # it is there, should one come before they are counted
    try:
        with stops:
            yield
    finally:
        if stops.count:
            signal.raise_signal(signal.SIGINT)


def _in_use() -> Stops | None:
    taker = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    return taker if isinstance(taker, Stops) else None


def is_main_thread() -> bool:
    """Return True if signals are handled in this thread."""
    return threading.current_thread() is threading.main_thread()


class IdleStop:
    """Calls `stop` at Stop while no cell runs, as long as that is wanted: ipykernel ignores it.

    It has a handler of its own while it runs a cell, and puts back after it what was there
    before; so ours is put in place, and taken away, by the event loop between cells.
    """

    def __init__(self, stop: Callable[[], None], is_wanted: Callable[[], bool]) -> None:
        self._stop = stop
        self._is_wanted = is_wanted
        self._is_there = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def update(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Be there or not, once no cell runs; not where SIGINT means something already."""
        self._loop = loop or self._loop
        found, loop = signal.getsignal(signal.SIGINT), self._loop
        if self._is_wanted() and loop is not None:
            if found is signal.SIG_IGN:
                signal.signal(signal.SIGINT, self._take)
                self._is_there = True
        elif self._is_there and found == self._take:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            self._is_there = False
        elif self._is_there and loop is not None and not loop.is_closed():
            loop.call_later(LOOK_AGAIN, self.update)

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        if self._loop is not None:  # not here: it may come in the middle of a drawing
            self._loop.call_soon_threadsafe(self._stop)
