"""Watches workers while no cell runs, and handles Stop (SIGINT).

Runs in the notebook's process, on IPython's main thread.  `Pool` owns an `IdleWatch`, and `Pools`
owns an `IdleStop`.  Loops that follow a cell or job use `Stops`.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any, Self

from IPython.core.interactiveshell import InteractiveShell

from nbdist.notebook.cell_text import request_of
from nbdist.world.agent_link import Link

# The shortest and longest pause, in seconds, between two calls of `notice` while no task runs.
IDLE_PAUSE, MAX_IDLE_PAUSE = 0.25, 1.0
PAUSES_PER_NOTICE = 4  # within these limits, a pause is 4 times as long as the call before it


class IdleWatch:
    """Calls a function, for example when a rank dies or prints while no cell runs in the notebook.

    The function `notice` then shows the news to the user.  `is_active()` says whether a task runs
    in the background.  In that case `notice` is also called at all other messages of ranks, and
    about every `IDLE_PAUSE` seconds.  The calls come from the event loop, which ipykernel runs
    between cells; in a terminal each prompt has its own loop.
    """

    def __init__(self, notice: Callable[[], None], is_active: Callable[[], bool]) -> None:
        self._notice = notice
        self._is_active = is_active
        self._link: Link | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self._wakeup_fd = -1
        self._notice_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<IdleWatch of {self._link}>"

    def follow(self, link: Link | None) -> None:
        """Watch this link instead of the former link; with None, watch no link.

        Does nothing if this link is watched already.  Without a running event loop, and on other
        threads than the main thread, this ends the watch of the former link and starts no new
        watch.
        """
        if link is self._link and not (self.loop and self.loop.is_closed()):
            return
        self.stop()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        if link is None or not is_main_thread():
            return
        # Duplicate the descriptor, since the link may close its own while the loop still watches.
        self._link, self.loop = link, loop
        self._wakeup_fd = os.dup(link.events.idle_signal.fileno())
        # Run callbacks in an empty context: in the context of the present cell, the output of later
        # callbacks would be shown below that cell.
        contextvars.Context().run(loop.add_reader, self._wakeup_fd, self._wake)

    def update(self) -> None:
        """Start the periodic calls of `notice` if `is_active()` is true now.

        The owner calls this whenever the value of `is_active()` may have changed.  The periodic
        calls end once `is_active()` is false.
        """
        if self._link is not None:
            self._link.events.signals_all = self._is_active()
        # In a terminal the loop is mostly closed while a cell runs; the next prompt has a new one.
        if self.loop is None or self.loop.is_closed():
            return
        if self._is_active() and self._timer is None:
            # The timer runs in an empty context, for the same reason as in `follow`.
            self._timer = contextvars.Context().run(
                self.loop.call_later, IDLE_PAUSE, self._notice_now
            )

    def stop(self) -> None:
        """Watch no link any more: cancel the timer and close the descriptor."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.loop is not None:
            if not self.loop.is_closed():
                self.loop.remove_reader(self._wakeup_fd)
            os.close(self._wakeup_fd)
        self._link = self.loop = None

    def _wake(self) -> None:
        is_closed = False
        with suppress(BlockingIOError):  # the wake-up was already read
            is_closed = os.read(self._wakeup_fd, 4096) == b""
        loop = self.loop
        if is_closed:
            self.stop()
        if loop is None or is_closed:
            self._notice()
        elif self._timer is None:
            # Wait until the pause is over: a call may redraw panels, and a rank may never stop
            # printing.
            wait = max(0.0, self._notice_at - time.monotonic())
            self._timer = loop.call_later(wait, self._notice_now)
        elif self._is_active():
            # While a task runs, do not wait for the timer: panels themselves limit how often they
            # are drawn.
            self._timer.cancel()
            self._timer = loop.call_later(0.0, self._notice_now)

    def _notice_now(self) -> None:
        self._timer = None
        started = time.monotonic()
        contextvars.Context().run(self._notice)
        now = time.monotonic()
        self._notice_at = now + min(
            MAX_IDLE_PAUSE, max(IDLE_PAUSE, PAUSES_PER_NOTICE * (now - started))
        )
        self.update()


def is_in_subshell(shell: InteractiveShell) -> bool:
    """Return True if the calling cell runs in a subshell of the kernel, beside other cells."""
    return request_of(shell).get("header", {}).get("subshell_id") is not None


# --- Stop (SIGINT) while a KeyboardInterrupt would do harm ------------------------------------

LOOK_AGAIN = 0.25  # seconds between checks whether a cell still runs


class Stops:
    """A context that handles Stop (SIGINT) in place of Python's own handler.

    Without `on_stop`, each Stop only adds 1 to `count`.  With `on_stop`, each Stop calls that
    function, and raises KeyboardInterrupt if the function returns False.

    Python's own handler would raise KeyboardInterrupt between any two lines of a loop that follows
    ranks.  The loop would end, the ranks would keep running, and their output would be lost.  On
    other threads than the main thread this context has no effect.
    """

    def __init__(self, on_stop: Callable[[], bool] | None = None) -> None:
        self.count = 0
        self.on_stop = on_stop
        self._before: Any = None

    def __enter__(self) -> Self:
        if is_main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if self.on_stop is None:
            self.count += 1
        elif not self.on_stop():
            signal.default_int_handler(number, frame)


def command_stops() -> AbstractContextManager[object]:
    """Return a context for a magic, within which `redirect_stops` can redirect Stop.

    Until `redirect_stops` is used, Stop raises KeyboardInterrupt as usual.  The context does
    nothing if other code has replaced Python's own handler of SIGINT.
    """
    is_raised = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return Stops(lambda: False) if is_raised else nullcontext()


def raise_stops() -> AbstractContextManager[object]:
    """Return a context for use within a `Stops`, in which Stop raises KeyboardInterrupt again."""
    return Stops(lambda: False) if _active_stops() else nullcontext()


@contextmanager
def redirect_stops(on_stop: Callable[[], bool]) -> Iterator[None]:
    """Call `on_stop` at each Stop in this context; if it returns False, raise KeyboardInterrupt.

    Replaces the `on_stop` of the `Stops` that handles SIGINT now, for example of the `Stops` that
    `command_stops` has opened around a magic.  Does nothing if no `Stops` handles SIGINT, or if the
    `Stops` only counts.
    """
    stops = _active_stops()
    if stops is None or stops.on_stop is None:
        yield
        return
    # Keep the handler and replace only its function.  A job's steps can enter this context in one
    # cell and leave it in a later cell, which has another handler: that handler must stay.
    before, stops.on_stop = stops.on_stop, on_stop
    try:
        yield
    finally:
        stops.on_stop = before


@contextmanager
def delay_stops() -> Iterator[None]:
    """Delay a Stop that comes in this context until the context ends."""
    stops = Stops()  # before `try`, so that `finally` has it whenever the Stop comes
    try:
        with stops:
            yield
    finally:
        if stops.count:
            signal.raise_signal(signal.SIGINT)


def _active_stops() -> Stops | None:
    owner = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    return owner if isinstance(owner, Stops) else None


def is_main_thread() -> bool:
    """Return True on the main thread, the only thread in which Python handles signals."""
    return threading.current_thread() is threading.main_thread()


class IdleStop:
    """Calls `stop` if Stop is pressed while no cell runs, as long as `is_wanted()` is true.

    ipykernel ignores SIGINT between cells.  It installs its own handler for each cell, and restores
    the former handler at the cell's end.  So this class installs and removes its handler only
    between cells, on the event loop.
    """

    def __init__(self, stop: Callable[[], None], is_wanted: Callable[[], bool]) -> None:
        self._stop = stop
        self._is_wanted = is_wanted
        self._is_installed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def update(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Install the handler if `is_wanted()`, and remove it otherwise; `stop` will run on `loop`.

        The handler is installed only while SIGINT is ignored, that is, between cells.  While a cell
        runs, the handler cannot be removed, because ipykernel would restore it at the cell's end;
        then the loop calls this method again later.  Without `loop`, the last loop is used.
        """
        self._loop = loop or self._loop
        handler, loop = signal.getsignal(signal.SIGINT), self._loop
        if self._is_wanted() and loop is not None:
            if handler is signal.SIG_IGN:
                signal.signal(signal.SIGINT, self._handle_signal)
                self._is_installed = True
        elif self._is_installed and handler == self._handle_signal:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            self._is_installed = False
        elif self._is_installed and loop is not None and not loop.is_closed():
            loop.call_later(LOOK_AGAIN, self.update)

    def _handle_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._loop is not None:  # `stop` is not called here: the signal may interrupt a drawing
            self._loop.call_soon_threadsafe(self._stop)
