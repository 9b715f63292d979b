"""Chooses which of the stopped ranks the front end's debugger shows.

Runs in the notebook's process, on the event loop of the kernel's control thread.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from nbdist.notebook.debug_protocol import Message
from nbdist.notebook.debug_session import Numbers, RankSession
from nbdist.words import name_ranks

if TYPE_CHECKING:
    from nbdist.world.agent_link import Link

SETTLE_TIME = 0.3
"""Seconds to wait for the other ranks after a rank has stopped, before a stopped rank is shown.

The ranks reach a line one after another, and only ranks that have stopped step together."""


class ShownRank:
    """Chooses the rank that the front end shows, and sends the front end events about it.

    `sessions` has the sessions of all ranks by the sessions' numbers; its owner adds and removes
    sessions.
    """

    def __init__(
        self,
        sessions: Mapping[int, RankSession],
        numbers: Numbers,
        publish_event: Callable[[Message], None],
    ) -> None:
        self._sessions, self._numbers, self._publish_event = sessions, numbers, publish_event
        self.entry: tuple[RankSession, int] | None = None  # the rank and thread on the page
        self.last_rank: int | None = None  # the rank that was shown last in the running cell
        self.chosen_rank: int | None = None  # the rank that the user chose by `%dist_debug -r`
        self.is_alone = False  # whether only the rank that is shown makes steps
        self._timer: asyncio.TimerHandle | None = None
        self._event_count = itertools.count(1)

    def __repr__(self) -> str:
        return f"<ShownRank {self.entry and self.entry[0].title}>"

    def hide(self, session: RankSession, thread: int | None = None) -> None:
        """If the front end shows this rank, report that the rank goes on.

        After `SETTLE_TIME`, a rank is shown if any is stopped then.  With `thread`, does
        nothing unless the front end shows this thread of the rank.
        """
        if self.entry is None or self.entry[0] is not session:
            return
        if thread is not None and self.entry[1] != thread:
            return
        shown_thread = self.entry[1]
        self.entry = None
        number = self._numbers.outer(session, "threadId", shown_thread)
        self._publish("continued", {"threadId": number, "allThreadsContinued": True})
        self._show_after_settling()

    def show_stopped(self, session: RankSession) -> None:
        """Handle that a rank has just stopped.

        If the user has chosen this rank, show it in place of another rank.  If no rank is shown,
        show one once all ranks have stopped, or after `SETTLE_TIME`.
        """
        is_chosen = self.chosen_rank is not None and session.rank == self.chosen_rank
        if is_chosen and self.entry is not None and self.entry[0].rank != session.rank:
            self._show(session)
        elif self.entry is None:
            if all(each.stopped for each in self._sessions.values()):
                self._show_first()
            else:
                self._show_after_settling()

    @property
    def _wanted_rank(self) -> int | None:
        return self.last_rank if self.chosen_rank is None else self.chosen_rank

    def _show_after_settling(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SETTLE_TIME, self._show_first)

    def _show_first(self) -> None:
        """Show the rank that the user has chosen, or without a choice the rank that was shown last.

        If that rank is not stopped, show the lowest stopped rank.  Do nothing if a rank is shown
        already, or if no rank is stopped.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        stopped = [each for each in self._sessions.values() if each.stopped]
        if self.entry is None and stopped:
            self._show(min(stopped, key=lambda each: (each.rank != self._wanted_rank, each.rank)))

    def choose(self, link: Link, rank: int, *, is_alone: bool) -> str:
        """Show this rank of a world, and return a line for the user.

        A rank that is not stopped is shown once it stops.  With `is_alone` only the shown rank
        steps, and not all stopped ranks together.  Returns "" if no rank of the world is stopped.
        """
        sessions = [each for each in self._sessions.values() if each.link is link]
        stopped = {each.rank: each for each in sessions if each.stopped}
        if not stopped:
            return ""
        self.chosen_rank, self.is_alone = rank, is_alone
        steps = "it steps alone" if is_alone else "all stopped ranks step together"
        if rank not in stopped:
            return f"rank {rank} is shown once it stops; stopped: {name_ranks(stopped)}"
        self._show(stopped[rank])
        return f"the debugger shows rank {rank}; {steps}"

    def _show(self, session: RankSession) -> None:
        thread, body = next(iter(session.stopped.items()))
        self.entry, self.last_rank = (session, thread), session.rank
        number = self._numbers.outer(session, "threadId", thread)
        self._publish("stopped", {**body, "threadId": number, "allThreadsStopped": True})

    def _publish(self, event: str, body: Message) -> None:
        content = {"seq": next(self._event_count), "type": "event", "event": event, "body": body}
        self._publish_event(content)
