"""Transfers big values between the notebook's machine and the nodes, in the head.

A task waits in the head until the nodes of its ranks have its values. If a rank returns big values,
the end of its task waits in the head until the notebook's machine has them. `nbdist.wire.transfer`
says how long values are kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from nbdist.cluster.node import Node
from nbdist.output.events import Done, Output, TransferProgress
from nbdist.values.payload import SegmentRef, is_open, length_of, refs_in, relocate
from nbdist.wire.messages import Outputs, RankOutput, RunTask
from nbdist.wire.node_messages import CopySegments
from nbdist.wire.transfer import Drop, Fetch, Receiving, SegmentPiece, piece_of
from nbdist.wire.work import failure_in_words

SAY_EVERY = 0.25  # seconds between two reports on the progress of big values
TRANSFER_POLL_INTERVAL = 1.0  # seconds between two checks which segments the notebook has closed


@dataclass
class _Waiting:
    """A task that waits until the nodes of its ranks have copies of its segments of shared memory.

    `total` is the number of bytes to send. `sent` has the number of bytes that were sent so far, by
    the number of the node and the path of the segment.
    """

    run: RunTask
    total: int
    sent: dict[tuple[int, str], int]


@dataclass
class _Held:
    """The end of a rank's task, `done`, held back until the head has the values of the task.

    `refs` are the segments with these values in the node's shared memory. Later outputs of the rank
    are held back too, so that the order of the outputs is kept.
    """

    node: int
    done: Done
    task: str
    refs: tuple[SegmentRef, ...]
    later_outputs: list[RankOutput] = field(default_factory=list)


class BulkTransfers:
    """Transfers big values from the notebook to the nodes, and from the nodes to the notebook.

    All ranks get a task at the same time, once all their nodes have its values. Otherwise some
    ranks would wait in a collective for a rank with a slow link. Values that a rank returns stay in
    shared memory of the head until the notebook has read them, or the rank gets its next task.

    `node` returns the `Node` for its number, `send_run` sends a task to the nodes of its ranks,
    `show_outputs` sends outputs to the notebook, and `spawn` runs a coroutine in the background.
    """

    def __init__(
        self,
        node: Callable[[int], Node],
        send_run: Callable[[RunTask], None],
        show_outputs: Callable[[Outputs], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._node, self._send_run, self._show, self._spawn = node, send_run, show_outputs, spawn
        self._waiting: dict[str, _Waiting] = {}
        self._refs: dict[str, SegmentRef] = {}
        self._paths_on: dict[int, set[str]] = {}
        """By number of a node, the paths of those segments that the node has copied completely."""
        self._pending: dict[int, _Held] = {}
        self._receiving: dict[int, Receiving] = {}
        # By rank, the task that has returned values, the rank's node, and the paths of the copies.
        self._received: dict[int, tuple[str, int, tuple[str, ...]]] = {}
        self._progress_due = 0.0

    # --- down ------------------------------------------------------------------------------

    def run(self, run: RunTask, nodes: Iterable[int]) -> None:
        """Send a task to `nodes`, the nodes of its ranks, once all have copies of its segments.

        Returns at once.
        """
        self.release_values(run.ranks)
        missing = {}
        for node in nodes if run.segments else ():
            paths = self._paths_on.setdefault(node, set())
            if refs := tuple(ref for ref in run.segments if ref.path not in paths):
                missing[node] = refs
        if not missing:
            self._send_run(run)
            return
        total = sum(length_of(ref) for refs in missing.values() for ref in refs)
        sent = {(node, ref.path): 0 for node, refs in missing.items() for ref in refs}
        self._waiting[run.id] = _Waiting(run, total, sent)
        if not self._refs:
            self._spawn(self._drop_closed_segments())
        self._refs |= {ref.path: ref for ref in run.segments}
        for node, refs in missing.items():
            self._spawn(self._send_segments(run.id, node, refs))

    async def _send_segments(self, task: str, number: int, refs: tuple[SegmentRef, ...]) -> None:
        """Make a node copy the segments of a task; send the task once all nodes have their copies.

        If the node has too little memory, the task fails.
        """
        if task not in self._waiting:
            return  # the task has failed or was interrupted meanwhile
        node = self._node(number)
        problem = await node.execute(CopySegments(refs))
        if (waiting := self._waiting.get(task)) is None:
            return
        if problem:
            why = f"{node.name}: {problem}"
            self._fail(waiting.run, set(node.ranks), "NotEnoughMemory", why)
            return
        for ref in refs:
            waiting.sent[number, ref.path] = length_of(ref)
            if not node.lost:
                self._paths_on[number].add(ref.path)
        if sum(waiting.sent.values()) == waiting.total:
            del self._waiting[task]
            self._show_progress(waiting.run.ranks[0], task, waiting.total, waiting.total)
            self._send_run(waiting.run)

    def fetch(self, node: int, fetch: Fetch) -> None:
        """Send a node the piece of a segment that it has requested, and report the progress."""
        self._node(node).send(piece_of(fetch))
        for waiting in self._waiting.values():
            if (node, fetch.ref.path) in waiting.sent:
                waiting.sent[node, fetch.ref.path] = fetch.offset
        self._show_all_progress()

    def _fail(self, run: RunTask, failed: Collection[int], name: str, message: str) -> None:
        """End a task that was not sent to its ranks yet, and report this to the notebook.

        The ranks in `failed` get the error with this name and message. For the other ranks the task
        ends with the status "aborted".
        """
        self._cancel(run.id)
        failure, items = failure_in_words(name, message), list[RankOutput]()
        for rank in run.ranks:
            if rank in failed:
                items.append((rank, run.id, failure))
            done = Done("error" if rank in failed else "aborted", 0.0, received=False)
            items.append((rank, run.id, done))
        self._show(Outputs(tuple(items)))

    def _cancel(self, task: str) -> None:
        """Forget a task that waits until nodes have copied its segments.

        The nodes drop their incomplete copies, except of segments for which another task waits.
        """
        sent = self._waiting.pop(task).sent.keys()
        for node, path in sent - self._needed_segments():
            if path not in self._paths_on.get(node, ()):
                self._node(node).send(Drop(path))

    def _needed_segments(self) -> set[tuple[int, str]]:
        return set().union(*(waiting.sent for waiting in self._waiting.values()))

    async def _drop_closed_segments(self) -> None:
        """Make nodes drop their copies of segments that the notebook has closed.

        Copies of segments for which a task waits stay. Checks from time to time, until the nodes
        have no copies any more.
        """
        while self._refs:
            await asyncio.sleep(TRANSFER_POLL_INTERVAL)
            needed = {path for _, path in self._needed_segments()}
            closed = [
                path for path, ref in self._refs.items() if path not in needed and not is_open(ref)
            ]
            for path in closed:
                del self._refs[path]
                for node, paths in self._paths_on.items():
                    if path in paths:
                        paths.discard(path)
                        self._node(node).send(Drop(path))

    # --- up --------------------------------------------------------------------------------

    def hold_back(self, node: int, outputs: Outputs) -> Outputs:
        """Return those outputs of a node that the notebook can get now, and hold back the others.

        If a task has returned big values on a rank, the end of the task is held back until the head
        has fetched the values. The rank's later outputs are held back as long.
        """
        items = []
        for rank, task, output in outputs.items:
            if pending := self._pending.get(rank):
                pending.later_outputs.append((rank, task, output))
            elif isinstance(output, Done) and (refs := refs_in(output.values)):
                if node not in self._receiving:
                    self._receiving[node] = Receiving(lambda it: self._node(node).send(it))
                self._pending[rank] = pending = _Held(node, output, task, refs)
                self._spawn(self._fetch_values(rank, pending))
            else:
                items.append((rank, task, output))
        return Outputs(tuple(items))

    async def _fetch_values(self, rank: int, pending: _Held) -> None:
        """Fetch the values that a rank has returned, then send the held outputs to the notebook."""
        if self._pending.get(rank) is not pending:
            return  # for example, Stop has interrupted the task, or its node is lost
        receiving = self._receiving[pending.node]
        problem = await receiving.copy_segments(pending.refs)
        if self._pending.get(rank) is not pending:
            return
        places = receiving.places(pending.refs)
        if problem:
            self._fail_rank(rank, "NotEnoughMemory", f"where the notebook is: {problem}")
        elif len(places) < len(pending.refs):
            self._fail_rank(rank, "SegmentGone", "the value is gone: its process has ended since")
        else:
            self._received[rank] = pending.task, pending.node, tuple(places)
            self._finish(rank, replace(pending.done, values=relocate(pending.done.values, places)))

    def store_piece(self, node: int, piece: SegmentPiece) -> None:
        """Store a piece of a returned value, which a node has sent at the head's request."""
        self._receiving[node].add_piece(piece)
        self._show_all_progress()

    def _fail_rank(self, rank: int, name: str, message: str) -> None:
        pending = self._pending[rank]
        self._receiving[pending.node].drop(ref.path for ref in pending.refs)
        done = replace(pending.done, status="error", values=None)
        self._finish(rank, failure_in_words(name, message), done)

    def _finish(self, rank: int, *final: Output) -> None:
        pending = self._pending.pop(rank)
        later = self.hold_back(pending.node, Outputs(tuple(pending.later_outputs)))
        self._show(Outputs((*((rank, pending.task, each) for each in final), *later.items)))

    def release_values(self, ranks: Iterable[int], task: str | None = None) -> None:
        """Release the head's copies of values that `ranks` have returned.

        With `task`, the id of a task, release only values that this task has returned.
        """
        for rank in ranks:
            if rank in self._received and task in (None, self._received[rank][0]):
                _, node, paths = self._received.pop(rank)
                self._receiving[node].drop(paths)

    # --- both ways -------------------------------------------------------------------------

    def interrupt(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """End those tasks of `ranks` that wait in the head for a transfer, because of Stop.

        Returns the other ranks, which their agents must interrupt.
        """
        stopped, ended = {*ranks}, set[int]()
        for run in [each.run for each in self._waiting.values()]:
            if not stopped.isdisjoint(run.ranks):
                self._fail(run, run.ranks, "KeyboardInterrupt", "")
                ended.update(run.ranks)
        for rank in stopped & self._pending.keys():
            self._fail_rank(rank, "KeyboardInterrupt", "")
            ended.add(rank)
        return tuple(sorted(stopped - ended))

    def forget_tasks(self) -> None:
        """Drop all tasks and outputs that wait for a transfer; called when all ranks are ended."""
        for task in [*self._waiting]:
            self._cancel(task)
        pending, self._pending = self._pending, {}
        for each in pending.values():
            self._receiving[each.node].drop(ref.path for ref in each.refs)

    def handle_node_lost(self, node: int) -> None:
        """Stop all transfers to and from a node, which is lost.

        Values from the node that have arrived completely can still be read by the notebook.
        """
        self._paths_on.pop(node, None)
        self._pending = {rank: each for rank, each in self._pending.items() if each.node != node}
        if receiving := self._receiving.get(node):
            receiving.abandon()

    def close(self) -> None:
        """Release all values, and forget all tasks."""
        for receiving in self._receiving.values():
            receiving.close()
        for table in (self._waiting, self._refs, self._paths_on, self._pending, self._receiving):
            table.clear()
        self._received.clear()

    def _show_all_progress(self) -> None:
        """Send the notebook the progress of each transfer, at most once in `SAY_EVERY` seconds."""
        if (now := time.monotonic()) < self._progress_due:
            return
        self._progress_due = now + SAY_EVERY
        for waiting in self._waiting.values():
            done = sum(waiting.sent.values())
            self._show_progress(waiting.run.ranks[0], waiting.run.id, done, waiting.total)
        for rank, pending in self._pending.items():
            done = self._receiving[pending.node].count(pending.refs)
            self._show_progress(rank, pending.task, done, sum(map(length_of, pending.refs)))

    def _show_progress(self, rank: int, task: str, done: int, total: int) -> None:
        self._show(Outputs(((rank, task, TransferProgress(done, total)),)))
