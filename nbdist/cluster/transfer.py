"""Big values between the notebook and the nodes: what waits for them, and how long they are kept.

The rules are in `nbdist.wire.transfer`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from nbdist.cluster.node import Node
from nbdist.output.events import Done, Moved, Output
from nbdist.values.payload import SegmentRef, is_open, length_of, refs_in, relocate
from nbdist.wire.messages import Outputs, Run
from nbdist.wire.node_messages import Bring
from nbdist.wire.transfer import Drop, Fetch, Piece, Receiving, piece_of
from nbdist.wire.work import failure_in_words

SAY_EVERY = 0.25  # seconds after which it is said how far big values are
LOOK_EVERY = 1.0  # seconds between two looks at what the notebook still has


@dataclass
class _Waiting:
    """A task whose memory is under way: how many bytes of it were `sent`, by node and path."""

    run: Run
    total: int
    sent: dict[tuple[int, str], int]


@dataclass
class _Held:
    """The end of a rank's task whose values are under way, and what the rank has said after it."""

    node: int
    done: Done
    task: str
    refs: tuple[SegmentRef, ...]
    after: list[tuple[int, str, Output]] = field(default_factory=list)


class BulkTransfers:
    """Big values both ways, between the notebook and the nodes.

    All ranks get a task at the same time, once all their nodes have its variables: none waits in a
    collective for a slow link.  Values that ranks return stay in this process's memory until the
    notebook has read them.
    `node` returns the node with a number, `run` sends a task, `show` sends the notebook what ranks
    could not be asked for or had to wait for, and `do` does something meanwhile.
    """

    def __init__(
        self,
        node: Callable[[int], Node],
        run: Callable[[Run], None],
        show: Callable[[Outputs], None],
        do: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._node, self._run, self._show, self._do = node, run, show, do
        self._waiting: dict[str, _Waiting] = {}
        self._refs: dict[str, SegmentRef] = {}
        self._there: dict[int, set[str]] = {}
        """The paths of the notebook's segments that each node has, all of each."""
        self._held: dict[int, _Held] = {}
        self._receiving: dict[int, Receiving] = {}
        self._came_from: dict[int, tuple[str, int, tuple[str, ...]]] = {}  # by rank: task and node
        self._say_at = 0.0

    # --- down ------------------------------------------------------------------------------

    def run(self, run: Run, nodes: Iterable[int]) -> None:
        """Send a task to these nodes once they have what the notebook still has of its memory."""
        self.release_values(run.ranks)
        lacks = {}
        for node in nodes if run.segments else ():
            there = self._there.setdefault(node, set())
            if refs := tuple(ref for ref in run.segments if ref.path not in there):
                lacks[node] = refs
        if not lacks:
            self._run(run)
            return
        total = sum(length_of(ref) for refs in lacks.values() for ref in refs)
        sent = {(node, ref.path): 0 for node, refs in lacks.items() for ref in refs}
        self._waiting[run.id] = _Waiting(run, total, sent)
        if not self._refs:
            self._do(self._look())
        self._refs |= {ref.path: ref for ref in run.segments}
        for node, refs in lacks.items():
            self._do(self._bring(run.id, node, refs))

    async def _bring(self, task: str, number: int, refs: tuple[SegmentRef, ...]) -> None:
        """Send a node what it lacks for a task; without room for it no rank gets the task."""
        if task not in self._waiting:
            return  # it was stopped
        node = self._node(number)
        problem = await node.do(Bring(refs))
        if (waiting := self._waiting.get(task)) is None:
            return
        if problem:
            why = f"{node.name}: {problem}"
            self._fail(waiting.run, set(node.ranks), "NotEnoughMemory", why)
            return
        for ref in refs:
            waiting.sent[number, ref.path] = length_of(ref)
            if not node.lost:
                self._there[number].add(ref.path)
        if sum(waiting.sent.values()) == waiting.total:
            del self._waiting[task]
            self._tell(waiting.run.ranks[0], task, waiting.total, waiting.total)
            self._run(waiting.run)

    def fetch(self, node: int, fetch: Fetch) -> None:
        """Send a node the piece that it asks for."""
        self._node(node).send(piece_of(fetch))
        for waiting in self._waiting.values():
            if (node, fetch.ref.path) in waiting.sent:
                waiting.sent[node, fetch.ref.path] = fetch.offset
        self._say()

    def _fail(self, run: Run, failed: Collection[int], name: str, message: str) -> None:
        """End the task on all of its ranks before it began, on the `failed` with this error."""
        self._call_off(run.id)
        failure, items = failure_in_words(name, message), list[tuple[int, str, Output]]()
        for rank in run.ranks:
            if rank in failed:
                items.append((rank, run.id, failure))
            done = Done("error" if rank in failed else "aborted", 0.0, received=False)
            items.append((rank, run.id, done))
        self._show(Outputs(tuple(items)))

    def _call_off(self, task: str) -> None:
        """Send it to no rank, and have nodes drop what has come of its memory in part."""
        sent = self._waiting.pop(task).sent.keys()
        for node, path in sent - self._wanted():
            if path not in self._there.get(node, ()):
                self._node(node).send(Drop(path))

    def _wanted(self) -> set[tuple[int, str]]:
        return set().union(*(waiting.sent for waiting in self._waiting.values()))

    async def _look(self) -> None:
        """Have nodes drop what no task waits for, and the notebook has closed."""
        while self._refs:
            await asyncio.sleep(LOOK_EVERY)
            wanted = {path for _, path in self._wanted()}
            gone = [
                path for path, ref in self._refs.items() if path not in wanted and not is_open(ref)
            ]
            for path in gone:
                del self._refs[path]
                for node, there in self._there.items():
                    if path in there:
                        there.discard(path)
                        self._node(node).send(Drop(path))

    # --- up --------------------------------------------------------------------------------

    def hold_back(self, node: int, outputs: Outputs) -> Outputs:
        """Return what can be shown: not the end of a task whose values are not here, nor later."""
        items = []
        for rank, task, output in outputs.items:
            if held := self._held.get(rank):
                held.after.append((rank, task, output))
            elif isinstance(output, Done) and (refs := refs_in(output.values)):
                if node not in self._receiving:
                    self._receiving[node] = Receiving(lambda it: self._node(node).send(it))
                self._held[rank] = held = _Held(node, output, task, refs)
                self._do(self._take_in(rank, held))
            else:
                items.append((rank, task, output))
        return Outputs(tuple(items))

    async def _take_in(self, rank: int, held: _Held) -> None:
        """Bring what a rank returns here, and show the end of its task."""
        if self._held.get(rank) is not held:
            return  # it was stopped, or its node is lost
        receiving = self._receiving[held.node]
        problem = await receiving.bring(held.refs)
        if self._held.get(rank) is not held:
            return
        places = receiving.places(held.refs)
        if problem:
            self._fail_held(rank, "NotEnoughMemory", f"where the notebook is: {problem}")
        elif len(places) < len(held.refs):
            self._fail_held(rank, "SegmentGone", "the value is gone: its process has ended since")
        else:
            self._came_from[rank] = held.task, held.node, tuple(places)
            self._release(rank, replace(held.done, values=relocate(held.done.values, places)))

    def take(self, node: int, piece: Piece) -> None:
        """Take in what a node was asked for."""
        self._receiving[node].take(piece)
        self._say()

    def _fail_held(self, rank: int, name: str, message: str) -> None:
        held = self._held[rank]
        self._receiving[held.node].drop(ref.path for ref in held.refs)
        done = replace(held.done, status="error", values=None)
        self._release(rank, failure_in_words(name, message), done)

    def _release(self, rank: int, *ended: Output) -> None:
        held = self._held.pop(rank)
        later = self.hold_back(held.node, Outputs(tuple(held.after)))
        self._show(Outputs((*((rank, held.task, each) for each in ended), *later.items)))

    def release_values(self, ranks: Iterable[int], task: str | None = None) -> None:
        """Release what these ranks have brought back of this task, by default of any."""
        for rank in ranks:
            if rank in self._came_from and task in (None, self._came_from[rank][0]):
                _, node, paths = self._came_from.pop(rank)
                self._receiving[node].drop(paths)

    # --- both ways -------------------------------------------------------------------------

    def stop(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """End tasks of these ranks whose values are under way; return the other ranks."""
        stopped, ended = {*ranks}, set[int]()
        for run in [each.run for each in self._waiting.values()]:
            if not stopped.isdisjoint(run.ranks):
                self._fail(run, run.ranks, "KeyboardInterrupt", "")
                ended.update(run.ranks)
        for rank in stopped & self._held.keys():
            self._fail_held(rank, "KeyboardInterrupt", "")
            ended.add(rank)
        return tuple(sorted(stopped - ended))

    def forget_tasks(self) -> None:
        """Send and show nothing of the tasks so far: all ranks have ended, and later are others."""
        for task in [*self._waiting]:
            self._call_off(task)
        held, self._held = self._held, {}
        for each in held.values():
            self._receiving[each.node].drop(ref.path for ref in each.refs)

    def lose(self, node: int) -> None:
        """Wait for nothing of a node that is lost; what has come whole can be read."""
        self._there.pop(node, None)
        self._held = {rank: held for rank, held in self._held.items() if held.node != node}
        if receiving := self._receiving.get(node):
            receiving.abandon()

    def close(self) -> None:
        """Let go of everything."""
        for receiving in self._receiving.values():
            receiving.close()
        for kept in (self._waiting, self._refs, self._there, self._held, self._receiving):
            kept.clear()
        self._came_from.clear()

    def _say(self) -> None:
        """Tell of each task that waits how much of its memory, or of its values, is there."""
        if (now := time.monotonic()) < self._say_at:
            return
        self._say_at = now + SAY_EVERY
        for waiting in self._waiting.values():
            done = sum(waiting.sent.values())
            self._tell(waiting.run.ranks[0], waiting.run.id, done, waiting.total)
        for rank, held in self._held.items():
            done = self._receiving[held.node].count(held.refs)
            self._tell(rank, held.task, done, sum(map(length_of, held.refs)))

    def _tell(self, rank: int, task: str, done: int, total: int) -> None:
        self._show(Outputs(((rank, task, Moved(done, total)),)))
