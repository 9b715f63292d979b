"""The workers of a world: what there is of them, and what comes up from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbdist import topology
from nbdist.errors import AgentLost, WorldNotStarted
from nbdist.wire.messages import Healed, Received, Seen, WorldSpec
from nbdist.wire.outputs import Died, Record
from nbdist.world.link import Link
from nbdist.world.losses import Losses
from nbdist.world.records import hand_over
from nbdist.world.setup import Setup
from nbdist.world.spec import Asked, make_spec, scaled
from nbdist.world.states import Event, State, next_state

if TYPE_CHECKING:
    from nbdist.world.running import RunningCell

LATE_KEPT = 1000
"""Outputs of threads that outlived their cell; all text is in the log files too."""


class Workers:
    """What `World` knows of its workers; `RunningCell`, healing and scaling work with it."""

    def __init__(self, asked: Asked, link: Link | None) -> None:
        self.state = State.STOPPED
        self.pids: Mapping[int, int] = {}
        self.lacks: tuple[str, ...] = ()
        self.logs: Mapping[int, str] = {}
        self.late: deque[tuple[int, Any]] = deque(maxlen=LATE_KEPT)
        self.losses = Losses()
        self.host = ""
        self.lost: AgentLost | None = None
        self.problem = ""
        self.setup = Setup()
        self.running: RunningCell | None = None
        self._link = link
        self._spec: WorldSpec
        self.asked: Asked
        self.size: int
        self.configure(asked)

    # --- what there is --------------------------------------------------------------------

    @property
    def spec(self) -> WorldSpec:
        """What all workers have in common."""
        return self._spec

    @property
    def layout(self) -> str:
        """`1x4`; simulated nodes and workers on each, `2x4`."""
        seat = self._spec.seat(0)
        return f"{seat.nodes}x{seat.local_world_size}"

    @property
    def hosts(self) -> dict[int, tuple[str, int]]:
        """The machine of each rank, and its number there."""
        return {rank: (self.host, rank) for rank in range(self.size)}

    @property
    def is_idle(self) -> bool:
        """Whether no rank has anything of a cell left to do."""
        return self.running is None or not self.running.unfinished

    @property
    def can_free(self) -> bool:
        """Whether there is a group whose collectives can be broken open."""
        return self._spec.backend is not None

    @property
    def made_lately(self) -> frozenset[str]:
        """Names that the last cell bound on any rank, if a rank died in it."""
        running = self.running
        return running.made if running is not None and running.died else frozenset()

    def resolve(self, n: int | str) -> int:
        """How many workers `n` means here."""
        workers = topology.parse_workers(str(n))
        return topology.resolve(workers, len(self._spec.gpus), topology.usable_cores())

    # --- what changes ---------------------------------------------------------------------

    def advance(self, event: Event) -> None:
        """The only door to another state."""
        self.state = next_state(self.state, event)

    def configure(self, asked: Asked) -> None:
        """Work out the spec of the workers; UsageError for what cannot be."""
        spec, self.backend, self.warning = make_spec(asked)
        self._spec, self.size, self.name = spec, spec.world_size, spec.name
        self.asked = replace(asked, run=spec.name)

    def take_healed(self, healed: Healed) -> None:
        """What the agent says of the workers there are now, who may be more or fewer."""
        self.pids, self.logs, self.problem = healed.pids, healed.logs, healed.problem
        before, after = self.size, len(healed.pids)
        if before != after:
            self._spec, _ = scaled(self._spec, after)
            self.asked, self.size = self.asked.but(n=after), after
            self.losses.scale(before, after)
            self.setup.scale(before, after)

    @property
    def link(self) -> Link:
        """The connection to the agents of a world that has workers."""
        if self._link is None:
            raise WorldNotStarted("This")
        return self._link

    def detach_link(self) -> Link | None:
        """The link, for whoever ends it; the world is none without it."""
        link, self._link = self._link, None
        return link

    def close_link(self) -> None:
        link = self.detach_link()
        if link is not None:
            link.close()

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
                case Seen(places):
                    if self.running is not None:
                        self.running.see(places)
                case (rank, cell_id, output):
                    self._take(rank, cell_id, output)
            link.arrived.popleft()

    def _take(self, rank: int, cell_id: str, output: Any) -> None:
        if isinstance(output, Record):
            hand_over(output)
            return
        self.losses.take(rank, output)
        if isinstance(output, Died):
            self.advance(Event.RANK_DIED)
        running = self.running
        if running is not None and cell_id == running.cell.id:
            running.take(rank, output)
            if not running.unfinished and self.state is not State.BROKEN:
                self.advance(Event.CELL_DONE)
        else:
            self.late.append((rank, output))

    def take_loss(self, lost: AgentLost) -> None:
        self.lost = lost
        if self.running is not None:
            self.running.take_loss()
        self.advance(Event.AGENT_LOST)
        self.close_link()

    def drop_outputs(self) -> None:
        """Forget what the workers before had still to say."""
        self.running = None
        self.late.clear()
        while self._link is not None and self._link.arrived:
            if isinstance(self._link.arrived.popleft(), Received) and self._link.is_up:
                self._link.received()
