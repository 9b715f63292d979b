"""A cell that has been sent to its ranks: iterate over it while it runs."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nbdist.errors import NbdistError, WorkerDied, WorkerError, WorldStuck
from nbdist.wire.messages import NAME_PROBLEM, Cell, Died, Done, Failure, Interrupt, Output
from nbdist.wire.payload import open_payload
from nbdist.wire.pickling import unpickle
from nbdist.world.result import CellResult
from nbdist.world.states import Event
from nbdist.world.transcript import Transcript

if TYPE_CHECKING:
    from nbdist.world.world import World

TICK = 0.25
"""Seconds between two yields when nothing is said: enough for a clock that people read."""

EAGER_SECONDS, EAGER_TICK = 0.2, 0.05
"""The same for the first moments, so that the first drawing comes when it is due."""

INTERRUPT_GRACE = 3.0
"""Seconds that ranks have to stop after SIGINT, before control is given back without them."""


News = list[tuple[int, Output]]


class RunningCell:
    """Yields what ranks have shown since the last time, until all of them have finished.

    Comes round every `TICK` seconds at least, with nothing if need be, so that whoever
    draws can move a clock on; `transcript` has everything so far.  For the thread that
    submitted it.  KeyboardInterrupt leaves it as it was; call `interrupt` and go on
    iterating, which then ends within `INTERRUPT_GRACE` seconds.
    """

    def __init__(self, world: World, cell: Cell) -> None:
        self.cell = cell
        self.transcript = Transcript(cell.ranks)
        self._world = world
        self._started = time.monotonic()
        self._started_ns = time.time_ns()
        self._give_up_at = float("inf")
        self._news: News = []
        self.transcript.start(self._started)

    def __repr__(self) -> str:
        return f"<RunningCell {self.cell.id[:8]} unfinished {self.unfinished}>"

    @property
    def unfinished(self) -> tuple[int, ...]:
        """The ranks that still run it."""
        return tuple(track.rank for track in self.transcript if track.finished is None)

    @property
    def age(self) -> float:
        """Seconds since it was sent."""
        return time.monotonic() - self._started

    def __iter__(self) -> Iterator[News]:
        while self.unfinished:
            tick = TICK if self.age > EAGER_SECONDS else EAGER_TICK
            wait = min(tick, self._give_up_at - time.monotonic())
            if wait <= 0:
                self._world.advance(Event.GAVE_UP)
                return
            self._world.receive(wait)
            news, self._news = self._news, []
            yield news

    def interrupt(self) -> None:
        """Send SIGINT to the ranks that still run it."""
        self._world.advance(Event.INTERRUPT)
        self._give_up_at = time.monotonic() + INTERRUPT_GRACE
        self._world.link.call(Interrupt(self.unfinished), timeout=INTERRUPT_GRACE)

    def take(self, rank: int, output: Output) -> None:
        """Called by the world with each output of the cell."""
        self.transcript.receive(rank, output, time.monotonic())
        self._news.append((rank, output))

    def take_loss(self) -> None:
        """Called by the world when the agent has ended: so have the ranks."""
        for rank in self.unfinished:
            self.take(rank, Died(-signal.SIGKILL, time.time_ns()))

    @property
    def died(self) -> bool:
        """Whether the process of any rank ended."""
        return any(isinstance(error, Died) for error in self.transcript.errors.values())

    @property
    def ranks_with_names(self) -> tuple[int, ...]:
        """The ranks where the names that came along were bound, as far as is known."""
        refused = {
            rank
            for rank, error in self.transcript.errors.items()
            if isinstance(error, Failure) and error.name == NAME_PROBLEM
        }
        return tuple(rank for rank in self.cell.ranks if rank not in refused)

    @property
    def bound(self) -> frozenset[str]:
        """Names that it bound on any rank."""
        return frozenset().union(*(done.bound for done in self._done().values()))

    def result(self) -> CellResult:
        """Wait until it ends, and say what became of it; does not raise for failed ranks."""
        for _ in self:
            pass
        values = {
            rank: self._value(done) for rank, done in self._done().items() if done.status == "ok"
        }
        seconds = self.transcript.elapsed(time.monotonic())
        return CellResult(self.cell, self.transcript, seconds, self.transcript.errors, values)

    def error(self) -> NbdistError | None:
        """The one error that a failed or unfinished cell raises; None when all went well."""
        if self._world.lost is not None:
            return self._world.lost
        if self.unfinished:
            return WorldStuck(self.unfinished)
        cause = self.transcript.root_cause()
        if cause is None:
            return None
        rank, first = cause
        host, pid = self._world.host, self._world.pids.get(rank, 0)
        errors, ran = self.transcript.errors, len(self.cell.ranks)
        seconds = max(0.0, (first.time_ns - self._started_ns) / 1e9)
        if isinstance(first, Died):
            return WorkerDied(rank, host, pid, errors, ran, seconds, first.exit_code)
        return WorkerError(rank, host, pid, errors, ran, seconds, cause=(first.name, first.message))

    def _done(self) -> dict[int, Done]:
        return {track.rank: track.done for track in self.transcript if track.done is not None}

    def _value(self, done: Done) -> Any:
        if done.values is None:
            return None
        values = unpickle(open_payload(done.values), self._world.namespace)
        return values[self.cell.fetch[0]] if len(self.cell.fetch) == 1 else values
