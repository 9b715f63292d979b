"""The table of a world's ranks: their processes, machines and deaths, and which were renumbered.

Runs in the notebook's process and does no I/O.  The agent owns the workers; the table is the
notebook's copy of what the agent has said about them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from nbdist.config import OnFailure
from nbdist.output.events import Died
from nbdist.wire.messages import Attached, Healed, Reply, WorldStarted
from nbdist.wire.node_messages import processes
from nbdist.wire.spec import WorldSpec
from nbdist.wire.status import WorkerStatus
from nbdist.world.states import Machines, Renumbering, compare


class RankTable:
    """The ranks of a world: the spec of the world, and by rank the process, machine and death.

    `dead` has the deaths of ranks that were not replaced yet.  `replaced` has the deaths of ranks
    that were replaced, until a message tells the user.  `joined` has the names of machines that
    have arrived but have no ranks yet, in the order of their arrival.
    """

    def __init__(self, spec: WorldSpec) -> None:
        self.spec = spec
        self.pids: Mapping[int, int] = {}
        self.logs: Mapping[int, str] = {}  # the folders of log files
        self.machines = Machines()
        self.is_elsewhere = False  # True if a head manages the workers, on one or several machines
        # Texts for the user: why the ranks share no group, and how lost machines can join again.
        self.problem = self.rejoin_hint = ""
        self.dead: dict[int, Died] = {}
        self.replaced: dict[int, Died] = {}
        # Process ids of dead ranks whose death a cell has reported before they could be replaced.
        self.told_deaths: set[int] = set()
        self.joined: dict[str, None] = {}
        # What was done last about a broken group.  A restart of ranks that the user has requested
        # counts as "heal", whatever the option `--on-failure` says.
        self.last_policy: OnFailure = "heal"
        self.renumbering = Renumbering(0, 0, {})  # the change when the group was last formed again
        self._renumbered: Renumbering | None = None  # all changes since `pop_renumbering`

    def __repr__(self) -> str:
        return f"<RankTable {self.size} ranks, pids {dict(self.pids)}, dead {sorted(self.dead)}>"

    @property
    def size(self) -> int:
        """The number of workers; before the start, how many there will be."""
        return self.spec.world_size

    @property
    def backend(self) -> str:
        """The backend of the process group; "none" for workers without a group."""
        return self.spec.backend or "none"

    @property
    def layout(self) -> str:
        """The layout of the world, such as `2x4`: the nodes, and the workers on rank 0's node."""
        slot = self.spec.slot(0)
        return f"{slot.nodes}x{slot.local_world_size}"

    @property
    def everyone(self) -> tuple[int, ...]:
        """All ranks of the world."""
        return tuple(range(self.size))

    def forget_deaths(self) -> None:
        """Forget deaths, new machines and new numbers of earlier workers, before a start."""
        self.dead, self.replaced, self.told_deaths = {}, {}, set()
        self.joined, self._renumbered = {}, None

    def record_processes(self, reply: WorldStarted | Healed | Attached, host: str) -> None:
        """Store the processes, log folders and machines of all ranks.

        All ranks are on `host` unless the message names their machines.
        """
        self.pids, self.logs, self.is_elsewhere = reply.pids, reply.logs, bool(reply.hosts)
        one = Machines.one(host, self.size)
        self.machines = Machines.of(reply.hosts, self.spec) if reply.hosts else one

    def apply_healed(self, healed: Healed) -> Renumbering:
        """Store the spec and the processes after the agent has tried to form the group again.

        There may be more or fewer workers than before.  Returns the change of the ranks' numbers.
        """
        now = processes(healed.pids, healed.spec.slots)
        change = compare(processes(self.pids, self.spec.slots), now)
        self.problem, self.rejoin_hint = healed.problem, healed.rejoin_hint
        self.spec = healed.spec
        self.record_processes(healed, self.machines.name(0))
        # Forget the deaths of ranks beyond the new size, such as of a rank that could not be added.
        # If numbers have changed, also forget deaths whose number now belongs to another process.
        self.dead = {
            rank: died
            for rank, died in self.dead.items()
            if rank < change.after and (died.pid == self.pids[rank] or not change.moved)
        }
        self.renumbering = change
        self._renumbered = self._renumbered.then(change) if self._renumbered else change
        return change

    def replace_dead(self) -> tuple[int, ...]:
        """Record that dead ranks were replaced by new processes, and return these ranks."""
        ranks = tuple(self.dead)
        self.replaced |= self.dead
        self.dead = {}
        return ranks

    def pop_replaced(self) -> dict[int, Died]:
        """Return the deaths of the ranks that were replaced since the last call, and clear them."""
        replaced, self.replaced = self.replaced, {}
        return replaced

    def mark_reported(self, ranks: Iterable[int]) -> None:
        """Drop the deaths of these ranks from `replaced`: the user knows or need not know."""
        for rank in ranks:
            self.replaced.pop(rank, None)

    def pop_renumbering(self) -> Mapping[int, int]:
        """Return new numbers, by old number, of the ranks that have moved since the last call."""
        renumbering, self._renumbered = self._renumbered, None
        return renumbering.moved if renumbering else {}

    def with_host_names(self, reply: Reply) -> Any:
        """Return an agent's reply; if it is a status, its rows get the names of their machines."""
        match reply:
            case (WorkerStatus(), *_):
                name = self.machines.name
                return tuple(replace(row, host=name(row.rank) or row.host) for row in reply)
        return reply
