"""Messages over a connection that may be lost: numbered, acknowledged, and sent again on the next.

Either end of a link has a `Numbered`.  What it sends has the number after that of the message
before, and says up to which number it has read from the other; what that has not read yet is
kept.  On a new connection both send again what they have kept, and each takes the next number
alone: neither what it has already, nor what was sent before the new connection was known.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum

Frame = bytes | memoryview

HEADER = struct.Struct("<cQQ")
"""The kind, the number of a message or 0, and that up to which its sender has read."""


class Kind(Enum):
    """What follows the header: a message, or nothing but for `ENDED`."""

    MESSAGE = b"m"
    BEAT = b"b"
    AGAIN = b"a"
    """This is a new connection of who was here before."""
    ENDED = b"e"
    """The agent of this identity has ended, which follows; to one: it has been given up."""


class Mismatch(Exception):
    """The other end has read what this one never sent: here its link was given up."""


class Numbered:
    """What one end has sent and the other may not have read, and how far itself has read."""

    def __init__(self) -> None:
        self._kept: deque[Sequence[Frame]] = deque()
        self._last = 0
        self._read = 0
        self._told = 0

    def __repr__(self) -> str:
        return f"<Numbered sent {self._last}, {len(self._kept)} kept, read {self._read}>"

    @property
    def has_read(self) -> bool:
        """Whether anything has come of which the other end has not been told."""
        return self._told < self._read

    def message(self, frames: Sequence[Frame]) -> list[Frame]:
        """Give a message the next number, and keep it."""
        self._last += 1
        self._kept.append(frames)
        return [self._header(Kind.MESSAGE, self._last), *frames]

    def sign(self, kind: Kind) -> bytes:
        """Make one of the other kinds."""
        return self._header(kind, 0)

    def again(self) -> Iterator[list[Frame]]:
        """Yield all that the other end may not have."""
        first = self._last - len(self._kept) + 1
        for number, frames in enumerate([*self._kept], first):
            yield [self._header(Kind.MESSAGE, number), *frames]

    def take(self, header: bytes) -> Kind | None:
        """Take in what comes; None for a message that is not the next one.  Raises Mismatch."""
        sign, number, read = HEADER.unpack(header)
        if read > self._last:
            raise Mismatch
        while len(self._kept) > self._last - read:
            self._kept.popleft()
        if (kind := Kind(sign)) is Kind.MESSAGE:
            if number != self._read + 1:
                return None
            self._read = number
        return kind

    def _header(self, kind: Kind, number: int) -> bytes:
        self._told = self._read
        return HEADER.pack(kind.value, number, self._read)
