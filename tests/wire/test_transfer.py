"""Tests of `nbdist.wire.transfer`: a connection that is lost loses no message, and doubles none.

Segments are carried in pieces, without a link.
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.errors import NotEnoughMemory
from nbdist.values import shared_memory
from nbdist.values.shared_memory import Segment, SegmentGone, open_segment, to_end
from nbdist.wire import transfer
from nbdist.wire.transfer import (
    MOST_WINDOW,
    Dropped,
    Frame,
    Kind,
    Mismatch,
    Numbered,
    Piece,
    Receiving,
    Sending,
    Taken,
)


class End:
    """One end of a link, and what has come to it."""

    def __init__(self) -> None:
        self.talk = Numbered()
        self.coming: deque[Sequence[Frame]] = deque()
        self.read: list[bytes] = []

    def take(self) -> None:
        header, *frames = self.coming.popleft()
        if self.talk.take(bytes(header)) is Kind.MESSAGE:
            self.read += map(bytes, frames)


@given(st.lists(st.sampled_from(["send", "take", "beat", "lose", "connect"]), max_size=60))
def test_whatever_is_lost(steps: list[str]) -> None:
    """Each message arrives once, in order, when there is a connection in the end."""
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
                one.coming.append([other.talk.sign(Kind.BEAT)])
                one.take()
            case "lose":
                other.coming.clear()
                one.coming.clear()
            case "connect":
                for end, peer in ((one, other), (other, one)):
                    peer.coming.append([end.talk.sign(Kind.AGAIN)])
                    peer.coming.extend(end.talk.again())
    while other.coming:
        other.take()
    assert other.read == sent
    one.coming.append([other.talk.sign(Kind.BEAT)])
    while one.coming:
        one.take()
    assert [*one.talk.again()] == []


def test_what_has_been_read_is_acknowledged_once() -> None:
    """With the next message, or a sign that is due for it."""
    one, other = Numbered(), Numbered()
    assert not other.has_read
    assert other.take(bytes(one.message([b"1"])[0])) is Kind.MESSAGE
    assert other.has_read
    other.message([b"2"])
    assert not other.has_read
    # It has read what a new conversation has not sent.
    one, other = Numbered(), Numbered()
    other.take(bytes(one.message([b"1"])[0]))
    with pytest.raises(Mismatch):
        Numbered().take(other.sign(Kind.AGAIN))


SMALL_PIECE = 1000


@pytest.fixture(autouse=True)
def _leaves_nothing_open() -> Iterator[None]:
    """Every test closes what it has opened."""
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture(autouse=True, scope="module")
def _small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "PIECE", SMALL_PIECE)
        yield


def holding(*sizes: int) -> Segment:
    """A segment with frames of these sizes, no two bytes near one another the same."""
    frames = [bytes((i * 7 + size) % 251 for i in range(size)) for size in sizes]
    return to_end(Segment.filling(frames))


class Line:
    """A link with both of its ends: each step takes one message off it, in order each way."""

    def __init__(self, most: int = MOST_WINDOW, seed: int = 0) -> None:
        self.sending, self.receiving = Sending(), Receiving()
        self.sending.most = most
        self.down: deque[Piece | Dropped] = deque()
        self.up: deque[Taken] = deque()
        self.ended: list[str] = []
        self.longest = 0
        self.clock = 0.0
        self._random = random.Random(seed)

    def send(self) -> None:
        while piece := self.sending.next(self.clock):
            self.down.append(piece)
        self.longest = max(self.longest, len(self.down) + len(self.up))

    def step(self) -> bool:
        """One message arrives; False when there is none."""
        self.send()
        if not (self.down or self.up):
            return False
        if self.up and (not self.down or self._random.random() < 0.5):
            taken = self.up.popleft()
            if self.sending.taken(taken, self.clock):
                self.ended.append(taken.problem or taken.path)
        else:
            message = self.down.popleft()
            if isinstance(message, Dropped):
                self.receiving.drop(message.paths)
            elif answer := self.receiving.take(message):
                self.up.append(answer)
        return True

    def all_steps(self, *segments: Segment) -> None:
        """Send these first, and all that is under way."""
        for segment in segments:
            self.sending.add(segment.ref)
        while self.step():
            pass

    def assert_has(self, segment: Segment) -> None:
        """It is whole at the other end, in memory of its own."""
        here = self.receiving.places([segment.ref])[segment.ref.path]
        assert here.path != segment.ref.path
        assert open_segment(here) == open_segment(segment.ref)

    def close(self) -> None:
        self.sending.close()
        self.receiving.close()


frames = st.lists(st.integers(0, 2 * SMALL_PIECE + 1), max_size=4)


@given(
    st.lists(frames, min_size=1, max_size=5),
    st.integers(1, MOST_WINDOW),
    st.integers(0, 1 << 16),
    st.data(),
)
def test_what_is_sent_is_what_arrives(all_sizes, most, seed, data):
    """Whatever sizes, frames without a byte too, and in whatever order the messages come."""
    segments = [holding(*sizes) for sizes in all_sizes]
    with closing(Line(most, seed)) as line:
        for segment in segments:
            assert line.sending.add(segment.ref)
            for _ in range(data.draw(st.integers(0, 5))):
                line.step()
        line.all_steps()
        assert sorted(line.ended) == sorted(segment.ref.path for segment in segments)
        assert line.longest <= most
        for segment in segments:
            line.assert_has(segment)
            assert not line.sending.add(segment.ref)
            segment.close()


@given(frames, frames, st.integers(0, 12), st.integers(0, 99))
def test_what_is_dropped_leaves_nothing(sizes, others, steps, seed):
    """At any moment, whole or not; another one goes on, and the same can be sent again."""
    with holding(*sizes) as segment, holding(*others) as other, closing(Line(seed=seed)) as line:
        before = len(os.listdir("/proc/self/fd"))
        line.sending.add(segment.ref)
        for _ in range(steps):
            line.step()
        dropped = line.sending.drop([segment.ref.path, "/proc/1/fd/1#1"])
        assert dropped == Dropped((segment.ref.path,))
        line.down.append(dropped)
        line.all_steps(other)
        assert line.receiving.places([segment.ref]) == {}
        line.assert_has(other)
        assert len(os.listdir("/proc/self/fd")) == before + 1  # the other's, which has come
        line.all_steps(segment)
        line.assert_has(segment)


def test_a_sender_that_is_gone() -> None:
    """What is not whole is let go, and what is whole can be read on."""
    with holding(5000) as whole, holding(5000) as half, closing(Line()) as line:
        line.all_steps(whole)
        line.sending.add(half.ref)
        line.step()
        assert repr(line.receiving) == "<Receiving 1 segments, has 1>"
        line.sending.close()
        line.receiving.abandon()
        assert repr(line.receiving) == "<Receiving 0 segments, has 1>"
        line.assert_has(whole)
        assert line.receiving.places([half.ref]) == {}


def test_no_room_at_the_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused once, at its first piece or half-way; what is behind it goes on."""

    def refuse(size: int) -> None:
        if size > 20_000:
            raise NotEnoughMemory(size, "this machine", 1 << 30, 1 << 20)

    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with closing(Line()) as line, holding(50_000) as big, holding(5000) as other:
        monkeypatch.setattr(shared_memory, "require_memory", refuse)
        line.all_steps(big, other)
        refusal, path = line.ended
        assert "are free" in refusal
        assert path == other.ref.path
        assert line.receiving.places([big.ref, other.ref]).keys() == {other.ref.path}
        assert big.ref.path not in line.sending.there
    with closing(Line()) as line, holding(5000) as segment:
        line.sending.add(segment.ref)
        line.step()
        monkeypatch.setattr(os, "pwrite", fail)
        line.all_steps()
        monkeypatch.undo()
        full = "could not be filled: No space left on device"
        assert line.ended == [f"5,056 bytes of shared memory {full}"]
        assert repr(line.receiving) == "<Receiving 0 segments, has 0>"


def test_pieces_that_do_not_follow() -> None:
    """What is missing in the middle is a problem, and no segment."""
    with holding(5000) as segment, closing(Line()) as line:
        first, second = (Piece(segment.ref, at, b"x" * 1000) for at in (0, 2000))
        assert line.receiving.take(first) == Taken(segment.ref.path, 1000)
        refusal = line.receiving.take(second)
        assert refusal is not None
        assert refusal.problem.endswith("bytes 2,000-3,000 came after 1,000")
        assert line.receiving.take(second) is None
    # Its owner may have closed it, as Stop makes it do.
    segment = holding(5000)
    segment.close()
    with closing(Line()) as line, pytest.raises(SegmentGone):
        line.sending.add(segment.ref)


def test_a_slow_link_is_not_filled() -> None:
    """While pieces wait for one another, fewer of them are under way; and then more again."""
    with holding(200 * SMALL_PIECE) as segment, closing(Line()) as line:
        line.sending.add(segment.ref)
        line.step()
        for _ in range(60):  # four pieces a second, and only one at a time
            while line.down:
                answer = line.receiving.take(line.down.popleft())  # type: ignore[arg-type]
                assert answer is not None
                line.up.append(answer)
            line.clock += 0.25
            line.sending.taken(line.up.popleft(), line.clock)
            line.send()
        assert len(line.up) + len(line.down) <= 3
        for _ in range(60):
            line.clock += 0.0001
            line.step()
        assert line.sending.__repr__().endswith(f"of {MOST_WINDOW} under way>")
