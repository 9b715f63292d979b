"""The table of a world's ranks: their processes, machines and deaths, and which were renumbered.

Runs in the notebook's process and does no I/O.  The agent or head owns the facts about the workers
(`WorldFacts`); the table is the notebook's copy of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from nbdist.config import OnFailure
from nbdist.output.events import Died
from nbdist.wire.messages import Healed, Reply
from nbdist.wire.spec import WorldSpec
from nbdist.wire.status import WorkerStatus
from nbdist.wire.world_facts import Renumbering, WorldFacts
from nbdist.world.states import Machines


class RankTable:
    """The ranks of a world: the spec of the world, and by rank the process, machine and death.

    `apply` copies the facts that the agent or head has sent.  Between two calls of `apply`,
    messages about single deaths and machines change `dead` and `joined`.

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
        # What was last done to the group: one of the values of the option `--on-failure`.  Requests
        # to scale, or to restart single ranks, count as "heal".
        self.last_policy: OnFailure = "heal"
        # Which ranks got new numbers when the group was last formed again.  This can have taken
        # several attempts.
        self.renumbering = Renumbering.none(spec.world_size)
        self._newly_replaced: dict[int, Died] = {}  # ranks replaced since the last `settle_changes`
        self._is_settled = True
        self._last_applied: Healed | None = None
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
    def log_files(self) -> dict[int, str]:
        """By rank the path of the rank's log file, without ranks that have no log file.

        In a world with other machines, the path begins with the machine's name: `node1:/...`.
        """
        logs = {rank: f"{folder}/stdout.log" for rank, folder in self.logs.items() if folder}
        if not self.is_elsewhere:
            return logs
        return {rank: f"{self.machines.name(rank)}:{file}" for rank, file in logs.items()}

    @property
    def everyone(self) -> tuple[int, ...]:
        """All ranks of the world."""
        return tuple(range(self.size))

    def forget_deaths(self) -> None:
        """Forget deaths, new machines and new numbers of earlier workers, before a start."""
        self.dead, self.replaced, self.told_deaths = {}, {}, set()
        self.joined, self._renumbered = {}, None
        self._newly_replaced, self._is_settled = {}, True

    def apply(self, facts: WorldFacts, host: str) -> None:
        """Copy the facts that the agent or head has sent.

        `host` is the machine of all ranks if no head manages the workers.
        """
        self.spec, self.pids, self.logs = facts.spec, facts.pids, facts.logs
        self.is_elsewhere = bool(facts.hosts)
        one = Machines.one(host, self.size)
        self.machines = Machines.of(facts.hosts, self.spec) if facts.hosts else one
        self.problem, self.rejoin_hint = facts.problem, facts.rejoin_hint
        self.dead, self.joined = dict(facts.dead), dict.fromkeys(facts.joined)

    def apply_healed(self, healed: Healed) -> bool:
        """Copy the facts after the agent has tried to form the group again, and note the changes.

        There may be more or fewer workers than before.  Return False, and note no changes, if this
        message was applied before: Stop can interrupt the caller, which then handles the message a
        second time.
        """
        self.apply(healed.facts, self.machines.name(0))
        if healed is self._last_applied:
            return False
        change, replaced = healed.change, {**healed.replaced}
        for rank, died in self._newly_replaced.items():
            if rank in change.became:
                replaced.setdefault(change.became[rank], died)
        last = change if self._is_settled else self.renumbering.then(change)
        untold = self._renumbered.then(change) if self._renumbered else change
        # Nothing is called between these lines, so no KeyboardInterrupt by Stop can come.
        self._last_applied, self._newly_replaced, self._is_settled = healed, replaced, False
        self.renumbering, self._renumbered = last, untold
        return True

    def settle_changes(self) -> tuple[int, ...]:
        """Record that the group is whole after all changes; return the ranks that were replaced.

        Attempts to form the group can fail.  So until this call, `renumbering` combines the new
        numbers of all attempts.
        """
        replaced, self._newly_replaced = self._newly_replaced, {}
        self.replaced |= replaced
        self._is_settled = True
        return tuple(replaced)

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
