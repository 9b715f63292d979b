"""Replaces dead ranks while no notebook does so.

Runs in the process that serves the notebook: the agent, or the head if the world has several
machines.  Mostly the notebook asks for healing itself, within milliseconds after a task in which a
rank has died.  But the notebook's thread may be blocked in C code for long, or the world may be
detached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nbdist.agent.world_record import WorldRecord
from nbdist.output.events import Died, Output
from nbdist.wire import messages

NOTEBOOK_HEALS_WITHIN = 2.0
"""Seconds that this process waits for a notebook's message, before it asks for healing itself.

A notebook locates the surviving ranks before it asks for healing, which may take a second.
"""


class UnattendedHealing:
    """Asks for healing once a rank has died, all ranks are idle, and no notebook asks for it.

    It asks by a call of `heal`.  If the group cannot be formed then, the notebook's next cell tries
    again.  The object belongs to the `NotebookLink`.
    """

    def __init__(self, record: WorldRecord, heal: Callable[[], None]) -> None:
        self._record, self._heal = record, heal
        self._is_due = False  # whether there may be a death to heal
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<UnattendedHealing {'due' if self._is_due else 'not due'}>"

    def observe(self, task_id: str, output: Output, *, is_detached: bool) -> None:
        """Record that a rank has died, if `output` says so.

        The death of an idle rank counts only in a detached world, because a notebook that is not
        busy replaces such a rank with its next cell.
        """
        if isinstance(output, Died) and (task_id or is_detached):
            self._is_due = True

    def receive(self, message: messages.Down) -> None:
        """Restart the timer, because a message of the notebook shows that it is not blocked.

        Acknowledgements of outputs do not show this, and are ignored.  After Stop the notebook
        decides alone when to heal.
        """
        match message:
            case messages.BatchAcknowledged():  # sent by a thread, also while the notebook is busy
                return
            case messages.Interrupt():
                self._is_due = False
        self._stop_timer()
        self.check()

    def detach(self) -> None:
        """Begin to heal also deaths of which the notebook knew when the world was detached."""
        self._is_due = True
        self.check()

    def forget(self) -> None:
        """Forget the deaths so far: the workers are ended, or a notebook has attached.

        A notebook that has attached asks for healing with its first cell.
        """
        self._is_due = False
        self._stop_timer()

    def check(self) -> None:
        """Start the timer if healing is possible now, else stop it; called after each message."""
        if not (self._is_due and self._can_heal):
            self._stop_timer()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(NOTEBOOK_HEALS_WITHIN, self._heal_now)

    @property
    def _can_heal(self) -> bool:
        record = self._record
        if record.facts is None or record.pending_calls or record.running_ranks:
            return False
        deaths = record.facts.dead.values()
        # Without a lost machine all ranks keep their numbers, as the next notebook expects.  The
        # notebook itself asks for new workers in place of those that it has killed for a restart.
        are_usual = all(each.exit_code is not None and not each.by_restart for each in deaths)
        return bool(deaths) and are_usual and record.heals

    def _heal_now(self) -> None:
        self._timer, self._is_due = None, False
        self._heal()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
