"""Who was refused at the gate: told from what libzmq's monitor says of each connection."""

from __future__ import annotations

import zmq

FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

HEARD = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | FAILED
"""The events that are looked at (libzmq 4.3.5)."""

SAID_ALL = 20
"""So many are said one by one; of the others, those whose number is a power of two."""


class Refusals:
    """Counts connections that had no right key, or said what only somebody without one says.

    One that goes away before it has said anything is none of them: agents try out by which address
    the head can be reached.
    """

    def __init__(self) -> None:
        self.count = 0
        self._strangers: list[int] = []
        self._is_judged = False

    def __repr__(self) -> str:
        return f"<Refusals {self.count}>"

    def take(self, event: int, descriptor: int) -> bool:
        """Take in an event, of a connection's descriptor where it has one; whether it counts."""
        match event:
            case zmq.EVENT_ACCEPTED:
                self._strangers.append(descriptor)
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                # It is not said which; those who come do so within moments, one after the other.
                del self._strangers[:1]
            case zmq.EVENT_DISCONNECTED:
                return self._count(counts=self._is_unjudged_stranger(descriptor))
            case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._is_judged = True  # it went by itself
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._is_judged = True
                return self._count(counts=True)
        return False

    @property
    def is_worth_a_line(self) -> bool:
        """Whether the last one is to be in the log, which nobody shall be able to fill."""
        return self.count <= SAID_ALL or self.count & (self.count - 1) == 0

    def _is_unjudged_stranger(self, descriptor: int) -> bool:
        """Say whether one ended of which nothing was said before: what it sent was no greeting."""
        is_judged, self._is_judged = self._is_judged, False
        if descriptor not in self._strangers:
            return False
        self._strangers.remove(descriptor)
        return not is_judged

    def _count(self, *, counts: bool) -> bool:
        self.count += counts
        return counts
