"""Agents that come by themselves: somebody, or something, runs `nbdist join` on each machine.

By hand in a terminal, by torchrun, mpirun or a batch job, as a Kubernetes job: whatever can run
one command.  Nothing is started here; the key lies where the command finds it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from nbdist.cluster.launcher import Launched
from nbdist.wire.offers import drop_dead_offers, place_of, write_offer
from nbdist.wire.ticket import Ticket
from nbdist.wire.wanted import Wanted

WAIT_TIMEOUT = 3600.0
"""Seconds for all machines to come: a queue may be in between, and Stop ends the wait."""


class Offer:
    """The world's key in the user's state folder, as long as the world is there."""

    host = ""

    def __init__(self, ticket: Ticket) -> None:
        self.command = f"nbdist join {place_of(ticket)}"
        self._file = write_offer(ticket)
        # Turns readable when something ends, and nothing does here.
        self._fd = os.eventfd(0)

    def __repr__(self) -> str:
        return f"<Offer {self._file}>"

    def fileno(self) -> int:
        """Return a descriptor that never turns readable."""
        return self._fd

    def exit_code(self) -> None:
        """Return None: it has not ended."""
        return

    def last_lines(self) -> list[str]:
        """Return nothing: it writes nothing."""
        return []

    def complaint(self) -> str:
        """Return nothing: it does not end by itself."""
        return ""

    def end(self, timeout: float) -> None:
        """Take the key back."""
        with suppress(OSError):
            self._file.unlink()

    def close(self) -> None:
        """Let go of the descriptor."""
        os.close(self._fd)


class JoinLauncher:
    """`--launcher join`."""

    def launch(self, wanted: Wanted, ticket: Ticket, folder: Path) -> Launched:
        """Wait for as many machines as there shall be at least."""
        drop_dead_offers()
        offer = Offer(ticket)
        return Launched(
            [offer], wanted.min_nodes, invitation=offer.command, arrive_timeout=WAIT_TIMEOUT
        )
