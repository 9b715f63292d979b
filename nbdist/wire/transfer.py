"""The links between the head and the agents of its world: messages, and shared memory.

Each end of a link has a `Numbered`, so that no message is lost or read twice as long as the link
exists, even if connections are lost.  Messages are numbered, and each header says which message its
sender has read last.  An end keeps messages that the other end may not have read.  On a new
connection both ends send the kept messages again, and read only the message with the next number.

A segment crosses a link once for all ranks of a node.  The process that lacks the segment requests
piece after piece (`Receiving`), and stores the pieces in a copy of its own; the other process reads
each piece and keeps no state (`piece_of`).  A message that refers to the segment is changed to
refer to the copy (`nbdist.values.payload.relocate`).

How long the copy of a segment is kept:

- The copy of a notebook's segment stays on a node as long as the notebook has the segment open or a
  task waits for the copy.  The head checks this (`is_open`), and sends `Drop`.
- The copy of a rank's segment stays until the notebook has read the values (`ReleaseRankValues`),
  the rank gets its next task, or the world ends.
- An incomplete copy is dropped when the link is lost, or when no task waits for the copy any more.
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
"""The layout of a header: the kind, the number of the message (0 for other kinds than MESSAGE), and
the number of the last message that the sender has read."""


class FrameKind(Enum):
    """The kind of a transmission, in its header.

    The frames of a message follow the header of a MESSAGE.  The identity of an agent follows the
    header of an ENDED that is sent to the head.  All other headers are sent alone.
    """

    MESSAGE = b"m"
    BEAT = b"b"
    AGAIN = b"a"
    """From an agent that has connected again: the head must send the kept messages again."""
    ENDED = b"e"
    """If sent to the head: the agent whose identity follows has ended.  If sent to an agent: the
    head has given up the link to this agent."""


class Mismatch(Exception):
    """The other end has read more messages than this end has sent.

    So this end must have given up the link before, and has begun to count messages from 0 again.
    """


class Numbered:
    """One end of a link: numbers the messages that it sends, and checks the numbers it receives.

    A sent message is kept until the other end has acknowledged it.
    """

    def __init__(self) -> None:
        self._kept: deque[Sequence[Frame]] = deque()
        self._last_sent = 0
        self._last_read = 0
        self._acknowledged = 0

    @property
    def has_read(self) -> bool:
        """Whether this end has read messages that it has not acknowledged yet.

        Each header that this end sends acknowledges all messages that it has read.
        """
        return self._acknowledged < self._last_read

    def message(self, frames: Sequence[Frame]) -> list[Frame]:
        """Keep the frames of a message, and return a header with the next number and the frames."""
        self._last_sent += 1
        self._kept.append(frames)
        return [self._header(FrameKind.MESSAGE, self._last_sent), *frames]

    def bare_header(self, kind: FrameKind) -> bytes:
        """Return the header of a transmission that is no message, and so has no number."""
        return self._header(kind, 0)

    def replay(self) -> Iterator[list[Frame]]:
        """Yield all kept messages with their headers, to send them on a new connection."""
        first = self._last_sent - len(self._kept) + 1
        for number, frames in enumerate([*self._kept], first):
            yield [self._header(FrameKind.MESSAGE, number), *frames]

    def read_header(self, header: bytes) -> FrameKind | None:
        """Read the header of a transmission, and drop the kept messages that it acknowledges.

        Returns the kind of the transmission.  Returns None for a message that the caller must
        ignore, because its number is not the next one.  Raises BadFrame if the header is
        unreadable, and Mismatch if it acknowledges more than was sent; the header then has no
        effect.
        """
        try:
            sign, number, read = HEADER.unpack(header)
            kind = FrameKind(sign)
        except (struct.error, ValueError) as error:
            raise BadFrame(f"a header of {len(header)} bytes: {error}") from None
        if read > self._last_sent:
            raise Mismatch
        while len(self._kept) > self._last_sent - read:
            self._kept.popleft()
        if kind is FrameKind.MESSAGE:
            if number != self._last_read + 1:
                return None
            self._last_read = number
        return kind

    def _header(self, kind: FrameKind, number: int) -> bytes:
        self._acknowledged = self._last_read
        return HEADER.pack(kind.value, number, self._last_read)


# --- segments of shared memory ----------------------------------------------------------------

TRANSFER_PIECE, FIRST_WINDOW, MAX_WINDOW, MAX_DELAY = 1 << 20, 4, 16, 0.25
"""Limits of the pieces of segments that are in flight at a time.

A piece has up to TRANSFER_PIECE bytes.  At first FIRST_WINDOW pieces are in flight, and later at
most MAX_WINDOW.  If a piece takes MAX_DELAY seconds longer than the fastest piece, fewer pieces are
requested at a time, because other messages wait behind the pieces that are in flight.
"""


class Fetch(NamedTuple):
    """Request a piece of a segment, from `offset` on; answered by exactly one `SegmentPiece`."""

    ref: SegmentRef
    offset: int


class SegmentPiece(NamedTuple):
    """Bytes of the segment with this path on the sender's machine; b"" if the segment is gone."""

    path: str
    offset: int
    data: bytes | memoryview


class Drop(NamedTuple):
    """Head to agent: free the copy of this segment, complete or not."""

    path: str


def piece_of(fetch: Fetch) -> SegmentPiece:
    """Return the requested piece of a segment; its data is b"" if the segment is gone."""
    data = b""
    with suppress(SegmentGone), open(open_file(fetch.ref), "rb", buffering=0) as file:
        data = os.pread(file.fileno(), TRANSFER_PIECE, fetch.offset)
    return SegmentPiece(fetch.ref.path, fetch.offset, data)


@dataclass
class _Coming:
    """An incomplete copy of a segment, of which the first `requested` bytes were requested.

    The future `end` gets a text as its result.  If the copy cannot be filled, the text is the
    reason.  If the copy is complete, was dropped, or the segment is gone, the text is "".
    """

    ref: SegmentRef
    blank: Blank
    end: asyncio.Future[str]
    requested: int = 0


class Receiving:
    """Copies segments of the process at the other end of a link into segments of this process.

    `send` sends a `Fetch` to the other end.  The caller passes each answer to `add_piece`, in the
    order of the requests.
    """

    def __init__(self, send: Callable[[Fetch], None]) -> None:
        self._send = send
        self._coming: dict[str, _Coming] = {}
        self._segments: dict[str, Segment] = {}
        self._request_times: deque[float] = deque()
        """When each piece in flight was requested; the answers come in the same order."""
        self._window = FIRST_WINDOW
        self._least_delay = float("inf")

    def __repr__(self) -> str:
        pieces = f"{len(self._request_times)} of {self._window} pieces under way"
        return f"<Receiving {len(self._coming)} segments, {pieces}, has {len(self._segments)}>"

    async def copy_segments(self, refs: Iterable[SegmentRef]) -> str:
        """Copy segments to this process, and wait for the copies.

        Returns "", or a message if there is too little memory for a copy.  A segment that is gone,
        or that was dropped meanwhile, is no error, but `places` then lacks the segment.
        """
        futures = []
        for ref in refs:
            if ref.path in self._segments:
                continue
            if ref.path not in self._coming:
                try:
                    blank = Blank(ref.sizes)
                except (NotEnoughMemory, OSError) as error:
                    return str(error)
                future = asyncio.get_running_loop().create_future()
                self._coming[ref.path] = _Coming(ref, blank, future)
            futures.append(self._coming[ref.path].end)
        self._request_pieces()
        if futures:
            await asyncio.wait(futures)
        return next(filter(None, (future.result() for future in futures)), "")

    def add_piece(self, piece: SegmentPiece) -> None:
        """Store a piece in the copy of its segment, and request further pieces."""
        delay = time.monotonic() - self._request_times.popleft()
        # A slow piece has waited on the link behind other pieces.  A message that interrupts a cell
        # would wait as long, so request fewer pieces at a time.
        self._least_delay = min(self._least_delay, delay)
        step = 1 if delay - self._least_delay < MAX_DELAY else -1
        self._window = min(max(1, self._window + step), MAX_WINDOW)
        coming = self._coming.get(piece.path)
        # Ignore a piece of a copy that was dropped meanwhile, and perhaps begun again.
        if coming is not None and piece.offset == coming.blank.filled:
            self._fill(coming, piece)
        self._request_pieces()

    def _request_pieces(self) -> None:
        for coming in self._coming.values():
            while coming.requested < coming.blank.total and len(self._request_times) < self._window:
                self._request_times.append(time.monotonic())
                self._send(Fetch(coming.ref, coming.requested))
                coming.requested += TRANSFER_PIECE

    def _fill(self, coming: _Coming, piece: SegmentPiece) -> None:
        blank, problem = coming.blank, ""
        try:
            for _ in blank.writing(memoryview(piece.data), piece.offset):
                pass
        except OSError as error:  # memory ran out after `Blank` had found enough
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
        """Return how many bytes of these segments have arrived."""
        total = 0
        for ref in refs:
            if coming := self._coming.get(ref.path):
                total += coming.blank.filled
            elif ref.path in self._segments:
                total += length_of(ref)
        return total

    def places(self, refs: Iterable[SegmentRef]) -> dict[str, SegmentRef]:
        """Return references to complete copies of these segments, by the paths of the segments."""
        return {
            ref.path: self._segments[ref.path].ref for ref in refs if ref.path in self._segments
        }

    def drop(self, paths: Iterable[str]) -> None:
        """Free the copies of the segments with these paths, complete or not.

        A process that has mapped a copy can still use this copy.
        """
        for path in paths:
            if coming := self._coming.get(path):
                self._end(coming)
            if segment := self._segments.pop(path, None):
                segment.close()

    def abandon(self) -> None:
        """Free all incomplete copies, because the link is lost."""
        self.drop([*self._coming])
        self._request_times.clear()

    def close(self) -> None:
        """Free all copies, complete or not."""
        self.abandon()
        self.drop([*self._segments])
