"""Tests of `nbdist.cluster.transfer`: big values on their way to nodes, and from there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from nbdist.cluster.transfer import Downloads, Returned, Uploads
from nbdist.output.events import Done, Failure, Moved, Output, Text
from nbdist.values.payload import Payload, pack_frames
from nbdist.values.shared_memory import Segment, open_segment, to_end
from nbdist.wire.messages import Outputs, Run
from nbdist.wire.transfer import PIECE, Dropped, Piece, Receiving, Sending, Taken


@pytest.fixture
def memory() -> Iterator[ExitStack]:
    """What closes all that a test has opened; then nothing of it is left."""
    before = len(os.listdir("/proc/self/fd"))
    with ExitStack() as stack:
        yield stack
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def segment(memory: ExitStack) -> Segment:
    """The notebook's: a piece and a half."""
    return memory.enter_context(to_end(Segment.filling([b"s" * (3 * PIECE // 2)])))


@pytest.fixture
def downloads(memory: ExitStack) -> Downloads:
    """What is tested: the way down."""
    return memory.enter_context(closing(Downloads()))


class Nodes:
    """The receiving ends, and all that was sent."""

    def __init__(self, memory: ExitStack, downloads: Downloads) -> None:
        self.all = {n: memory.enter_context(closing(Receiving())) for n in (0, 1)}
        self.sent: list[tuple[int, int]] = []
        self._downloads = downloads

    def take_all(self, *numbers: int) -> None:
        """Have these nodes take what there is for them."""
        for number in numbers:
            while piece := self._downloads.next(number, 0.0):
                self.sent.append((number, piece.offset))
                taken = self.all[number].take(piece)
                assert taken is not None
                self._downloads.taken(number, taken, 0.0)


@pytest.fixture
def nodes(memory: ExitStack, downloads: Downloads) -> Nodes:
    """Two of them."""
    return Nodes(memory, downloads)


def run(name: str, *segments: Segment) -> Run:
    """A task of four ranks."""
    return Run(name, (0, 1, 2, 3), b"", tuple(segment.ref for segment in segments))


def test_all_get_it_at_the_same_time(downloads: Downloads, nodes: Nodes, segment: Segment) -> None:
    """Once each node has its memory, which is sent once to each."""
    task = run("a", segment)
    assert downloads.add(task, (0, 1))
    nodes.take_all(0)
    assert downloads.ready() == []
    nodes.take_all(1)
    assert downloads.ready() == [task]
    assert downloads.ready() == []
    assert nodes.sent == [(node, at) for node in (0, 1) for at in (0, PIECE)]
    assert not downloads.add(run("b", segment), (0, 1))
    assert not downloads.add(run("c"), (0, 1))


def test_how_far_it_is(downloads: Downloads, nodes: Nodes, segment: Segment) -> None:
    """Counted over all nodes that lacked it."""
    task, size = run("a", segment), 3 * PIECE // 2
    downloads.add(task, (0, 1))
    assert [*downloads.progress()] == [(task, Moved(0, 2 * size))]
    nodes.take_all(0)
    assert [*downloads.progress()] == [(task, Moved(size, 2 * size))]
    nodes.take_all(1)
    downloads.ready()
    assert [*downloads.progress()] == []


def test_it_is_kept_as_long_as_the_notebook_has_it(
    downloads: Downloads, nodes: Nodes, segment: Segment
) -> None:
    """Closed there it is closed on the nodes, and not before."""
    downloads.add(run("a", segment), (0, 1))
    nodes.take_all(0, 1)
    assert [*downloads.drop()] == []
    segment.close()
    dropped = Dropped((segment.ref.path,))
    assert [*downloads.drop()] == [(0, dropped), (1, dropped)]
    assert [*downloads.drop()] == []


def test_closed_while_it_is_sent(downloads: Downloads, nodes: Nodes, segment: Segment) -> None:
    """It arrives, for those who wait for it."""
    task = run("a", segment)
    downloads.add(task, (0, 1))
    segment.close()
    assert [*downloads.drop()] == []
    nodes.take_all(0, 1)
    assert downloads.ready() == [task]


def test_closed_before_it_was_sent(downloads: Downloads, segment: Segment) -> None:
    """The ranks are to say that it is not there."""
    segment.close()
    assert not downloads.add(run("a", segment), (0, 1))


def test_stop_in_the_middle(downloads: Downloads, nodes: Nodes, segment: Segment) -> None:
    """The task is not sent, and what has come of its memory is dropped."""
    task = run("a", segment)
    downloads.add(task, (0, 1))
    nodes.take_all(0)
    downloads.next(1, 0.0)
    assert downloads.stop([9]) == []
    assert downloads.stop([3]) == [task]
    assert [*downloads.drop()] == [(1, Dropped((segment.ref.path,)))]
    assert downloads.next(1, 0.0) is None
    assert downloads.ready() == []


def test_no_room_on_a_node(downloads: Downloads, nodes: Nodes, segment: Segment) -> None:
    """No rank gets the task."""
    task = run("a", segment)
    downloads.add(task, (0, 1))
    nodes.take_all(0)
    downloads.next(1, 0.0)
    assert downloads.taken(1, Taken(segment.ref.path, 0, "2 MB are free"), 0.0) == [task]
    assert downloads.ready() == []


def test_a_node_is_lost(downloads: Downloads, nodes: Nodes, segment: Segment) -> None:
    """The others get the task: what they do without it is another matter."""
    task = run("a", segment)
    downloads.add(task, (0, 1))
    nodes.take_all(0)
    downloads.lose(1)
    assert downloads.ready() == [task]
    assert downloads.nodes == (0,)


# --- the way up -----------------------------------------------------------------------------


@pytest.fixture
def returned(memory: ExitStack) -> Returned:
    """What is tested."""
    return memory.enter_context(closing(Returned()))


def come(returned: Returned, node: int, segment: Segment) -> None:
    """All of it comes from this node."""
    with closing(Sending()) as sending:
        sending.add(segment.ref)
        while piece := sending.next(0.0):
            taken = returned.take(node, piece)
            assert taken is not None
            sending.taken(taken, 0.0)


def outputs(segment: Segment) -> Outputs:
    """Rank 2 has said something, and ended its task with that value."""
    text, done = Text("stdout", "x"), Done("ok", 0.1, values=Payload(segment=segment.ref))
    return Outputs(((2, "a", text), (2, "a", done)))


def test_values_where_the_notebook_finds_them(returned: Returned, segment: Segment) -> None:
    """Until it has read them."""
    assert returned.moved(1, outputs(segment)) == outputs(segment)
    come(returned, 1, segment)
    assert returned.moved(0, outputs(segment)) == outputs(segment)
    text, (rank, task, done) = returned.moved(1, outputs(segment)).items
    assert (text, rank, task) == (outputs(segment).items[0], 2, "a")
    assert isinstance(done, Done)
    assert isinstance(done.values, Payload)
    here = done.values.segment
    assert here is not None
    assert open_segment(here)[0] == open_segment(segment.ref)[0]
    returned.let_go([2], "b")
    returned.let_go([1])
    assert os.path.exists(here.path.partition("#")[0])
    returned.let_go([2], "a")
    assert not os.path.exists(here.path.partition("#")[0])


def test_what_comes_no_more(returned: Returned, segment: Segment) -> None:
    """The node has dropped it, or is lost."""
    before = len(os.listdir("/proc/self/fd"))
    first = Piece(segment.ref, 0, b"s" * PIECE)
    for end in (
        lambda: returned.dropped(1, Dropped((segment.ref.path,))),
        lambda: returned.lose(1),
    ):
        returned.take(1, first)
        assert len(os.listdir("/proc/self/fd")) == before + 1
        end()
        assert len(os.listdir("/proc/self/fd")) == before


class Up:
    """The way up, all that was passed on, and all that the head gets."""

    def __init__(self) -> None:
        self.said: list[tuple[int, str, Output]] = []
        self.sent: list[Piece | Dropped] = []
        self.returns = Uploads(lambda *item: self.said.append(item), self.sent.append)


@pytest.fixture
def up() -> Iterator[Up]:
    up = Up()
    with closing(up.returns):
        yield up


@pytest.fixture
def brought() -> Iterator[Segment]:
    """A value of two pieces and a half."""
    with to_end(Segment.filling([b"x" * (5 * PIECE // 2)])) as brought:
        yield brought


def ended(brought: Segment) -> Done:
    """The end of a task that brings it back."""
    return Done("ok", 0.1, values=Payload(segment=brought.ref))


def test_what_has_no_big_values_goes_by(up: Up) -> None:
    """At once, whatever it is."""
    small = Done("ok", 0.1, values=pack_frames([b"small"])[0])
    outputs = [Text("stdout", "x"), small, Done("ok", 0.1)]
    for output in outputs:
        up.returns.add(0, "a", output)
    assert up.said == [(0, "a", output) for output in outputs]
    assert up.sent == []


def test_the_end_waits_for_its_values(up: Up, brought: Segment) -> None:
    """And what the rank says after it waits too; other ranks do not."""
    up.returns.add(0, "a", ended(brought))
    up.returns.add(0, "", Text("stdout", "late"))
    up.returns.add(1, "a", Done("ok", 0.2))
    none_yet = (0, "a", Moved(0, 5 * PIECE // 2))
    assert up.said == [none_yet, (1, "a", Done("ok", 0.2))]
    with closing(Receiving()) as head:
        while up.sent:
            piece = up.sent.pop(0)
            assert isinstance(piece, Piece)
            taken = head.take(piece)
            assert taken is not None
            up.returns.taken(taken)
        assert up.said[2:] == [
            (0, "a", Moved(PIECE, 5 * PIECE // 2)),
            (0, "a", ended(brought)),
            (0, "", Text("stdout", "late")),
        ]
        here = head.places([brought.ref])[brought.ref.path]
        assert here is not None
        assert open_segment(here)[0] == open_segment(brought.ref)[0]
    assert repr(up.returns) == "<Uploads of ranks [], <Sending 0 bytes, 0 of 7 under way>>"


def test_values_within_what_an_op_returned(up: Up, brought: Segment) -> None:
    """They are found without a look at what it returned."""
    inner = (brought.ref.path, brought.ref)
    up.returns.add(0, "a", Done("ok", 0.1, values=Payload((b"pickle",), within=(inner,))))
    assert isinstance(up.sent[0], Piece)
    assert up.sent[0].ref == brought.ref


def test_stop(up: Up, brought: Segment) -> None:
    """The rank has ended its task then, but brings nothing back."""
    up.returns.add(0, "a", ended(brought))
    assert up.returns.stop([0, 1]) == (1,)
    assert up.sent.pop() == Dropped((brought.ref.path,))
    _, (_, _, failure), (_, _, done) = up.said
    assert isinstance(failure, Failure)
    assert failure.name == "KeyboardInterrupt"
    assert done == Done("error", 0.1)
    before = len(up.sent)
    assert up.returns.stop([0]) == (0,)
    up.returns.taken(Taken(brought.ref.path, PIECE))
    assert len(up.sent) == before


def test_no_room_for_it(up: Up, brought: Segment) -> None:
    """The rank has failed, and what it has bound stays known."""
    up.returns.add(0, "a", Done("ok", 0.1, frozenset("x"), values=Payload(segment=brought.ref)))
    up.returns.taken(Taken(brought.ref.path, 0, "2 MB are free."))
    _, (_, _, failure), (_, _, done) = up.said
    assert isinstance(failure, Failure)
    assert failure.message == "where the notebook is: 2 MB are free."
    assert done == Done("error", 0.1, frozenset("x"))


def test_the_value_is_gone(up: Up) -> None:
    """With its process: that is no value."""
    with to_end(Segment.filling([b"x" * PIECE])) as brought:
        pass
    up.returns.add(0, "a", ended(brought))
    assert [type(output) for _, _, output in up.said] == [Failure, Done]
