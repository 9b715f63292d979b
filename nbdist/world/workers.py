"""The workers of a world: their start and end, what there is of them, what comes up from them."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from nbdist import topology
from nbdist.config import OnFailure, Patience, WorldConfig
from nbdist.errors import AgentLost, StartError, WorldNotStarted
from nbdist.output.events import Died, Done, InputRequest, Moved, Record, Visible
from nbdist.wire.messages import (
    Aborted,
    Healed,
    Located,
    Received,
    Run,
    StartFailure,
    StartWorld,
    StopWorld,
    Used,
    WorldStarted,
)
from nbdist.wire.places import Place
from nbdist.wire.start import WorldSpec
from nbdist.wire.task import InputReply, Task
from nbdist.words import count
from nbdist.world.launchers import find_launcher
from nbdist.world.link import Link
from nbdist.world.names import NameTable, Shipped
from nbdist.world.past import Past
from nbdist.world.prompts import NOBODY
from nbdist.world.records import hand_over, wanted_level
from nbdist.world.running import Crew, RunningTask
from nbdist.world.setup import Setup
from nbdist.world.spec import make_spec, scaled
from nbdist.world.states import Event, State, next_state

LATE_KEPT = 1000
"""Outputs of threads that outlived their task; all text is in the log files too."""

STOP_GRACE = 2.0
"""Seconds that idle workers have to run their exit handlers."""

RESTART_GRACE = 0.3

STOP_TIMEOUT = 20.0
"""Seconds for an agent to have ended them; one that hangs is ended with them."""

QUIET_SECONDS = 2.0
"""Of a start, before anything is said of it."""


class Workers:
    """What there is of a world's workers; `following` and `recovery` act on them.

    `state` changes through `advance` alone.  `late` has what ranks have shown outside of
    tasks, `problem` why they share no group, `lacks` what is missing in their libraries.
    `names` says who has which, `past` what has run since the start, `dead` which ranks have
    died, `replaced` where others are now.
    """

    def __init__(self, config: WorldConfig) -> None:
        self.state = State.STOPPED
        self.namespace: dict[str, Any] = sys.modules["__main__"].__dict__
        self.pids: Mapping[int, int] = {}
        self.logs: Mapping[int, str] = {}
        self.lacks: tuple[str, ...] = ()
        self.name = self.host = self.problem = ""
        self.late: deque[tuple[int, Any]] = deque(maxlen=LATE_KEPT)
        self.names = NameTable(self.namespace)
        self.dead: dict[int, Died] = {}
        self.replaced: dict[int, Died] = {}
        self.setup = Setup()
        self.past = Past()
        self.lost: AgentLost | None = None
        self.running: RunningTask | None = None
        self._link: Link | None = None
        self.config: WorldConfig
        self.configure(config)

    # --- what there is --------------------------------------------------------------------

    @property
    def layout(self) -> str:
        """`1x4`; simulated nodes and workers on each, `2x4`."""
        seat = self.spec.seat(0)
        return f"{seat.nodes}x{seat.local_world_size}"

    @property
    def crew(self) -> Crew:
        """The workers as they are now."""
        heals = self.on_failure == "heal"
        return Crew(self.size, self.backend, self.host, self.pids, self.namespace, heals)

    @property
    def has_group(self) -> bool:
        """Whether there is a group whose collectives can be aborted."""
        return self.spec.backend is not None

    @property
    def everyone(self) -> tuple[int, ...]:
        """All ranks."""
        return tuple(range(self.size))

    def resolve(self, n: int | str) -> int:
        """Say how many workers `n` means here."""
        workers = topology.parse_workers(str(n))
        return topology.resolve(workers, len(self.spec.gpus), topology.usable_cores())

    @property
    def unfinished(self) -> tuple[int, ...]:
        """The ranks that have something of a task left to do."""
        return () if self.running is None else self.running.unfinished

    @property
    def is_idle(self) -> bool:
        """Whether no rank has anything of a task left to do."""
        return not self.unfinished

    @property
    def link(self) -> Link:
        """The connection to the agents of a world that has workers."""
        if self._link is None:
            raise WorldNotStarted("This")
        self._link.check_process()
        return self._link

    @property
    def on_failure(self) -> OnFailure:
        """What the death of a worker leads to."""
        return self.config.on_failure

    @on_failure.setter
    def on_failure(self, policy: OnFailure) -> None:
        self.config = self.config.but(on_failure=policy)

    # --- what changes ---------------------------------------------------------------------

    def advance(self, event: Event) -> None:
        """Go to another state: there is no other door."""
        self.state = next_state(self.state, event)

    def configure(self, config: WorldConfig) -> None:
        """Work out the spec of the workers; UsageError for what cannot be."""
        spec, self.backend, self.warning = make_spec(config, self.name)
        self.spec: WorldSpec = spec
        self.size, self.name = spec.world_size, spec.name
        self.config = config

    def take_healed(self, healed: Healed) -> None:
        """Take in what the agent says of the workers there are now, more or fewer."""
        self.pids, self.logs, self.problem = healed.pids, healed.logs, healed.problem
        before, after = self.size, len(healed.pids)
        if before != after:
            self.spec, _ = scaled(self.spec, self.config, after)
            self.config, self.size = self.config.but(n=after), after
            self.names.scaled(before, after)
            self.setup.scale(before, after)
        # One that was to be added may have died instead.
        self.dead = {rank: died for rank, died in self.dead.items() if rank < after}

    def replace_dead(self, made: Collection[str]) -> tuple[int, ...]:
        """Note that they were replaced, and lack what the cell in which they died `made`."""
        ranks = tuple(self.dead)
        self.names.replaced(ranks, made)
        self.replaced |= self.dead
        self.dead = {}
        return ranks

    def take_replaced(self) -> dict[int, Died]:
        """Return the ranks that have died and been replaced since this was last asked, and how."""
        replaced, self.replaced = self.replaced, {}
        return replaced

    def send(
        self,
        task: Task,
        patience: Patience | None = None,
        shipped: Mapping[str, Shipped] | None = None,
    ) -> RunningTask:
        """Send a task to its ranks, which are ready; `shipped` is what its names are."""
        imports = self.names.take_lost_imports(task.ranks)
        task = replace(task, log_level=wanted_level(), imports=imports)
        running = RunningTask(task, patience or self.config.patience, self.crew, shipped)
        link, packed = self.link, Run(task.id, task.ranks, task.pack())
        self.advance(Event.TASK)
        self.running = running
        self.names.sent(running.shipped)
        with running.counting_stops():  # ranks may have begun when it comes
            link.run(packed)
        return running

    # --- start and end --------------------------------------------------------------------

    def starting(self) -> Iterator[int]:
        """Start them, unless they are there; says now and then how many are up so far."""
        if self.state not in (State.STOPPED, State.LOST):
            return
        self.advance(Event.START)
        self.lost, self.dead, self.replaced = None, {}, {}
        self.names, self.past = NameTable(self.namespace), Past()
        try:
            if self._link is None or not self._link.is_up:
                launcher = find_launcher(self.config.launcher)
                self._link = Link(launcher, fork_server=self.spec.use_fork_server)
                self._link.open()
            started = yield from self._link.calling(StartWorld(self.spec))
        except BaseException:  # Stop too: whatever has been started is ended
            self.advance(Event.START_FAILED)
            self.close_link()
            raise
        if isinstance(started, StartFailure):
            self.advance(Event.START_FAILED)
            self.close_link()
            raise StartError(
                started.rank, started.host, started.command, started.reason, started.last_lines
            )
        assert isinstance(started, WorldStarted)
        self.pids, self.logs, self.lacks = started.pids, started.logs, started.lacks
        self.host = self._link.agents[0].host
        self.advance(Event.STARTED)

    def starting_texts(self) -> Iterator[str]:
        """Start them; `starting 4 workers: 2 ready` when it takes long, and when that changes.

        Comes round without a word now and then, with "".
        """
        said, begun = "", time.monotonic()
        for up in self.starting():
            ready = f"{up} ready" if up < self.size else "forming their group"
            text = f"starting {count(self.size, 'worker')}: {ready}"
            is_due = time.monotonic() - begun >= QUIET_SECONDS and text != said
            if is_due:
                said = text
            yield text if is_due else ""

    def start(self) -> None:
        """Start them, unless they are there; where it takes long a terminal's stderr says so."""
        show_on_terminal(self.starting_texts())

    def start_anew(self, *, agent_too: bool = False) -> None:
        """End them all, with their agent if so wanted, and start as many; no set-up tasks."""
        # Where Stop has cut their end short, it is asked for again.
        are_there = self.state.has_workers or self.state is State.STOPPING
        if self._link is not None and self._link.is_up and are_there:
            self.advance(Event.STOP)
            self._stop(RESTART_GRACE)
            self.advance(Event.STOPPED)
        self._forget_outputs()
        if agent_too:
            self.close_link()
        self.start()

    def shutdown(self) -> None:
        """End them all and their agent; nothing of them is left."""
        self.setup.forget()
        self.advance(Event.STOP)
        if self._link is not None and self._link.is_up:
            self._stop(STOP_GRACE)
        self.close_link()
        self.advance(Event.STOPPED)

    def _stop(self, grace: float) -> None:
        """Have the agent end them, which ends with them where it cannot."""
        try:
            self.link.call(StopWorld(grace), STOP_TIMEOUT)
        except (AgentLost, StartError):
            self.close_link()

    def adopt(self, link: Link) -> None:
        """Have the agent at the other end of this link start the workers."""
        self._link = link

    def detach_link(self) -> Link | None:
        """Return the link, for the caller to end; the world is none without it."""
        link, self._link = self._link, None
        return link

    def close_link(self) -> None:
        """End the agents, if there are any."""
        self.names.let_go()
        link = self.detach_link()
        if link is not None:
            link.close()

    def _forget_outputs(self) -> None:
        """Drop what the workers before had still to say."""
        self.running = None
        self.late.clear()
        while self._link is not None and self._link.arrived:
            if isinstance(self._link.arrived.popleft(), Received) and self._link.is_up:
                self._link.received()

    # --- what comes up --------------------------------------------------------------------

    def receive(self, timeout: float) -> None:
        """Take in what ranks have shown; wait for the first of it, at most `timeout` seconds."""
        self.link.wait(timeout)
        self.receive_waiting()

    def receive_waiting(self) -> None:
        """Take in all that has arrived so far."""
        while self._link is not None and self._link.arrived:
            link = self._link
            match link.arrived[0]:
                case AgentLost() as lost:
                    self.take_loss(lost)
                case Received():
                    link.received()
                case Located(places):
                    if self.running is not None:
                        self.running.take_places(places, time.monotonic())
                case Aborted(places):
                    self._take_aborted(places)
                case Used(usage):
                    if self.running is not None:
                        self.running.usage = usage
                case (rank, task_id, output):
                    self._take(rank, task_id, output)
            link.arrived.popleft()

    def take_late(self) -> list[tuple[int, Any]]:
        """Return what ranks have said outside of tasks since this was last asked."""
        late = [*self.late]
        self.late.clear()
        return late

    def take_loss(self, lost: AgentLost) -> None:
        """Note that the agent has ended, and its workers with it."""
        self.lost = lost
        if self.running is not None:
            self.running.take_loss(lost)
        self.advance(Event.AGENT_LOST)
        self.close_link()

    def _take_aborted(self, places: Mapping[int, Place]) -> None:
        if self.running is not None:
            self.advance(Event.ABORTED)
            self.running.take_aborted(places, time.monotonic())

    def _take(self, rank: int, task_id: str, output: Any) -> None:
        if isinstance(output, Record):
            hand_over(output)
            return
        if isinstance(output, Died):
            self.dead[rank] = output
            self.advance(Event.RANK_DIED)
        running = self.running
        if running is not None and not _is_of(running, rank, task_id, output):
            running = None
        if isinstance(output, Done):
            received = running.received(rank) if running and output.received else {}
            self.names.finished(rank, output, received)
        if isinstance(output, Moved):
            if running is not None:
                running.moved[rank] = output
            return
        if running is None and isinstance(output, InputRequest):
            self.link.enter(rank, InputReply(output.number, problem=NOBODY))
            return
        if running is None:
            self.late.append((rank, output))
            return
        if running.breaks_group(output):
            self.advance(Event.ABORTED)
        if running.is_of_another(rank, output):
            self.late.append((rank, output))
        running.receive(rank, output)
        if not running.unfinished and self.state is not State.BROKEN:
            self.advance(Event.TASK_DONE)


def _is_of(running: RunningTask, rank: int, task_id: str, output: Any) -> bool:
    """Say whether it is the task's; also where a rank says more while others still run it."""
    if task_id == running.task.id:
        return True
    return isinstance(output, Visible) and not task_id and running.waits_after(rank)


def show_on_terminal(texts: Iterable[str]) -> None:
    """Show the last of these in one line of stderr, which is gone at the end."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    shown = False
    try:
        for text in filter(None, texts):
            if is_terminal:
                shown = True
                sys.stderr.write(f"\r\x1b[K{text}")
                sys.stderr.flush()
    finally:
        if shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
