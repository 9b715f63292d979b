"""What goes over a link between machines: messages, each once, and shared memory in pieces.

Each end has a `Numbered`.  A message has the next number, and says up to which number its sender
has read; what the other end has not read yet is kept.  On a new connection both send again what
they have kept, and each takes the next number alone.

Head and agents carry shared memory over their link, once for all ranks of a node, into segments of
their own, and pass on what refers to it with the `SegmentRef` that is good there
(`nbdist.values.payload.moved`).  A process without a segment asks for it, a piece at a time
(`Receiving`); the other reads the piece, and remembers nothing (`piece_of`).

How long a segment is kept:

- What goes down is on a node for as long as the notebook has it open; the head looks after that
  (`nbdist.values.payload.is_there`), and says `Drop`.
- What comes up stays until the notebook has read it (`ReleaseValues`), the rank gets its next task,
  or the world ends.
- What is under way is dropped with its link, and where nothing waits for it any more.
"""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from nbdist.errors import NotEnoughMemory
from nbdist.values.payload import Blank, Segment, SegmentGone, SegmentRef, length_of, open_file
from nbdist.wire.frames import BadFrame

Frame = bytes | memoryview

HEADER = struct.Struct("<cQQ")
"""The kind, the number of a message or 0, and that up to which its sender has read."""


class Kind(Enum):
    """What follows the header: a message, or nothing but for `ENDED`."""

    MESSAGE = b"m"
    BEAT = b"b"
    AGAIN = b"a"
    """This is a new connection of an agent that was here before."""
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
        """Take in what comes; None for a message that is not the next one.

        Raises Mismatch, and BadFrame for a header that cannot be read, of which nothing is taken.
        """
        try:
            sign, number, read = HEADER.unpack(header)
            kind = Kind(sign)
        except (struct.error, ValueError) as error:
            raise BadFrame(f"a header of {len(header)} bytes: {error}") from None
        if read > self._last:
            raise Mismatch
        while len(self._kept) > self._last - read:
            self._kept.popleft()
        if kind is Kind.MESSAGE:
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
that a piece may wait for others on the link: beyond it fewer are asked for at a time."""


class Fetch(NamedTuple):
    """Send a piece of this segment, from `offset` on; answered by exactly one `Piece`."""

    ref: SegmentRef
    offset: int


class Piece(NamedTuple):
    """Bytes of the segment that the sender knows by this path; none where it is gone."""

    path: str
    offset: int
    data: bytes | memoryview


class Drop(NamedTuple):
    """What has come of this segment, or all of it, is used no more."""

    path: str


def piece_of(fetch: Fetch) -> Piece:
    """Read the piece that is asked for."""
    data = b""
    with suppress(SegmentGone), open(open_file(fetch.ref), "rb", buffering=0) as file:
        data = os.pread(file.fileno(), PIECE, fetch.offset)
    return Piece(fetch.ref.path, fetch.offset, data)


@dataclass
class _Coming:
    """A segment of which `asked` bytes have been asked for; `end` has what went wrong, or ""."""

    ref: SegmentRef
    blank: Blank
    end: asyncio.Future[str]
    asked: int = 0


class Receiving:
    """What comes over one link, put into segments of this process, some pieces at a time.

    `send` asks the other end; `take` is to be called with what it answers, in order.
    """

    def __init__(self, send: Callable[[Fetch], None]) -> None:
        self._send = send
        self._coming: dict[str, _Coming] = {}
        self._segments: dict[str, Segment] = {}
        self._under_way: deque[float] = deque()
        """When each piece was asked for that has not come."""
        self._window = FIRST_WINDOW
        self._least_delay = float("inf")

    def __repr__(self) -> str:
        pieces = f"{len(self._under_way)} of {self._window} pieces under way"
        return f"<Receiving {len(self._coming)} segments, {pieces}, has {len(self._segments)}>"

    async def bring(self, refs: Iterable[SegmentRef]) -> str:
        """Bring these here; return why there is no room for one, else "".

        One that is gone, or dropped meanwhile, is not here then (`places`).
        """
        ends = []
        for ref in refs:
            if ref.path in self._segments:
                continue
            if ref.path not in self._coming:
                try:
                    blank = Blank(ref.sizes)
                except (NotEnoughMemory, OSError) as error:
                    return str(error)
                end = asyncio.get_running_loop().create_future()
                self._coming[ref.path] = _Coming(ref, blank, end)
            ends.append(self._coming[ref.path].end)
        self._go_on()
        if ends:
            await asyncio.wait(ends)
        return next(filter(None, (end.result() for end in ends)), "")

    def take(self, piece: Piece) -> None:
        """Put it where it belongs, and ask for more."""
        delay = time.monotonic() - self._under_way.popleft()
        # Fewer at a time where pieces wait for one another: they are in the way of Stop.
        self._least_delay = min(self._least_delay, delay)
        step = 1 if delay - self._least_delay < MOST_DELAY else -1
        self._window = min(max(1, self._window + step), MOST_WINDOW)
        coming = self._coming.get(piece.path)
        # A segment that was dropped and is asked for again comes twice, in part.
        if coming is not None and piece.offset == coming.blank.filled:
            self._fill(coming, piece)
        self._go_on()

    def _go_on(self) -> None:
        for coming in self._coming.values():
            while coming.asked < coming.blank.total and len(self._under_way) < self._window:
                self._under_way.append(time.monotonic())
                self._send(Fetch(coming.ref, coming.asked))
                coming.asked += PIECE

    def _fill(self, coming: _Coming, piece: Piece) -> None:
        blank, problem = coming.blank, ""
        try:
            for _ in blank.writing(memoryview(piece.data), piece.offset):
                pass
        except OSError as error:  # the machine is out of it all the same
            problem = f"{blank.total:,} bytes of shared memory could not be filled: "
            problem += error.strerror or str(error)
        if blank.filled == blank.total:
            self._segments[piece.path] = blank.sealed()
        if problem or not piece.data or piece.path in self._segments:
            self._end(coming, problem)

    def _end(self, coming: _Coming, problem: str = "") -> None:
        del self._coming[coming.ref.path]
        coming.blank.close()
        coming.end.set_result(problem)

    def count(self, refs: Iterable[SegmentRef]) -> int:
        """Count the bytes of these that have come."""
        total = 0
        for ref in refs:
            if coming := self._coming.get(ref.path):
                total += coming.blank.filled
            elif ref.path in self._segments:
                total += length_of(ref)
        return total

    def places(self, refs: Iterable[SegmentRef]) -> dict[str, SegmentRef]:
        """Return for those of these that have come where they can be opened here."""
        return {
            ref.path: self._segments[ref.path].ref for ref in refs if ref.path in self._segments
        }

    def drop(self, paths: Iterable[str]) -> None:
        """Let go of these, whole or not; a process that has mapped one keeps that."""
        for path in paths:
            if coming := self._coming.get(path):
                self._end(coming)
            if segment := self._segments.pop(path, None):
                segment.close()

    def abandon(self) -> None:
        """Let go of all that is not whole: nothing more comes."""
        self.drop([*self._coming])
        self._under_way.clear()

    def close(self) -> None:
        """Let go of everything."""
        self.abandon()
        self.drop([*self._segments])
