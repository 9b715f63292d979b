"""Has IPython's own thread notice what workers do while no cell runs."""

from __future__ import annotations

import asyncio
import contextvars
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from nbdist.notebook.stops import is_main_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from IPython.core.interactiveshell import InteractiveShell

    from nbdist.world.link import Link


PAUSE, LONGEST_PAUSE = 0.25, 1.0
"""Seconds between two times."""

PAUSES_PER_NOTICE = 4
"""What a drawing takes, four times as long is none."""


class IdleWatch:
    """Have the event loop that runs the notebook's cells call `notice` on deaths and late output.

    While something `goes_on` also on all else that comes, and every `PAUSE` seconds.  A loop that
    runs between cells is what an ipykernel has; in a terminal each prompt has one of its own.
    """

    def __init__(self, notice: Callable[[], None]) -> None:
        self._notice = notice
        self._link: Link | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asides = -1
        self._notice_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._goes_on = False

    def __repr__(self) -> str:
        return f"<IdleWatch of {self._link}>"

    def follow(self, link: Link | None) -> None:
        """Watch this link from now on, and none that was watched before."""
        if link is self._link and not (self._loop and self._loop.is_closed()):
            return
        self.stop()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        if link is None or not is_main_thread():
            return
        # A descriptor of our own, which stays ours when the link is closed.
        self._link, self._loop, self._asides = link, loop, os.dup(link.asides)
        # In no cell's context: what is shown belongs to the cell that ran last, not to this one.
        contextvars.Context().run(loop.add_reader, self._asides, self._wake)

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The one that calls, None where there is none."""
        return self._loop

    @property
    def goes_on(self) -> bool:
        """Whether a task runs that nobody waits for."""
        return self._goes_on

    @goes_on.setter
    def goes_on(self, goes_on: bool) -> None:
        self._goes_on = goes_on
        if self._link is not None:
            self._link.tells_all = goes_on
        if goes_on and self._loop is not None and self._timer is None:
            # In no cell's context, as in `follow`.
            self._timer = contextvars.Context().run(self._loop.call_later, PAUSE, self._notice_now)

    def stop(self) -> None:
        """Watch nothing."""
        self._goes_on = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._loop is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._asides)
            os.close(self._asides)
        self._link = self._loop = None

    def _wake(self) -> None:
        is_closed = False
        with suppress(BlockingIOError):  # read already
            is_closed = os.read(self._asides, 4096) == b""
        loop = self._loop
        if is_closed:
            self.stop()
        if loop is None or is_closed:
            self._notice()
        elif self._timer is None:
            # A rank may write without end; each time what is shown is drawn anew.
            wait = max(0.0, self._notice_at - time.monotonic())
            self._timer = loop.call_later(wait, self._notice_now)
        elif self._goes_on:
            # It shows what there is as often as it should; more waits to be taken in.
            self._timer.cancel()
            self._timer = loop.call_later(0.0, self._notice_now)

    def _notice_now(self) -> None:
        self._timer = None
        started = time.monotonic()
        contextvars.Context().run(self._notice)
        now = time.monotonic()
        self._notice_at = now + min(LONGEST_PAUSE, max(PAUSE, PAUSES_PER_NOTICE * (now - started)))
        if self._goes_on:
            self.goes_on = True


def at_next_prompt(shell: InteractiveShell, call: Callable[[], None]) -> None:
    """Have this called on the event loop of a terminal's next prompt; nothing where none comes."""
    prompt: Any = getattr(shell, "pt_app", None)
    if prompt is not None:
        prompt.app.pre_run_callables.append(call)
