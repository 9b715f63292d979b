"""Ends of tasks that wait for their values, without an agent and without a head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from nbdist.cluster.transfer import Uploads
from nbdist.output.events import Done, Failure, Moved, Output, Text
from nbdist.values.payload import Payload, pack_frames
from nbdist.values.shared_memory import Segment, open_segment, to_end
from nbdist.wire.carrying import PIECE, Dropped, Piece, Receiving, Taken

Said = list[tuple[int, str, Output]]
Sent = list[Piece | Dropped]


@pytest.fixture
def said() -> Said:
    """All that was passed on."""
    return []


@pytest.fixture
def sent() -> Sent:
    """All that the head gets."""
    return []


@pytest.fixture
def returns(said: Said, sent: Sent) -> Iterator[Uploads]:
    """What is tested."""
    with closing(Uploads(lambda *item: said.append(item), sent.append)) as returns:
        yield returns


@pytest.fixture
def segment() -> Iterator[Segment]:
    """A value of two pieces and a half."""
    with to_end(Segment.filling([b"x" * (5 * PIECE // 2)])) as segment:
        yield segment


def ended(segment: Segment) -> Done:
    """The end of a task that brings it back."""
    return Done("ok", 0.1, values=Payload(segment=segment.ref))


def test_what_has_no_big_values_goes_by(returns: Uploads, said: Said, sent: Sent) -> None:
    """At once, whatever it is."""
    small = Done("ok", 0.1, values=pack_frames([b"small"])[0])
    outputs = [Text("stdout", "x"), small, Done("ok", 0.1)]
    for output in outputs:
        returns.add(0, "a", output)
    assert said == [(0, "a", output) for output in outputs]
    assert sent == []


def test_the_end_waits_for_its_values(
    returns: Uploads, said: Said, sent: Sent, segment: Segment
) -> None:
    """And what the rank says after it waits too; other ranks do not."""
    returns.add(0, "a", ended(segment))
    returns.add(0, "", Text("stdout", "late"))
    returns.add(1, "a", Done("ok", 0.2))
    none_yet = (0, "a", Moved(0, 5 * PIECE // 2))
    assert said == [none_yet, (1, "a", Done("ok", 0.2))]
    with closing(Receiving()) as head:
        while sent:
            piece = sent.pop(0)
            assert isinstance(piece, Piece)
            taken = head.take(piece)
            assert taken is not None
            returns.taken(taken)
        assert said[2:] == [
            (0, "a", Moved(PIECE, 5 * PIECE // 2)),
            (0, "a", ended(segment)),
            (0, "", Text("stdout", "late")),
        ]
        here = head.ref(segment.ref.path)
        assert here is not None
        assert open_segment(here)[0] == open_segment(segment.ref)[0]
    assert repr(returns) == "<Uploads of ranks [], <Sending 0 bytes, 0 of 7 under way>>"


def test_values_within_what_an_op_returned(returns: Uploads, sent: Sent, segment: Segment) -> None:
    """They are found without a look at what it returned."""
    inner = (segment.ref.path, segment.ref)
    returns.add(0, "a", Done("ok", 0.1, values=Payload((b"pickle",), within=(inner,))))
    assert isinstance(sent[0], Piece)
    assert sent[0].ref == segment.ref


def test_stop(returns: Uploads, said: Said, sent: Sent, segment: Segment) -> None:
    """The rank has ended its task then, but brings nothing back."""
    returns.add(0, "a", ended(segment))
    assert returns.stop([0, 1]) == (1,)
    assert sent.pop() == Dropped((segment.ref.path,))
    _, (_, _, failure), (_, _, done) = said
    assert isinstance(failure, Failure)
    assert failure.name == "KeyboardInterrupt"
    assert done == Done("error", 0.1)
    before = len(sent)
    assert returns.stop([0]) == (0,)
    returns.taken(Taken(segment.ref.path, PIECE))
    assert len(sent) == before


def test_no_room_for_it(returns: Uploads, said: Said, segment: Segment) -> None:
    """The rank has failed, and what it has bound stays known."""
    returns.add(0, "a", Done("ok", 0.1, frozenset("x"), values=Payload(segment=segment.ref)))
    returns.taken(Taken(segment.ref.path, 0, "2 MB are free."))
    _, (_, _, failure), (_, _, done) = said
    assert isinstance(failure, Failure)
    assert failure.message == "where the notebook is: 2 MB are free."
    assert done == Done("error", 0.1, frozenset("x"))


def test_the_value_is_gone(returns: Uploads, said: Said) -> None:
    """With its process: that is no value."""
    with to_end(Segment.filling([b"x" * PIECE])) as segment:
        pass
    returns.add(0, "a", ended(segment))
    assert [type(output) for _, _, output in said] == [Failure, Done]
