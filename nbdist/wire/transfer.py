"""What goes over a link between machines: messages, each once, and shared memory in pieces.

Each end has a `Numbered`.  A message has the next number, and says up to which number its sender
has read; what the other end has not read yet is kept.  On a new connection both send again what
they have kept, and each takes the next number alone.

Head and agents carry shared memory over their link, once for all ranks of a node, into segments of
their own, and pass on what refers to it with the `SegmentRef` that is good there
(`nbdist.values.payload.moved`): with a `Sending` and a `Receiving` at each end, which do no I/O.

How long a segment is kept:

- What goes down is on a node for as long as the notebook has it open; the head looks after that
  (`nbdist.values.shared_memory.is_there`), and says `Dropped`.
- What comes up stays until the notebook has read it (`LetGo`), the rank gets its next task, or the
  world ends.
- What is under way is dropped with its link, and where nobody waits for it any more.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from nbdist.errors import NotEnoughMemory
from nbdist.values.shared_memory import Blank, Segment, SegmentRef, length_of, open_file

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

    @property
    def has_read(self) -> bool:
        """Whether anything has come of which the other end has not been told."""
        return self._told < self._read

    def message(self, frames: Sequence[Frame]) -> list[Frame]:
        """Return a message with the next number, and keep it."""
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


# --- segments of shared memory ----------------------------------------------------------------

PIECE, FIRST_WINDOW, MOST_WINDOW, MOST_DELAY = 1 << 20, 4, 16, 0.25
"""Bytes in a message, for some of which others wait at most; pieces that may be under way; seconds
that a piece may wait for others on the link: beyond it fewer are sent at a time."""


class Piece(NamedTuple):
    """Some bytes of the segment that the sender knows by this reference, from `offset` on."""

    ref: SegmentRef
    offset: int
    data: bytes | memoryview


class Taken(NamedTuple):
    """The answer to a piece: the receiver has the segment up to `end`, nothing with a `problem`."""

    path: str
    end: int
    problem: str = ""


class Dropped(NamedTuple):
    """Sender to receiver: what has come of these segments, or all of them, is used no more."""

    paths: tuple[str, ...]


@dataclass
class _Transfer:
    """A segment that is `sent` so far, and `taken` by the receiver; the descriptor is its own."""

    ref: SegmentRef
    fd: int
    total: int
    sent: int = 0
    taken: int = 0


class Sending:
    """What is sent over one link: one segment after the other, some pieces at a time.

        sending.add(ref)
        while piece := sending.next(now):
            link.send(piece)

    and so again after each `Taken`, with which `taken` is called.  At `most` so many pieces are
    under way.
    """

    def __init__(self) -> None:
        self.most = MOST_WINDOW
        self._window = FIRST_WINDOW
        self._transfers: dict[str, _Transfer] = {}
        self._under_way: deque[tuple[str, float]] = deque()  # and when it was sent
        self._least_delay = float("inf")
        self.there: set[str] = set()
        """The paths of the segments that the receiver has, all of each."""

    def __repr__(self) -> str:
        left = sum(each.total - each.sent for each in self._transfers.values())
        return f"<Sending {left:,} bytes, {len(self._under_way)} of {self._window} under way>"

    def add(self, ref: SegmentRef) -> bool:
        """Send this one too, and return True, unless it is there; raises SegmentGone."""
        if ref.path in self.there:
            return False
        if ref.path not in self._transfers:
            self._transfers[ref.path] = _Transfer(ref, open_file(ref), length_of(ref))
        return True

    def next(self, now: float) -> Piece | None:
        """Return what is to be sent next; None where that has to wait, or there is nothing."""
        if len(self._under_way) >= min(self._window, self.most):
            return None
        for transfer in self._transfers.values():
            if transfer.sent < transfer.total:
                size = min(PIECE, transfer.total - transfer.sent)
                data = os.pread(transfer.fd, size, transfer.sent)
                piece = Piece(transfer.ref, transfer.sent, data)
                transfer.sent += len(data)
                self._under_way.append((transfer.ref.path, now))
                return piece
        return None

    def taken(self, taken: Taken, now: float) -> bool:
        """Note an answer; return True for the last of its segment, which is there or refused."""
        path, end = taken.path, taken.end
        if taken.problem:  # to what was sent of it after that there is no answer
            self._under_way = deque(each for each in self._under_way if each[0] != path)
        elif self._under_way:
            delay = now - self._under_way.popleft()[1]
            # Fewer at a time where pieces wait for one another: they are in the way of Stop.
            self._least_delay = min(self._least_delay, delay)
            step = 1 if delay - self._least_delay < MOST_DELAY else -1
            self._window = min(max(1, self._window + step), self.most)
        transfer = self._transfers.get(path)
        if transfer is None:
            return False
        transfer.taken = end
        if end < transfer.total and not taken.problem:
            return False
        del self._transfers[path]
        os.close(transfer.fd)
        if not taken.problem:
            self.there.add(path)
        return True

    def left(self, path: str) -> int:
        """Count the bytes of one that the receiver does not have yet."""
        transfer = self._transfers.get(path)
        return transfer.total - transfer.taken if transfer else 0

    def forget(self, path: str) -> None:
        """Note that the receiver lets go of this one by itself."""
        self.there.discard(path)

    def drop(self, paths: Iterable[str]) -> Dropped | None:
        """Send these no more, or take them back; what to tell the receiver, None for nothing."""
        known = tuple(path for path in paths if path in self._transfers or path in self.there)
        for path in known:
            self.there.discard(path)
            if transfer := self._transfers.pop(path, None):
                os.close(transfer.fd)
        return Dropped(known) if known else None

    def close(self) -> None:
        """Send nothing more."""
        self.drop([*self._transfers])
        self._under_way.clear()


class Receiving:
    """What comes over one link, put into segments of this process."""

    def __init__(self) -> None:
        self._blanks: dict[str, Blank] = {}
        self._segments: dict[str, Segment] = {}

    def __repr__(self) -> str:
        return f"<Receiving {len(self._blanks)} segments, has {len(self._segments)}>"

    def take(self, piece: Piece) -> Taken | None:
        """Put it where it belongs; the answer, None for a piece of what is wanted no more."""
        path, total = piece.ref.path, length_of(piece.ref)
        if path in self._segments:
            return Taken(path, total)
        if piece.offset == 0:
            self._forget([path])
        elif path not in self._blanks:
            return None
        try:
            return Taken(path, self._fill(piece))
        except NotEnoughMemory as error:
            problem = str(error)
        except OSError as error:  # the machine is out of it all the same
            problem = f"{total:,} bytes of shared memory could not be filled: {error.strerror}"
        self._forget([path])
        return Taken(path, 0, problem)

    def _fill(self, piece: Piece) -> int:
        path = piece.ref.path
        if path not in self._blanks:
            self._blanks[path] = Blank(piece.ref.sizes)
        blank = self._blanks[path]
        end = piece.offset + len(piece.data)
        if piece.offset != blank.filled or not blank.filled < end <= blank.total:
            raise OSError(0, f"bytes {piece.offset:,}-{end:,} came after {blank.filled:,}")
        for _ in blank.writing(memoryview(piece.data), piece.offset):
            pass
        if end == blank.total:
            self._segments[path] = self._blanks.pop(path).sealed()
        return end

    def places(self, refs: Iterable[SegmentRef]) -> dict[str, SegmentRef]:
        """Return for those of these that have come where they can be opened here."""
        return {
            ref.path: self._segments[ref.path].ref for ref in refs if ref.path in self._segments
        }

    def drop(self, paths: Iterable[str]) -> None:
        """Let go of these, whole or not; whoever has mapped one keeps that."""
        paths = tuple(paths)
        self._forget(paths)
        for path in paths:
            if segment := self._segments.pop(path, None):
                segment.close()

    def abandon(self) -> None:
        """Let go of all that is not whole: nothing more comes."""
        self._forget([*self._blanks])

    def close(self) -> None:
        """Let go of everything."""
        self.abandon()
        self.drop([*self._segments])

    def _forget(self, paths: Iterable[str]) -> None:
        for path in paths:
            if begun := self._blanks.pop(path, None):
                begun.close()
