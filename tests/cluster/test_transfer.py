"""Tests of `nbdist.cluster.transfer`: big values that are sent to nodes, or fetched from nodes."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from nbdist.cluster import transfer
from nbdist.cluster.transfer import BulkTransfers
from nbdist.output.events import Done, Failure, Output, Text, TransferProgress
from nbdist.values.payload import Payload, Segment, is_open, open_segment, pack_frames, run_to_end
from nbdist.wire.messages import Outputs, RunTask
from nbdist.wire.node_messages import CopySegments
from nbdist.wire.transfer import TRANSFER_PIECE, Drop, Fetch, Receiving, SegmentPiece, piece_of
from tests.waiting import until


@pytest.fixture
def memory() -> Iterator[ExitStack]:
    """Closes all segments of a test, and checks that no file descriptor is left."""
    before = len(os.listdir("/proc/self/fd"))
    with ExitStack() as stack:
        yield stack
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def segment(memory: ExitStack) -> Segment:
    """A segment that is sent in two pieces, a whole piece and a half."""
    return memory.enter_context(run_to_end(Segment.filling([b"s" * (3 * TRANSFER_PIECE // 2)])))


class Side:
    """A node without a machine, which asks and answers when a test says so."""

    def __init__(self, number: int) -> None:
        self.name, self.ranks, self.lost = f"node{number}", (2 * number, 2 * number + 1), ""
        self.asked: deque[Fetch] = deque()
        self.receiving = Receiving(self.asked.append)
        self.sent: list[SegmentPiece | Drop | Fetch] = []
        self.send = self.sent.append
        self.problem = ""

    async def execute(self, bring: CopySegments) -> str:
        return self.problem or await self.receiving.copy_segments(bring.refs)


class Head:
    """The transfers of a head with two nodes, the tasks that were sent, and the shown outputs."""

    def __init__(self) -> None:
        self.nodes = [Side(0), Side(1)]
        self.ran: list[RunTask] = []
        self.shown: list[tuple[int, str, Output]] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.transfers = BulkTransfers(
            self.nodes.__getitem__,  # type: ignore[arg-type]
            self.ran.append,
            lambda outputs: self.shown.extend(outputs.items),
            lambda work: self.tasks.append(asyncio.create_task(work)),
        )

    async def pass_on(self, number: int, pieces: int = 99) -> list[int]:
        """Send a node at most `pieces` of the pieces that it requests; return their offsets."""
        node, offsets = self.nodes[number], []
        await asyncio.sleep(0)
        while node.asked and len(offsets) < pieces:
            offsets.append(node.asked[0].offset)
            self.transfers.fetch(number, node.asked.popleft())
            piece = node.sent.pop()
            assert isinstance(piece, SegmentPiece)
            node.receiving.add_piece(piece)
        for _ in range(3):
            await asyncio.sleep(0)
        return offsets

    async def bring_back(self, number: int, pieces: int = 99) -> None:
        """Let a node send at most `pieces` of the pieces that the head requests."""
        node = self.nodes[number]
        await asyncio.sleep(0)
        for _ in range(pieces):
            if node.sent:
                fetch = node.sent.pop(0)
                assert isinstance(fetch, Fetch)
                self.transfers.store_piece(number, piece_of(fetch))
        for _ in range(3):
            await asyncio.sleep(0)

    def shows(self, number: int, *outputs: tuple[int, str, Output]) -> list[object]:
        """Return a node's outputs that can be shown at once."""
        return [*self.transfers.hold_back(number, Outputs(outputs)).items]

    def said(self) -> list[tuple[int, str]]:
        """Return the failures that were shown, and forget all shown outputs."""
        said = [(rank, each.name) for rank, _, each in self.shown if isinstance(each, Failure)]
        self.shown.clear()
        return said


@pytest.fixture
def head(memory: ExitStack, runner: asyncio.Runner) -> Iterator[Head]:
    head = Head()
    for node in head.nodes:
        memory.enter_context(closing(node.receiving))
    yield head

    async def close() -> None:
        head.transfers.close()
        for task in head.tasks:
            task.cancel()
        await asyncio.gather(*head.tasks, return_exceptions=True)

    runner.run(close())


def run(name: str, *segments: Segment) -> RunTask:
    """Return a task of four ranks."""
    return RunTask(name, (0, 1, 2, 3), b"", tuple(segment.ref for segment in segments))


async def test_a_task_runs_once_all_nodes_have_its_memory(head: Head, segment: Segment) -> None:
    """Memory is sent once to each node, with progress, before any rank gets the task."""
    head.transfers.run(task := run("a", segment), (0, 1))
    assert await head.pass_on(0) == [0, TRANSFER_PIECE]
    assert head.ran == []
    assert await head.pass_on(1) == [0, TRANSFER_PIECE]
    assert head.ran == [task]
    both, size = (0, "a"), 3 * TRANSFER_PIECE // 2
    assert head.shown[0] == (*both, TransferProgress(0, 2 * size))
    assert head.shown[-1] == (*both, TransferProgress(2 * size, 2 * size))
    for other in (run("b", segment), run("c")):
        head.transfers.run(other, (0, 1))
        assert head.ran[-1] == other
    assert [[*node.asked] for node in head.nodes] == [[], []]


async def test_nodes_keep_memory_as_long_as_the_notebook(
    head: Head, segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes drop a segment once the notebook has closed it.

    A later task with the segment is sent all the same: its ranks report that the segment is gone.
    """
    monkeypatch.setattr(transfer, "TRANSFER_POLL_INTERVAL", 0.001)
    head.transfers.run(task := run("a", segment), (0, 1))
    for node in (0, 1):
        await head.pass_on(node)
    await asyncio.sleep(0.01)
    assert [node.sent for node in head.nodes] == [[], []]
    segment.close()
    await until(lambda: head.nodes[1].sent)
    assert [node.sent for node in head.nodes] == [[Drop(segment.ref.path)]] * 2
    head.nodes[0].sent.clear()
    head.nodes[0].receiving.drop([segment.ref.path])
    head.transfers.run(gone := run("b", segment), (0,))
    await head.pass_on(0)
    assert head.ran == [task, gone]


async def test_no_rank_runs_a_task_without_its_memory(head: Head, segment: Segment) -> None:
    """No rank gets a task if a node has no room or Stop comes; a lost node does not count."""
    first, second = head.nodes
    second.problem = "2 MB are free"
    head.transfers.run(run("a", segment), (0, 1))
    await head.pass_on(0, 1)
    assert head.said() == [(2, "NotEnoughMemory"), (3, "NotEnoughMemory")]
    assert first.sent == [Drop(segment.ref.path)]  # the node has a piece of the segment
    first.receiving.drop([segment.ref.path])
    second.problem = ""
    for node in head.nodes:
        node.sent.clear()
        node.asked.clear()
        node.receiving.abandon()

    head.transfers.run(run("b", segment), (0, 1))
    assert head.transfers.interrupt([9]) == (9,)
    await head.pass_on(0)
    assert head.transfers.interrupt([3, 9]) == (9,)
    assert second.sent == [Drop(segment.ref.path)]
    assert first.sent == []  # the node has all pieces, and keeps them
    assert head.said() == [(rank, "KeyboardInterrupt") for rank in range(4)]
    head.transfers.run(run("c", segment), (0, 1))
    head.transfers.interrupt([0])  # before any piece was requested
    second.receiving.abandon()
    second.asked.clear()
    await head.pass_on(1)
    assert (head.ran, [*second.asked]) == ([], [])

    head.transfers.run(task := run("d", segment), (0, 1))
    await asyncio.sleep(0)
    second.lost = "it is gone"
    second.receiving.abandon()
    head.transfers.handle_node_lost(1)
    await head.pass_on(0)
    assert head.ran == [task]


# --- values from nodes ----------------------------------------------------------------------

LATE = (2, "", Text("stdout", "late"))


def end_of(segment: Segment) -> tuple[int, str, Done]:
    """Return the output by which rank 2 ends its task with a value in a segment."""
    return 2, "a", Done("ok", 0.1, frozenset("x"), values=Payload(segment=segment.ref))


async def test_the_end_of_a_task_waits_for_its_values(head: Head, segment: Segment) -> None:
    """Later outputs of the rank wait too, but not outputs of other ranks, nor small values.

    The values can be opened until the notebook releases them.
    """
    small = Done("ok", 0.1, values=pack_frames([b"small"])[0])
    at_once = [(2, "a", Text("stdout", "x")), (3, "a", small)]
    assert head.shows(1, *at_once, end_of(segment), LATE) == at_once
    assert head.shows(1, LATE) == []
    await head.bring_back(1, 1)
    assert head.shown == [(2, "a", TransferProgress(TRANSFER_PIECE, 3 * TRANSFER_PIECE // 2))]
    await head.bring_back(1)
    (_, _, done), *late = head.shown[1:]
    assert late == [LATE, LATE]
    assert isinstance(done, Done)
    assert isinstance(done.values, Payload)
    assert done.values.segment is not None
    here = done.values.segment
    assert open_segment(here)[0] == open_segment(segment.ref)[0]
    head.transfers.release_values([2], "b")
    head.transfers.release_values([1])
    assert is_open(here)
    head.transfers.release_values([2], "a")
    assert not is_open(here)


async def test_a_task_fails_if_its_values_do_not_arrive(
    head: Head, segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task whose values do not arrive ends in an error, but the names that it bound are kept.

    The reason is Stop, too little memory, or a segment that is gone.
    """
    before = len(os.listdir("/proc/self/fd"))

    def said() -> str:
        (failure, done), _ = ([each for _, _, each in head.shown[:2]], head.shown.clear())
        assert isinstance(failure, Failure)
        assert done == Done("error", 0.1, frozenset("x"))
        assert len(os.listdir("/proc/self/fd")) <= before
        return f"{failure.name}: {failure.message}"

    for pieces in (0, 1):
        assert head.shows(1, end_of(segment)) == []
        await head.bring_back(1, pieces)
        head.shown.clear()
        assert head.transfers.interrupt([2, 3]) == (3,)
        assert said() == "KeyboardInterrupt: "
        await head.bring_back(1)
        assert head.shown == []
    with monkeypatch.context() as patch:
        patch.setattr(Receiving, "copy_segments", no_room)
        assert head.shows(1, end_of(segment)) == []
        await head.bring_back(1)
        assert said() == "NotEnoughMemory: where the notebook is: 2 MB are free."
    inner = Payload((b"pickle",), within=((segment.ref.path, segment.ref),))
    segment.close()  # as when its process ends
    assert head.shows(1, (2, "a", Done("ok", 0.1, frozenset("x"), values=inner))) == []
    await head.bring_back(1)
    assert said().startswith("SegmentGone: ")


async def no_room(*_: object) -> str:
    return "2 MB are free."


async def test_values_of_a_lost_node_are_dropped(head: Head, segment: Segment) -> None:
    """The end of a task is not shown, and no segment is left open."""
    before = len(os.listdir("/proc/self/fd"))
    assert head.shows(1, end_of(segment)) == []
    await head.bring_back(1, 1)
    head.shown.clear()
    head.transfers.handle_node_lost(1)
    await asyncio.sleep(0.01)
    assert (head.shown, len(os.listdir("/proc/self/fd"))) == ([], before)
    assert head.shows(1, LATE) == [LATE]  # output of a new rank with the same number


async def test_tasks_of_ended_ranks_are_forgotten(head: Head, segment: Segment) -> None:
    """New ranks with equal numbers neither get the old tasks nor end them."""
    before = len(os.listdir("/proc/self/fd"))
    head.transfers.run(run("a", segment), (0,))
    await head.pass_on(0, 1)
    assert head.shows(1, end_of(segment), LATE) == []
    await head.bring_back(1, 1)
    head.shown.clear()
    head.transfers.forget_tasks()
    assert head.nodes[0].sent == [Drop(segment.ref.path)]
    head.nodes[0].receiving.drop([segment.ref.path])
    await asyncio.sleep(0.01)
    assert (head.ran, head.shown, len(os.listdir("/proc/self/fd"))) == ([], [], before)
    assert head.shows(1, LATE) == [LATE]
