"""Tests of `nbdist.wire.numbered`: a connection that is lost loses no message, and doubles none."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.wire.numbered import Frame, Kind, Mismatch, Numbered


class End:
    """One end of a link, and what has come to it."""

    def __init__(self) -> None:
        self.talk = Numbered()
        self.coming: deque[Sequence[Frame]] = deque()
        self.read: list[bytes] = []

    def take(self) -> Kind | None:
        header, *frames = self.coming.popleft()
        kind = self.talk.take(bytes(header))
        if kind is Kind.MESSAGE:
            self.read += map(bytes, frames)
        return kind


@given(st.lists(st.sampled_from(["send", "take", "beat", "lose", "connect"]), max_size=60))
def test_whatever_is_lost(steps: list[str]) -> None:
    """Each message arrives once, in order, when there is a connection in the end."""
    one, other = End(), End()
    sent: list[bytes] = []

    def connect() -> None:
        for end, peer in ((one, other), (other, one)):
            peer.coming.append([end.talk.sign(Kind.AGAIN)])
            peer.coming.extend(end.talk.again())

    for number, step in enumerate(steps):
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
                connect()
    connect()
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


def test_who_has_been_given_up() -> None:
    """It has read what a new conversation has not sent."""
    one, other = Numbered(), Numbered()
    other.take(bytes(one.message([b"1"])[0]))
    with pytest.raises(Mismatch):
        Numbered().take(other.sign(Kind.AGAIN))
