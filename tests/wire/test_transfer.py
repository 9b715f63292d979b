"""Tests of `nbdist.wire.transfer`: a lost connection neither loses nor doubles a message.

Pieces of segments are exchanged here without a real link.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.errors import NotEnoughMemory
from nbdist.values import payload
from nbdist.values.payload import Segment, length_of, open_segment, run_to_end
from nbdist.wire import transfer
from nbdist.wire.transfer import (
    MAX_WINDOW,
    Fetch,
    Frame,
    FrameKind,
    Mismatch,
    Numbered,
    Receiving,
    SegmentPiece,
    piece_of,
)


class End:
    """An end of a link, with the frames that come, and the messages that it has read."""

    def __init__(self) -> None:
        self.talk = Numbered()
        self.coming: deque[Sequence[Frame]] = deque()
        self.read: list[bytes] = []

    def take(self) -> None:
        header, *frames = self.coming.popleft()
        if self.talk.read_header(bytes(header)) is FrameKind.MESSAGE:
            self.read += map(bytes, frames)


@given(st.lists(st.sampled_from(["send", "take", "beat", "lose", "connect"]), max_size=60))
def test_each_message_arrives_once_after_losses(steps: list[str]) -> None:
    """Each message arrives once and in order if the ends are connected again after all losses."""
    one, other = End(), End()
    sent: list[bytes] = []
    for number, step in enumerate([*steps, "connect"]):
        match step:
            case "send":
                sent.append(b"%d" % number)
                other.coming.append(one.talk.message([sent[-1]]))
            case "take" if other.coming:
                other.take()
            case "beat":
                one.coming.append([other.talk.bare_header(FrameKind.BEAT)])
                one.take()
            case "lose":
                other.coming.clear()
                one.coming.clear()
            case "connect":
                for end, peer in ((one, other), (other, one)):
                    peer.coming.append([end.talk.bare_header(FrameKind.AGAIN)])
                    peer.coming.extend(end.talk.replay())
    while other.coming:
        other.take()
    assert other.read == sent
    one.coming.append([other.talk.bare_header(FrameKind.BEAT)])
    while one.coming:
        one.take()
    assert [*one.talk.replay()] == []


def test_a_read_message_is_acknowledged_once() -> None:
    """A message that was read is acknowledged once, with the next message of its reader."""
    one, other = Numbered(), Numbered()
    assert not other.has_read
    assert other.read_header(bytes(one.message([b"1"])[0])) is FrameKind.MESSAGE
    assert other.has_read
    other.message([b"2"])
    assert not other.has_read
    # A new conversation refuses an end that has read messages of an older one.
    one, other = Numbered(), Numbered()
    other.read_header(bytes(one.message([b"1"])[0]))
    with pytest.raises(Mismatch):
        Numbered().read_header(other.bare_header(FrameKind.AGAIN))


SMALL_PIECE = 1000


@pytest.fixture(autouse=True)
def _leaves_nothing_open() -> Iterator[None]:
    """Checks that each test closes the descriptors that it opens."""
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture(autouse=True, scope="module")
def _small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "TRANSFER_PIECE", SMALL_PIECE)
        yield


def holding(*sizes: int) -> Segment:
    """Return a segment with frames of some sizes, in which bytes near one another differ."""
    frames = [bytes((i * 7 + size) % 251 for i in range(size)) for size in sizes]
    return run_to_end(Segment.filling(frames))


class Line:
    """A link with both of its ends: each step delivers a message, in order in each direction."""

    def __init__(self, seed: int = 0) -> None:
        self.asked: deque[Fetch] = deque()
        self.coming: deque[SegmentPiece] = deque()
        self.receiving = Receiving(self.asked.append)
        self.longest = 0
        self._random = random.Random(seed)

    def step(self) -> bool:
        """Deliver a message; return whether further messages are on the way."""
        self.longest = max(self.longest, len(self.asked) + len(self.coming))
        if self.asked and (not self.coming or self._random.random() < 0.5):
            self.coming.append(piece_of(self.asked.popleft()))
        elif self.coming:
            self.receiving.add_piece(self.coming.popleft())
        return bool(self.asked or self.coming)

    async def begin(self, *segments: Segment) -> asyncio.Task[str]:
        """Make the receiver ask for some segments."""
        bringing = asyncio.create_task(
            self.receiving.copy_segments([each.ref for each in segments])
        )
        await asyncio.sleep(0)
        return bringing

    async def bring(self, *segments: Segment) -> str:
        """Bring segments, with all that is under way; return why a segment has no room, or ""."""
        bringing = await self.begin(*segments)
        while self.step():
            pass
        return await bringing

    def assert_has(self, segment: Segment) -> None:
        """Check that a segment is whole at the other end, in memory of its own."""
        here = self.receiving.places([segment.ref])[segment.ref.path]
        assert here.path != segment.ref.path
        assert open_segment(here) == open_segment(segment.ref)
        assert self.receiving.count([segment.ref]) == length_of(segment.ref)

    def close(self) -> None:
        self.receiving.close()


frames = st.lists(st.integers(0, 2 * SMALL_PIECE + 1), max_size=4)


@given(st.lists(frames, min_size=1, max_size=5), st.integers(0, 1 << 16), st.data())
def test_segments_arrive_whole_in_any_order(all_sizes, seed, data):
    """Segments arrive whole, with frames of any sizes, and messages in any order."""

    async def arrives() -> None:
        with closing(Line(seed)) as line, ExitStack() as stack:
            segments = [stack.enter_context(holding(*sizes)) for sizes in all_sizes]
            bringing = []
            for segment in segments:
                bringing.append(await line.begin(segment))
                for _ in range(data.draw(st.integers(0, 5))):
                    line.step()
            assert await line.bring(*segments) == ""  # some segments for the second time
            assert {await each for each in bringing} == {""}
            assert line.longest <= MAX_WINDOW
            for segment in segments:
                line.assert_has(segment)

    asyncio.run(arrives())


@given(frames, frames, st.integers(0, 12), st.integers(0, 99))
def test_a_dropped_segment_leaves_nothing(sizes, others, steps, seed):
    """A segment dropped at any moment leaves nothing; others go on, and a new request succeeds."""

    async def is_dropped() -> None:
        with holding(*sizes) as one, holding(*others) as other, closing(Line(seed)) as line:
            before = len(os.listdir("/proc/self/fd"))
            bringing = await line.begin(one)
            for _ in range(steps):
                line.step()
            line.receiving.drop([one.ref.path, "/proc/1/fd/1#1"])
            assert await bringing == ""
            again = await line.begin(one)  # some pieces are on their way
            line.receiving.drop([one.ref.path])
            assert await again == ""
            await line.bring(other)
            assert line.receiving.places([one.ref]) == {}
            line.assert_has(other)
            assert len(os.listdir("/proc/self/fd")) == before + 1  # of the other segment
            await line.begin(one)
            await line.bring(one)
            line.assert_has(one)

    asyncio.run(is_dropped())


async def test_whole_segments_stay_if_a_sender_is_gone() -> None:
    """If a sender or its segment is gone, incomplete segments are dropped, and whole ones stay."""
    with holding(5000) as whole, holding(50_000) as half, closing(Line()) as line:
        await line.bring(whole)
        bringing = await line.begin(half)
        line.step()
        shown = "<Receiving 1 segments, 10 of 10 pieces under way, has 1>"
        assert repr(line.receiving) == shown
        line.receiving.abandon()
        assert await bringing == ""
        line.assert_has(whole)
        assert line.receiving.places([half.ref]) == {}
        line.asked.clear()
        line.coming.clear()
        await line.bring(half)  # from a new sender
        line.assert_has(half)
    with holding(5000) as segment, closing(Line()) as line:
        bringing = await line.begin(segment)
        line.step()
        segment.close()
        while line.step():
            pass
        assert await bringing == ""
        assert line.receiving.places([segment.ref]) == {}


async def test_a_lack_of_room_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lack of room is reported at once or half-way, and the next segments still arrive."""

    def refuse(size: int) -> None:
        if size > 20_000:
            raise NotEnoughMemory(size, "this machine", 1 << 30, 1 << 20)

    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with closing(Line()) as line, holding(50_000) as big, holding(5000) as other:
        monkeypatch.setattr(payload, "require_memory", refuse)
        assert "are free" in await line.bring(big)
        assert await line.bring(other) == ""
        assert line.receiving.places([big.ref, other.ref]).keys() == {other.ref.path}
    with closing(Line()) as line, holding(5000) as segment:
        with monkeypatch.context() as patch:
            patch.setattr(os, "memfd_create", fail)
            assert "No space left on device" in await line.bring(segment)
        bringing = await line.begin(segment)
        line.step()
        monkeypatch.setattr(os, "pwrite", fail)
        while line.step():
            pass
        monkeypatch.undo()
        full = "could not be filled: No space left on device"
        assert await bringing == f"5,056 bytes of shared memory {full}"
        assert line.receiving.places([segment.ref]) == {}


async def test_a_slow_link_is_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """While pieces of a slow link wait, fewer pieces are under way, and later more again."""
    clock = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    with holding(200 * SMALL_PIECE) as segment, closing(Line()) as line:
        await line.begin(segment)
        for _ in range(60):  # four pieces a second, and only one at a time
            clock += 0.25
            line.receiving.add_piece(piece_of(line.asked.popleft()))
        assert len(line.asked) <= 3
        for _ in range(60):
            clock += 0.0001
            line.step()
        assert f"of {MAX_WINDOW} pieces under way" in repr(line.receiving)
