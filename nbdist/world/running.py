"""A cell that has been sent to its ranks: iterate over it while it runs."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from nbdist.errors import NbdistError, RanksFreed, WorkerDied, WorkerError, WorldStuck, name_ranks
from nbdist.wire.messages import Cell, Interrupt, Kill, Place
from nbdist.wire.outputs import CONNECTION_LOST, NAME_PROBLEM, Died, Done, Failure, Output
from nbdist.wire.payload import Payload, open_payload
from nbdist.wire.pickling import unpickle
from nbdist.world.healing import healing_text
from nbdist.world.result import CellResult
from nbdist.world.sgr import strip
from nbdist.world.states import Event, State
from nbdist.world.transcript import FREED, TIMED_OUT, Transcript, follows
from nbdist.world.watch import ANSWER_TIMEOUT, UNCHANGED, Patience, Watch, waited_text, waits_text

if TYPE_CHECKING:
    from nbdist.world.world import World

TICK = 0.25
"""Seconds between two yields when nothing is said: enough for a clock that people read."""

EAGER_SECONDS, EAGER_TICK = 0.2, 0.05
"""The same for the first moments, so that the first drawing comes when it is due."""

INTERRUPT_GRACE = 2.0
"""Seconds that ranks have to stop after SIGINT, before they are killed and replaced."""

LEAVE_GRACE = 2.0
"""Seconds more for ranks that have left the cell's code and are telling of it, as long as a
first traceback takes on busy cores.  With all others it is 5 s until control is back."""

KILL_GRACE = 1.0
"""Seconds for killed ranks to be gone, before control is given back without them."""

GPU_UNCHANGED = 1.0
"""Seconds without a change after which ranks are taken to wait on their GPUs for one that has
failed; what a GPU does cannot be seen."""

LEFTOVERS_GRACE = 1.0
"""Seconds that GPUs have after a failed cell to end the collectives that all have joined."""

CELL_LINE = re.compile(r"Cell In\[\d+\], line (\d+)")

News = list[tuple[int, Output]]


class RunningCell:
    """Yields what ranks have shown since the last time, until all of them have finished.

    Comes round every `TICK` seconds at least, with nothing if need be, so that whoever
    draws can move a clock on; `transcript` has everything so far.  For the thread that
    submitted it.  KeyboardInterrupt leaves it as it was; call `interrupt` and go on
    iterating, which then ends within `INTERRUPT_GRACE` seconds.
    """

    def __init__(self, world: World, cell: Cell, patience: Patience) -> None:
        self.cell = cell
        self.patience = patience
        self.transcript = Transcript(cell.ranks)
        self._world = world
        self._started = time.monotonic()
        self._started_ns = time.time_ns()
        self._give_up_at = self._stopped_at = float("inf")
        self._news: News = []
        self._pids = dict(world.pids)
        self.freed: dict[int, Place] = {}
        self._seen: dict[int, Place] = {}
        self._stopping = False
        self._has_killed = False
        self._has_told_death = False
        self._watch = Watch(self._started, patience.hang_timeout)
        self.transcript.start(self._started)

    def __repr__(self) -> str:
        return f"<RunningCell {self.cell.id[:8]} unfinished {self.unfinished}>"

    @property
    def unfinished(self) -> tuple[int, ...]:
        """The ranks that still run it."""
        return tuple(track.rank for track in self.transcript if track.finished is None)

    @property
    def waits(self) -> str:
        """Which ranks wait in which collective, and where the others are; "" if none waits."""
        unfinished = self.unfinished
        places = {rank: self._watch.places.get(rank, Place()) for rank in unfinished}
        waiting = any(place.operation for place in places.values())
        others = set(range(self._world.size)) - set(self.cell.ranks)
        # Who waits in a cell for some ranks may wait for those that do not run it.
        if not waiting or (self.age < self.patience.hang_timeout and not others):
            return ""
        done = set(self.cell.ranks) - set(unfinished)
        finished = f" · {name_ranks(done)} finished" if done else ""
        absent = f" · not in this cell: {name_ranks(others)}" if others else ""
        return waits_text(places, self.cell.source) + finished + absent

    @property
    def age(self) -> float:
        """Seconds since it was sent."""
        return time.monotonic() - self._started

    def seconds_until(self, time_ns: int) -> float:
        """From when it was sent to a time on the clock."""
        return max(0.0, (time_ns - self._started_ns) / 1e9)

    def __iter__(self) -> Iterator[News]:
        while self.unfinished:
            tick = TICK if self.age > EAGER_SECONDS else EAGER_TICK
            now = time.monotonic()
            wait = min(tick, self._give_up_at - now, self._watch.wait(now))
            if now >= self._give_up_at and not self._kill():
                self._world.advance(Event.GAVE_UP)
                return
            self._world.receive(max(0.0, wait))
            self._watch_over()
            news, self._news = self._news, []
            yield news
        self._free_leftovers()
        self._world.heal()

    def interrupt(self) -> None:
        """Send SIGINT to the ranks that still run it, and break their collectives open."""
        if not self.unfinished:
            return
        self._world.advance(Event.INTERRUPT)
        self._stopping = True
        self._give_up_at = self._stopped_at = time.monotonic() + INTERRUPT_GRACE
        self._watch.hurry(time.monotonic())
        self._world.link.call(Interrupt(self.unfinished), timeout=INTERRUPT_GRACE)

    def _kill(self) -> bool:
        """End the ranks that did not stop; False when that was done before."""
        if self._has_killed:
            return False
        now = time.monotonic()
        leaving = self._leaving() if now < self._stopped_at + LEAVE_GRACE else ()
        stuck = tuple(rank for rank in self.unfinished if rank not in leaving)
        self._has_killed = not leaving
        self._give_up_at = now + (TICK if leaving else KILL_GRACE)
        if stuck:
            self._world.link.call(Kill(stuck), timeout=KILL_GRACE)
        return True

    def _leaving(self) -> tuple[int, ...]:
        """The ranks that are in no line of the cell any more, and wait for nobody."""
        places = {
            rank: self._watch.places.get(rank, Place(is_deaf=True)) for rank in self.unfinished
        }
        return tuple(
            rank
            for rank, place in places.items()
            if not (place.line or place.operation or place.is_deaf or place.is_stopped)
        )

    def _watch_over(self) -> None:
        """Look where ranks are when it is time to, and free those that can never go on."""
        now, unfinished = time.monotonic(), self.unfinished
        if not unfinished:
            return
        if self.died and not self._has_told_death:
            self._has_told_death = True
            self._end_wait_for_dead(unfinished)
        if not self._world.can_free:
            return
        # Ranks that do not run the cell will not join either.
        some_finished = len(unfinished) < self._world.size
        if some_finished:
            self._watch.hurry(now)
        if self._stopping:
            stuck = [rank for rank, place in self._watch.places.items() if place.operation]
        elif self.patience.frees and some_finished and self._can_never_go_on(unfinished, now):
            stuck = list(unfinished)
        else:
            stuck = []
        if stuck:
            self._free(stuck, now)
        elif self._watch.wait(now) == 0:
            self._watch.asked(now)
            everybody = tuple(range(self._world.size))
            self._world.link.look(everybody if self._runs_ahead else unfinished)

    @property
    def _runs_ahead(self) -> bool:
        """With nccl a rank can have finished the cell before its collectives have ended."""
        return "nccl" in self._world.backend

    def _can_never_go_on(self, unfinished: tuple[int, ...], now: float) -> bool:
        has_failed = bool(self.transcript.errors)
        # The sooner the better where the cell has failed anyway.
        unchanged = GPU_UNCHANGED if has_failed and self._runs_ahead else UNCHANGED
        if not self._watch.never(unfinished, now, unchanged):
            return False
        finished = (place for rank, place in self._seen.items() if rank not in unfinished)
        # Their GPUs may still do what is waited for; or wait too, where a rank has failed.
        return has_failed or not any(place.operation for place in finished)

    def _end_wait_for_dead(self, survivors: tuple[int, ...]) -> None:
        """They may wait for one another without a connection to the dead: free them now."""
        if self._world.on_failure != "heal":
            self._world.link.call(Kill(survivors), timeout=KILL_GRACE)
        elif self._world.can_free:
            self._world.link.free(tuple(range(self._world.size)))

    def _free_leftovers(self) -> None:
        """End collectives that a failed cell began and nobody will complete.

        The next cell's would meet them, and give wrong results.
        """
        world = self._world
        if not self.transcript.errors or world.state is not State.READY or not world.can_free:
            return
        enough = time.monotonic() + (LEFTOVERS_GRACE if self._runs_ahead else 0.0)
        looks = 0
        while looks < 2 or time.monotonic() < enough:
            places = self._look_now()
            if not any(place.unfinished for place in places.values()):
                return
            looks += 1
            if self._runs_ahead:
                world.receive(EAGER_TICK)
        world.advance(Event.FREED)
        world.link.free(tuple(range(world.size)))

    def _look_now(self) -> dict[int, Place]:
        """Where all ranks of the world are."""
        self._seen = {}
        self._world.link.look(tuple(range(self._world.size)))
        deadline = time.monotonic() + ANSWER_TIMEOUT
        while not self._seen and (left := deadline - time.monotonic()) > 0:
            self._world.receive(left)
        return self._seen

    def _free(self, ranks: list[int], now: float) -> None:
        self._world.advance(Event.FREED)
        self.freed.update({rank: self._watch.places[rank] for rank in ranks})
        self._watch.start_over(now)
        # On all ranks: a connection is ended by the one that accepted it, wherever it is, and
        # who is busy now must not wait for a freed one later.
        self._world.link.free(tuple(range(self._world.size)))

    def see(self, places: Mapping[int, Place]) -> None:
        """Called by the world with where ranks are."""
        self._seen = dict(places)
        known = {rank: place for rank, place in places.items() if rank in self.unfinished}
        self._watch.take(known, time.monotonic())

    def take(self, rank: int, output: Output) -> None:
        """Called by the world with each output of the cell."""
        if isinstance(output, Failure):
            if self._has_broken_group(output):
                self._world.advance(Event.FREED)
            if self._is_of_freeing(rank, output):
                output = self._in_one_line(rank, output)
        if isinstance(output, Done):
            self._watch.finished()
        self.transcript.receive(rank, output, time.monotonic())
        self._news.append((rank, output))

    def _has_broken_group(self, failure: Failure) -> bool:
        """Gloo's connections have ended, by us, with a dead rank, or by gloo itself."""
        said = CONNECTION_LOST.search(failure.message) or TIMED_OUT.search(failure.message)
        return said is not None and self._world.can_free

    def _is_of_freeing(self, rank: int, failure: Failure) -> bool:
        """Gloo's ends a wait with an error; with nccl the worker interrupts itself."""
        is_interrupt = failure.name == "KeyboardInterrupt" and not self._stopping
        is_lost = CONNECTION_LOST.search(failure.message) is not None
        return is_lost or (is_interrupt and rank in self.freed)

    def _in_one_line(self, rank: int, failure: Failure) -> Failure:
        """What torch says at length where connections have ended: ours, or a dead rank's."""
        if rank in self.freed:
            said = f"waited in {waited_text(self.freed[rank])} and was freed"
        else:
            said = f"waited for a rank that has ended{self._line(failure)} and was freed"
        said += "; all variables are kept"
        return Failure(FREED, said, (said,), failure.time_ns)

    def _line(self, failure: Failure) -> str:
        """` (cell line 7)`, ` (train.py line 7)`; "" where it is not in the traceback."""
        text, script = strip("\n".join(failure.traceback)), self.cell.script
        if script is None:
            found = CELL_LINE.findall(text)
            return f" (cell line {found[0]})" if found else ""
        found = re.findall(rf"File {re.escape(script.file)}:(\d+)", text)
        return f" ({os.path.basename(script.file)} line {found[-1]})" if found else ""

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

    @property
    def made(self) -> frozenset[str]:
        """The same without what it imported."""
        return frozenset().union(*(done.made for done in self._done().values()))

    def result(self) -> CellResult[Any]:
        """Wait until it ends, and say what became of it; does not raise for failed ranks."""
        for _ in self:
            pass
        values = {
            rank: self._value(done) for rank, done in self._done().items() if done.status == "ok"
        }
        seconds = self.transcript.elapsed(time.monotonic())
        errors, hosts = self.transcript.errors, self._world.hosts
        return CellResult(self.cell, self.transcript, seconds, errors, values, hosts)

    def wait(self) -> CellResult[Any]:
        """`result`, but Stop interrupts the ranks and waits for them before it goes on."""
        try:
            return self.result()
        except KeyboardInterrupt:
            self.interrupt()
            self.result()
            raise

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
        host, pid = self._world.host, self._pids.get(rank, 0)
        errors, ran = self.transcript.errors, len(self.cell.ranks)
        own = {rank: error for rank, error in errors.items() if not follows(error)}
        seconds = self.seconds_until(first.time_ns)
        if isinstance(first, Died):
            died = WorkerDied(rank, host, pid, errors, ran, seconds, first.exit_code)
            gone = (rank for rank, error in errors.items() if isinstance(error, Died))
            died.add(healing_text(self._world, gone))
            return died
        if not own and self.freed and not self._stopping:
            waits = waits_text(self.freed)
            return RanksFreed(rank, host, pid, errors, waits, self.cell.ranks, self._world.size)
        error = WorkerError(
            rank, host, pid, own or errors, ran, seconds, cause=(first.name, first.message)
        )
        if self.freed:
            error.add(f"{waits_text(self.freed)}: freed; all variables are kept.")
        return error.as_raised(first.kinds)

    def payloads(self) -> dict[int, Payload]:
        """The values that were fetched, as they came."""
        return {rank: done.values for rank, done in self._done().items() if done.values}

    def let_go(self) -> None:
        """The values have been read: workers need not keep the memory that they came in."""
        lent = (rank for rank, payload in self.payloads().items() if payload.segment)
        if ranks := tuple(lent):
            self._world.link.let_go(self.cell.id, ranks)

    def _done(self) -> dict[int, Done]:
        return {track.rank: track.done for track in self.transcript if track.done is not None}

    def _value(self, done: Done) -> Any:
        if done.values is None:
            return None
        values = unpickle(open_payload(done.values), self._world.namespace)
        return values[self.cell.fetch[0]] if len(self.cell.fetch) == 1 else values
