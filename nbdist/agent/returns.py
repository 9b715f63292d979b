"""What ranks bring back, on its way to the head of a world on several machines.

The end of a task is held back until the head has its big values, and with it whatever the rank
says after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from nbdist.output.events import Done, Moved, Output
from nbdist.values.payload import Payload, refs_in
from nbdist.values.shared_memory import SegmentGone, length_of
from nbdist.wire.carrying import Dropped, Piece, Sending, Taken
from nbdist.wire.task import failure_in_words

MOVED_EVERY = 0.25
"""Seconds after which it is said how far it is."""


@dataclass
class _Held:
    """What a rank has said from the end of its task on, and how much of each value is there."""

    done: Done
    task_id: str
    totals: dict[str, int]
    there: dict[str, int]
    after: list[tuple[str, Output]]

    @property
    def moved(self) -> Moved:
        return Moved(sum(self.there.values()), sum(self.totals.values()))


class Returns:
    """Ends of tasks whose values are under way to the head.

    `emit` takes all that ranks say, in order, `send` is for the head.
    """

    def __init__(
        self,
        emit: Callable[[int, str, Output], None],
        send: Callable[[Piece | Dropped], None],
    ) -> None:
        self._emit = emit
        self._send = send
        self._sending = Sending()
        self._held: dict[int, _Held] = {}
        self._say_at = 0.0

    def __repr__(self) -> str:
        return f"<Returns of ranks {sorted(self._held)}, {self._sending}>"

    def add(self, rank: int, task_id: str, output: Output) -> None:
        """Take what a rank says."""
        if rank in self._held:
            self._held[rank].after.append((task_id, output))
        elif isinstance(output, Done) and isinstance(output.values, Payload):
            self._end(rank, task_id, output)
        else:
            self._emit(rank, task_id, output)

    def taken(self, taken: Taken) -> None:
        """Note what the head has answered; what that completes is passed on."""
        self._sending.taken(taken, time.monotonic())
        for rank, held in [*self._held.items()]:
            if taken.path in held.totals:
                self._note(rank, held, taken)
        if (now := time.monotonic()) > self._say_at:
            self._say_at = now + MOVED_EVERY
            for rank, held in self._held.items():
                self._emit(rank, held.task_id, held.moved)
        self._go_on()

    def stop(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Bring back nothing of these ranks' that is under way; the ranks that have no such."""
        others = tuple(rank for rank in ranks if rank not in self._held)
        for rank in {*ranks}.difference(others):
            if dropped := self._sending.drop(self._held[rank].totals):
                self._send(dropped)
            self._fail(rank, "KeyboardInterrupt", "")
        return others

    def close(self) -> None:
        """Send nothing more."""
        self._sending.close()
        self._held.clear()

    def _end(self, rank: int, task_id: str, done: Done) -> None:
        refs = refs_in(done.values)
        try:
            lacks = [ref for ref in refs if self._sending.add(ref)]
        except SegmentGone as error:  # its process has ended since
            self._sending.drop(ref.path for ref in refs)
            self._emit(rank, task_id, failure_in_words("SegmentGone", str(error)))
            self._emit(rank, task_id, replace(done, status="error", values=None))
            return
        if lacks:
            totals = {ref.path: length_of(ref) for ref in lacks}
            held = self._held[rank] = _Held(done, task_id, totals, dict.fromkeys(totals, 0), [])
            self._emit(rank, task_id, held.moved)
            self._go_on()
        else:
            self._emit(rank, task_id, done)

    def _note(self, rank: int, held: _Held, taken: Taken) -> None:
        held.there[taken.path] = taken.end
        if taken.problem:
            self._fail(rank, "NotEnoughMemory", f"where the notebook is: {taken.problem}")
        elif held.moved.done == held.moved.total:
            self._release(rank, held.done)

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
        for path in held.totals:
            self._sending.forget(path)
        self._emit(rank, held.task_id, done)
        for task_id, output in held.after:
            self.add(rank, task_id, output)
