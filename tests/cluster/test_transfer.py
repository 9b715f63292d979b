"""Tests of `nbdist.cluster.transfer`: big values on their way to nodes, and from there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from nbdist.cluster.transfer import BulkTransfers, Uploads
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


class Side:
    """A node that is not there: it keeps what is sent to it, and takes pieces when it is told."""

    def __init__(self, number: int) -> None:
        self.name, self.ranks = f"node{number}", (2 * number, 2 * number + 1)
        self.receiving = Receiving()
        self.sent: list[Piece | Dropped | Taken] = []
        self.send = self.sent.append


class Head:
    """What is tested, the way down to two nodes: the tasks that were sent, and what was shown."""

    def __init__(self) -> None:
        self.nodes = [Side(0), Side(1)]
        self.ran: list[Run] = []
        self.shown: list[tuple[int, str, Output]] = []
        show = lambda outputs: self.shown.extend(outputs.items)  # noqa: E731
        self.transfers = BulkTransfers(self.nodes.__getitem__, self.ran.append, show)  # type: ignore[arg-type]

    def take(self, number: int) -> list[int]:
        """Have a node take what there is for it: the offsets of its pieces."""
        node, offsets = self.nodes[number], []
        while node.sent and isinstance(piece := node.sent[0], Piece):
            del node.sent[0]
            offsets.append(piece.offset)
            if taken := node.receiving.take(piece):
                self.transfers.take(number, taken)
        return offsets

    def dropped(self) -> list[list[Piece | Dropped | Taken]]:
        """What nodes are told to drop once the head has looked."""
        for node in self.nodes:
            node.sent.clear()
        self.transfers.stop(())
        return [node.sent for node in self.nodes]

    def said(self) -> list[tuple[int, str]]:
        """The errors that the notebook is told of."""
        return [(r, each.name) for r, _, each in self.shown if isinstance(each, Failure)]


@pytest.fixture
def head(memory: ExitStack, runner: asyncio.Runner) -> Iterator[Head]:
    head = Head()
    for node in head.nodes:
        memory.enter_context(closing(node.receiving))
    yield head
    head.transfers.close()


def run(name: str, *segments: Segment) -> Run:
    """A task of four ranks."""
    return Run(name, (0, 1, 2, 3), b"", tuple(segment.ref for segment in segments))


async def test_all_get_it_at_the_same_time(head: Head, segment: Segment) -> None:
    """Once each node has its memory, which is sent once to each; how far it is is told."""
    head.transfers.run(task := run("a", segment), (0, 1))
    assert head.take(0) == [0, PIECE]
    assert head.ran == []
    assert head.take(1) == [0, PIECE]
    assert head.ran == [task]
    both, size = (0, "a"), 3 * PIECE // 2
    assert head.shown[0] == (*both, Moved(PIECE, 2 * size))
    assert head.shown[-1] == (*both, Moved(2 * size, 2 * size))
    for other in (run("b", segment), run("c")):
        head.transfers.run(other, (0, 1))
        assert head.ran[-1] == other
    assert [node.sent for node in head.nodes] == [[], []]


async def test_it_is_kept_as_long_as_the_notebook_has_it(head: Head, segment: Segment) -> None:
    """Closed there it is closed on the nodes, and not before; nor while it is on its way."""
    head.transfers.run(task := run("a", segment), (0, 1))
    head.take(0)
    segment.close()
    assert head.dropped() == [[], []]
    head.transfers.take(1, Taken(segment.ref.path, 3 * PIECE // 2))
    assert head.ran == [task]
    dropped = Dropped((segment.ref.path,))
    assert head.dropped() == [[dropped], [dropped]]
    assert head.dropped() == [[], []]
    head.transfers.run(gone := run("b", segment), (0, 1))  # the ranks say that it is not there
    assert head.ran == [task, gone]


async def test_a_node_that_does_not_take_it(head: Head, segment: Segment) -> None:
    """Where it has no room, or Stop comes, no rank gets the task; a node that is lost is none."""
    head.transfers.run(run("a", segment), (0, 1))
    head.take(0)
    head.transfers.take(1, Taken(segment.ref.path, 0, "2 MB are free"))
    assert head.ran == []
    assert head.said() == [(2, "NotEnoughMemory"), (3, "NotEnoughMemory")]
    head.shown.clear()
    head.transfers.run(run("b", segment), (0, 1))
    assert head.transfers.stop([9]) == (9,)
    head.nodes[1].sent.clear()
    assert head.transfers.stop([3, 9]) == (9,)
    assert head.nodes[1].sent == [Dropped((segment.ref.path,))]
    assert head.said() == [(rank, "KeyboardInterrupt") for rank in range(4)]
    assert head.ran == []
    head.transfers.run(task := run("c", segment), (0, 1))
    head.transfers.lose(1)
    assert head.ran == [task]


# --- the way up -----------------------------------------------------------------------------


def outputs(segment: Segment) -> Outputs:
    """Rank 2 has said something, and ended its task with that value."""
    text, done = Text("stdout", "x"), Done("ok", 0.1, values=Payload(segment=segment.ref))
    return Outputs(((2, "a", text), (2, "a", done)))


def test_values_where_the_notebook_finds_them(head: Head, segment: Segment) -> None:
    """Until it has read them."""
    transfers = head.transfers
    assert transfers.moved(1, outputs(segment)) == outputs(segment)
    with closing(Sending()) as sending:
        sending.add(segment.ref)
        while piece := sending.next(0.0):
            transfers.take(1, piece)
            sending.taken(head.nodes[1].sent.pop(), 0.0)
    assert transfers.moved(0, outputs(segment)) == outputs(segment)
    text, (rank, task, done) = transfers.moved(1, outputs(segment)).items
    assert (text, rank, task) == (outputs(segment).items[0], 2, "a")
    here = done.values.segment
    assert open_segment(here)[0] == open_segment(segment.ref)[0]
    transfers.let_go([2], "b")
    transfers.let_go([1])
    assert os.path.exists(here.path.partition("#")[0])
    transfers.let_go([2], "a")
    assert not os.path.exists(here.path.partition("#")[0])


async def test_what_comes_no_more(head: Head, segment: Segment) -> None:
    """The node has dropped it, or is lost."""
    before = len(os.listdir("/proc/self/fd"))
    for end in (
        lambda: head.transfers.take(1, Dropped((segment.ref.path,))),
        lambda: head.transfers.lose(1),
    ):
        head.transfers.take(1, Piece(segment.ref, 0, b"s" * PIECE))
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


def test_the_end_waits_for_its_values(up: Up, brought: Segment) -> None:
    """And what the rank says after it waits too; other ranks do not, nor what is small."""
    small = [Text("stdout", "x"), Done("ok", 0.1, values=pack_frames([b"small"])[0])]
    for output in small:
        up.returns.add(0, "a", output)
    assert (up.said, up.sent) == ([(0, "a", output) for output in small], [])
    up.said.clear()
    up.returns.add(0, "a", ended(brought))
    up.returns.add(0, "", Text("stdout", "late"))
    up.returns.add(1, "a", Done("ok", 0.2))
    none_yet = (0, "a", Moved(0, 5 * PIECE // 2))
    assert up.said == [none_yet, (1, "a", Done("ok", 0.2))]
    with closing(Receiving()) as head:
        while up.sent:
            up.returns.taken(head.take(up.sent.pop(0)))
        assert up.said[2:] == [
            (0, "a", Moved(PIECE, 5 * PIECE // 2)),
            (0, "a", ended(brought)),
            (0, "", Text("stdout", "late")),
        ]
        here = head.places([brought.ref])[brought.ref.path]
        assert open_segment(here)[0] == open_segment(brought.ref)[0]
    assert repr(up.returns) == "<Uploads of ranks [], <Sending 0 bytes, 0 of 7 under way>>"


def test_what_brings_nothing_back(up: Up, brought: Segment) -> None:
    """The rank has ended its task then, or failed; what it has bound stays known."""
    up.returns.add(0, "a", ended(brought))
    assert up.returns.stop([0, 1]) == (1,)
    assert up.sent.pop() == Dropped((brought.ref.path,))
    _, (_, _, failure), (_, _, done) = up.said
    assert (failure.name, done) == ("KeyboardInterrupt", Done("error", 0.1))
    before = len(up.sent)
    assert up.returns.stop([0]) == (0,)
    up.returns.taken(Taken(brought.ref.path, PIECE))
    assert len(up.sent) == before
    for each in (up.said, up.sent):
        each.clear()
    inner = Payload((b"pickle",), within=((brought.ref.path, brought.ref),))
    up.returns.add(0, "a", Done("ok", 0.1, frozenset("x"), values=inner))
    assert next(each.ref for each in up.sent if isinstance(each, Piece)) == brought.ref
    up.returns.taken(Taken(brought.ref.path, 0, "2 MB are free."))  # where it is to go
    _, (_, _, failure), (_, _, done) = up.said
    assert failure.message == "where the notebook is: 2 MB are free."
    assert done == Done("error", 0.1, frozenset("x"))
    up.said.clear()
    with to_end(Segment.filling([b"x" * PIECE])) as gone:
        pass
    up.returns.add(0, "a", ended(gone))  # with its process
    assert [type(output) for _, _, output in up.said] == [Failure, Done]
