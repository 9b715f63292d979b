"""The link between the head and the agents of other machines: messages, and shared memory.

Each end of a link has a `Numbered`, so that each message arrives exactly once although connections
are lost.  Messages are numbered; each also says up to which number its sender has read.  Messages
that the other end has not read yet are kept.  On a new connection both ends send them again, and
each end accepts only the message with the next number.

Shared memory crosses a link once for all ranks of a node.  The receiving process copies it into
segments of its own, and replaces the `SegmentRef` in what it passes on
(`nbdist.values.payload.relocate`).  The process that lacks a segment asks for one piece after the
other (`Receiving`); the other process reads the piece and keeps no state (`piece_of`).

How long a segment is kept:

- A segment from the notebook stays on a node as long as the notebook has it open.  The head checks
  that (`nbdist.values.payload.is_open`) and sends `Drop`.
- A segment from a rank stays until the notebook has read it (`ReleaseRankValues`), the rank gets
  its next task, or the world ends.
- An incomplete segment is dropped when its link is lost, or when no task waits for it any more.
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
"""The kind, the number of the message (0 for other kinds), and the number of the last message that
the sender has read."""


class FrameKind(Enum):
    """The kind of a transmission.  Only after MESSAGE and an agent's ENDED more frames follow."""

    MESSAGE = b"m"
    BEAT = b"b"
    AGAIN = b"a"
    """From an agent that has connected again: the head sends its kept messages again."""
    ENDED = b"e"
    """From an agent: the agent with the identity that follows has ended.  To an agent: the head
    counts it as lost."""


class Mismatch(Exception):
    """The other end has read messages that this end never sent: this end has given the link up."""


class Numbered:
    """Numbers the messages at one end of a link, and keeps each until the other end has read it."""

    def __init__(self) -> None:
        self._kept: deque[Sequence[Frame]] = deque()
        self._last_sent = 0
        self._last_read = 0
        self._acknowledged = 0

    @property
    def has_read(self) -> bool:
        """Whether this end has read a message since it last sent anything."""
        return self._acknowledged < self._last_read

    def message(self, frames: Sequence[Frame]) -> list[Frame]:
        """Return the frames with a header that has the next number, and keep them."""
        self._last_sent += 1
        self._kept.append(frames)
        return [self._header(FrameKind.MESSAGE, self._last_sent), *frames]

    def bare_header(self, kind: FrameKind) -> bytes:
        """Return a header of a kind that has no number."""
        return self._header(kind, 0)

    def replay(self) -> Iterator[list[Frame]]:
        """Yield all kept messages, for a new connection."""
        first = self._last_sent - len(self._kept) + 1
        for number, frames in enumerate([*self._kept], first):
            yield [self._header(FrameKind.MESSAGE, number), *frames]

    def read_header(self, header: bytes) -> FrameKind | None:
        """Read the header of a transmission, and drop the kept messages that it acknowledges.

        Return its kind, or None for a message that must be ignored: it is not the next one.
        Raises Mismatch, and BadFrame for an unreadable header; both leave the state as it was.
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
"""The bytes of a piece; how many pieces are asked for at a time, at first and at most; and the
seconds by which a piece may be slower than the fastest one before fewer are asked for at a time.

Other messages wait behind the pieces that are in flight.
"""


class Fetch(NamedTuple):
    """Request a piece of a segment, from `offset` on; answered by exactly one `SegmentPiece`."""

    ref: SegmentRef
    offset: int


class SegmentPiece(NamedTuple):
    """Bytes of the segment that has this path on the sender's machine; b"" if it is gone."""

    path: str
    offset: int
    data: bytes | memoryview


class Drop(NamedTuple):
    """Head to agent: release your copy of this segment, complete or not."""

    path: str


def piece_of(fetch: Fetch) -> SegmentPiece:
    """Read the requested piece; its data is b"" if the segment is gone."""
    data = b""
    with suppress(SegmentGone), open(open_file(fetch.ref), "rb", buffering=0) as file:
        data = os.pread(file.fileno(), TRANSFER_PIECE, fetch.offset)
    return SegmentPiece(fetch.ref.path, fetch.offset, data)


@dataclass
class _Coming:
    """An incomplete segment: `requested` bytes have been asked for.

    `end` gets the problem, or "" once the segment is complete, gone or dropped.
    """

    ref: SegmentRef
    blank: Blank
    end: asyncio.Future[str]
    requested: int = 0


class Receiving:
    """Copies segments of the process at the other end of a link into segments of this process.

    `send` sends a `Fetch` to the other end.  The caller passes the pieces that
    answer to `add_piece`, in order.
    """

    def __init__(self, send: Callable[[Fetch], None]) -> None:
        self._send = send
        self._coming: dict[str, _Coming] = {}
        self._segments: dict[str, Segment] = {}
        self._request_times: deque[float] = deque()
        """When each piece in flight was asked for; answers come in the same order."""
        self._window = FIRST_WINDOW
        self._least_delay = float("inf")

    def __repr__(self) -> str:
        pieces = f"{len(self._request_times)} of {self._window} pieces under way"
        return f"<Receiving {len(self._coming)} segments, {pieces}, has {len(self._segments)}>"

    async def copy_segments(self, refs: Iterable[SegmentRef]) -> str:
        """Copy segments to this process; return why a segment has no room here, or "".

        A segment that is gone, or was dropped meanwhile, is no reason: `places` lacks it then.
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
        """Store a piece in its segment, and ask for more pieces."""
        delay = time.monotonic() - self._request_times.popleft()
        # A slow piece has waited for others on the link, as a message of Stop would: ask for fewer.
        self._least_delay = min(self._least_delay, delay)
        step = 1 if delay - self._least_delay < MAX_DELAY else -1
        self._window = min(max(1, self._window + step), MAX_WINDOW)
        coming = self._coming.get(piece.path)
        # Other pieces answer an earlier request: the segment was dropped, and requested again.
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
        except OSError as error:  # memory ran out although `Blank` had checked it
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
        """Return by path the copies of these segments that are complete."""
        return {
            ref.path: self._segments[ref.path].ref for ref in refs if ref.path in self._segments
        }

    def drop(self, paths: Iterable[str]) -> None:
        """Release the copies of the segments with these paths, complete or not.

        A process that has mapped a segment can still use it.
        """
        for path in paths:
            if coming := self._coming.get(path):
                self._end(coming)
            if segment := self._segments.pop(path, None):
                segment.close()

    def abandon(self) -> None:
        """Release all incomplete copies: the link is lost."""
        self.drop([*self._coming])
        self._request_times.clear()

    def close(self) -> None:
        """Release all copies."""
        self.abandon()
        self.drop([*self._segments])
