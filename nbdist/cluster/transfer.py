"""Big values between the notebook and the nodes: what waits for them, and how long they are kept.

The rules are in `nbdist.wire.transfer`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from nbdist.cluster.node import Node
from nbdist.output.events import Done, Moved, Output
from nbdist.values.payload import Payload, moved, refs_in
from nbdist.values.shared_memory import SegmentGone, SegmentRef, is_there, length_of
from nbdist.wire.messages import Outputs, Run
from nbdist.wire.transfer import MOST_WINDOW, Dropped, Piece, Receiving, Sending, Taken
from nbdist.wire.work import failure_in_words

MOST_UNDER_WAY = 256  # pieces to all nodes together: a quarter of a gigabyte of memory
SAY_EVERY = 0.25  # seconds after which it is said how far big values are
LOOK_EVERY = 1.0  # seconds between two looks at what the notebook still has


@dataclass
class _Waiting:
    """A task that waits for paths that nodes lack, of which there were `total` bytes at first."""

    run: Run
    lacks: dict[int, set[str]] = field(default_factory=dict)
    total: int = 0
    is_told: bool = False


class BulkTransfers:
    """Big values both ways, between the notebook and the nodes.

    All ranks get a task at the same time, once all their nodes have its variables: none waits in a
    collective for a slow link.  `node` returns the node with a number, `run` sends a task, and
    `show` sends the notebook outputs for ranks that cannot get their task.  Values that ranks
    return stay in this process's memory until the notebook has read them.
    """

    def __init__(
        self,
        node: Callable[[int], Node],
        run: Callable[[Run], None],
        show: Callable[[Outputs], None],
    ) -> None:
        self._node, self._run, self._show = node, run, show
        self._sending: dict[int, Sending] = {}
        self._receiving: dict[int, Receiving] = {}
        self._came_from: dict[int, tuple[str, int, tuple[str, ...]]] = {}  # by rank: task and node
        self._refs: dict[str, SegmentRef] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._say_at = 0.0

    def run(self, run: Run, nodes: Iterable[int]) -> None:
        """Send a task to these nodes once they have what the notebook still has of its memory."""
        self.let_go(run.ranks)
        waiting = self._waiting[run.id] = _Waiting(run)
        for node in nodes if run.segments else ():
            sending = self._sending.setdefault(node, Sending())
            lacks = waiting.lacks[node] = set[str]()
            for ref in run.segments:
                with suppress(SegmentGone):
                    if sending.add(ref):
                        lacks.add(ref.path)
            waiting.total += sum(map(sending.left, lacks))
        self._refs |= {ref.path: ref for ref in run.segments}
        for sending in self._sending.values():
            sending.most = max(2, min(MOST_WINDOW, MOST_UNDER_WAY // len(self._sending)))
        self._go_on()

    def stop(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """End tasks of these ranks that are not sent yet; the ranks that have others."""
        stopped, ended = {*ranks}, set[int]()
        for run in [each.run for each in self._waiting.values()]:
            if not stopped.isdisjoint(run.ranks):
                self._fail(run, run.ranks, "KeyboardInterrupt", "")
                ended.update(run.ranks)
        self._drop()
        return tuple(sorted(stopped - ended))

    def moved(self, node: int, outputs: Outputs) -> Outputs:
        """Return what a node said with its values where the notebook can open them."""
        if (receiving := self._receiving.get(node)) is None:
            return outputs
        items = []
        for rank, task, output in outputs.items:
            match output:
                case Done(values=Payload() as values) if places := receiving.places(
                    refs_in(values)
                ):
                    self._came_from[rank] = task, node, tuple(places)
                    output = replace(output, values=moved(values, places))
            items.append((rank, task, output))
        return Outputs(tuple(items))

    def let_go(self, ranks: Iterable[int], task: str | None = None) -> None:
        """Release what these ranks have brought back of this task, by default of any."""
        for rank in ranks:
            if rank in self._came_from and task in (None, self._came_from[rank][0]):
                _, node, paths = self._came_from.pop(rank)
                self._receiving[node].drop(paths)

    def take(self, node: int, message: Piece | Taken | Dropped) -> None:
        """Take in what a node says of big values."""
        match message:
            case Piece():
                receiving = self._receiving.setdefault(node, Receiving())
                if taken := receiving.take(message):
                    self._node(node).send(taken)
            case Dropped(paths) if node in self._receiving:
                self._receiving[node].drop(paths)
            case Taken() if sending := self._sending.get(node):
                if sending.taken(message, time.monotonic()):
                    self._note(node, message)
                self._say()
                self._go_on()

    def lose(self, node: int) -> None:
        """Wait for nothing of a node that is lost; what has come whole can be read."""
        if receiving := self._receiving.get(node):
            receiving.abandon()
        if sending := self._sending.pop(node, None):
            sending.close()
        for waiting in self._waiting.values():
            waiting.lacks.pop(node, None)
        self._go_on()

    def close(self) -> None:
        """Let go of everything."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for sending in self._sending.values():
            sending.close()
        for receiving in self._receiving.values():
            receiving.close()
        for kept in (self._sending, self._receiving, self._waiting, self._came_from):
            kept.clear()

    def _note(self, node: int, taken: Taken) -> None:
        """Note that a node has a segment, or has no room for it: then no rank gets the task."""
        for waiting in [*self._waiting.values()]:
            if taken.path in waiting.lacks.get(node, ()):
                waiting.lacks[node].discard(taken.path)
                if taken.problem:
                    there = self._node(node)
                    failed = [rank for rank in waiting.run.ranks if rank in there.ranks]
                    why = f"{there.name}: {taken.problem}"
                    self._fail(waiting.run, failed, "NotEnoughMemory", why)
        if taken.problem:
            self._drop()

    def _go_on(self) -> None:
        now = time.monotonic()
        for number, sending in [*self._sending.items()]:
            while piece := sending.next(now):
                self._node(number).send(piece)
        for waiting in [each for each in self._waiting.values() if not any(each.lacks.values())]:
            del self._waiting[waiting.run.id]
            if waiting.is_told:
                self._tell(waiting.run, Moved(waiting.total, waiting.total))
            self._run(waiting.run)
        if self._timer is None and self._sending:
            self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY, self._look)

    def _say(self) -> None:
        """Tell of each task that waits how much of its memory is there, on all nodes together."""
        if (now := time.monotonic()) < self._say_at:
            return
        self._say_at = now + SAY_EVERY
        for waiting in self._waiting.values():
            lacks = waiting.lacks.items()
            left = sum(self._sending[node].left(path) for node, paths in lacks for path in paths)
            waiting.is_told = True
            self._tell(waiting.run, Moved(waiting.total - left, waiting.total))

    def _tell(self, run: Run, moved: Moved) -> None:
        self._show(Outputs(((run.ranks[0], run.id, moved),)))

    def _look(self) -> None:
        self._timer = None
        self._drop()
        self._go_on()

    def _drop(self) -> None:
        """Have nodes drop what no task waits for, and the notebook has closed."""
        lacks = (paths for each in self._waiting.values() for paths in each.lacks.values())
        wanted = set[str]().union(*lacks)
        for path in [path for path in self._refs if path not in wanted]:
            is_gone = not is_there(self._refs[path])
            for number, sending in self._sending.items():
                is_useless = is_gone or path not in sending.there
                if is_useless and (dropped := sending.drop([path])):
                    self._node(number).send(dropped)
            if is_gone:
                del self._refs[path]

    def _fail(self, run: Run, failed: Collection[int], name: str, message: str) -> None:
        """End the task on all of its ranks before it began, on the `failed` with this error."""
        del self._waiting[run.id]
        failure, items = failure_in_words(name, message), list[tuple[int, str, Output]]()
        for rank in run.ranks:
            if rank in failed:
                items.append((rank, run.id, failure))
            done = Done("error" if rank in failed else "aborted", 0.0, received=False)
            items.append((rank, run.id, done))
        self._show(Outputs(tuple(items)))


@dataclass
class _Held:
    """The end of a rank's task whose `total` bytes are under way, and what came after it."""

    done: Done
    task_id: str
    paths: tuple[str, ...]
    total: int
    after: list[tuple[str, Output]] = field(default_factory=list)


class Uploads:
    """In an agent: ends of tasks are held back until the head has their big values.

    So is what a rank says after it.  `emit` takes all that ranks say, in order.
    """

    def __init__(
        self, emit: Callable[[int, str, Output], None], send: Callable[[Piece | Dropped], None]
    ) -> None:
        self._emit, self._send = emit, send
        self._sending = Sending()
        self._held: dict[int, _Held] = {}
        self._say_at = 0.0

    def __repr__(self) -> str:
        return f"<Uploads of ranks {sorted(self._held)}, {self._sending}>"

    def add(self, rank: int, task_id: str, output: Output) -> None:
        """Take what a rank says."""
        if rank in self._held:
            self._held[rank].after.append((task_id, output))
        elif isinstance(output, Done) and isinstance(output.values, Payload):
            self._end(rank, task_id, output, refs_in(output.values))
        else:
            self._emit(rank, task_id, output)

    def taken(self, taken: Taken) -> None:
        """Note what the head has answered; what that completes is passed on."""
        self._sending.taken(taken, time.monotonic())
        for rank, held in [*self._held.items()]:
            if taken.path in held.paths:
                if taken.problem:
                    self._fail(rank, "NotEnoughMemory", f"where the notebook is: {taken.problem}")
                elif not any(map(self._sending.left, held.paths)):
                    self._release(rank, held.done)
        if (now := time.monotonic()) > self._say_at:
            self._say_at = now + SAY_EVERY
            for rank in self._held:
                self._tell(rank)
        self._go_on()

    def stop(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Bring back nothing of these ranks' that is under way; the ranks that have no such."""
        others = tuple(rank for rank in ranks if rank not in self._held)
        for rank in {*ranks}.difference(others):
            if dropped := self._sending.drop(self._held[rank].paths):
                self._send(dropped)
            self._fail(rank, "KeyboardInterrupt", "")
        return others

    def close(self) -> None:
        """Send nothing more."""
        self._sending.close()
        self._held.clear()

    def _end(self, rank: int, task_id: str, done: Done, refs: Collection[SegmentRef]) -> None:
        try:
            lacks = [ref for ref in refs if self._sending.add(ref)]
        except SegmentGone as error:  # its process has ended since
            self._sending.drop(ref.path for ref in refs)
            self._emit(rank, task_id, failure_in_words("SegmentGone", str(error)))
            self._emit(rank, task_id, replace(done, status="error", values=None))
            return
        if not lacks:
            self._emit(rank, task_id, done)
            return
        paths, total = tuple(ref.path for ref in lacks), sum(map(length_of, lacks))
        self._held[rank] = _Held(done, task_id, paths, total)
        self._tell(rank)
        self._go_on()

    def _tell(self, rank: int) -> None:
        held = self._held[rank]
        left = sum(map(self._sending.left, held.paths))
        self._emit(rank, held.task_id, Moved(held.total - left, held.total))

    def _go_on(self) -> None:
        now = time.monotonic()
        while piece := self._sending.next(now):
            self._send(piece)

    def _fail(self, rank: int, name: str, message: str) -> None:
        held = self._held[rank]
        self._emit(rank, held.task_id, failure_in_words(name, message))
        self._release(rank, replace(held.done, status="error", values=None))

    def _release(self, rank: int, done: Done) -> None:
        held = self._held.pop(rank)
        for path in held.paths:
            self._sending.forget(path)
        self._emit(rank, held.task_id, done)
        for task_id, output in held.after:
            self.add(rank, task_id, output)
