"""What is known of a world's workers, and how that changes; nothing here starts or sends anything.

In the notebook's process, below `Workers`.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbdist import topology
from nbdist.config import LOCAL, OnFailure, Patience, WorldConfig
from nbdist.errors import AgentLost, WorldNotStarted
from nbdist.output.events import Died
from nbdist.wire.messages import Attached, Healed, Remember
from nbdist.wire.node_messages import processes
from nbdist.wire.spec import WorldSpec
from nbdist.world.code_sync import CodeSync
from nbdist.world.link import Link
from nbdist.world.names import NameTable
from nbdist.world.past import Past, Setup
from nbdist.world.running import Crew, RunningTask
from nbdist.world.spec import NotebookSurroundings, make_spec, scaled
from nbdist.world.states import Event, Machines, Renumbering, State, compare, next_state

LATE_KEPT = 1000
"""Outputs of threads that outlived their task; all text is in the log files too."""


class Standing:
    """What there is of a world's workers.

    `state` changes through `advance` alone.  `late` has what ranks have shown outside of
    tasks, `problem` why they share no group, `lacks` what is missing in their libraries,
    `way_back` what has machines come that are missing.
    `names` says who has which, `past` what has run since the start, `dead` which ranks have
    died, `replaced` where others are now, `have_come` which machines have come that could be
    taken in, `renumbering` what the last forming of the group
    has made of them, `code` what keeps the notebook's `folder` in step, `surroundings` what of
    the notebook's has changed since.  `is_elsewhere`: they
    are not, or not all, on the notebook's machine.  `leaving` is set, in any thread, when this
    process is about to end.
    """

    def __init__(self, config: WorldConfig, there: Attached | None = None) -> None:
        """Work out the spec of a new world, with nothing started; or take in one that is there."""
        self.state = State.STOPPED
        self.namespace: dict[str, Any] = sys.modules["__main__"].__dict__
        self.pids: Mapping[int, int] = {}
        self.logs: Mapping[int, str] = {}
        self.lacks: tuple[str, ...] = ()
        self.name = self.problem = self.way_back = ""
        self.machines = Machines()
        self.is_elsewhere = False
        self.late: deque[tuple[int, Any]] = deque(maxlen=LATE_KEPT)
        self.names = NameTable(self.namespace)
        self.dead: dict[int, Died] = {}
        self.replaced: dict[int, Died] = {}
        self.setup = Setup()
        self.past = Past()
        self.renumbering = Renumbering(0, 0, {})
        self._renumbered: Renumbering | None = None  # since `take_moved`
        self.have_come: dict[str, None] = {}
        self.lost: AgentLost | None = None
        self.running: RunningTask | None = None
        self.leaving = threading.Event()
        self._link: Link | None = None
        self._remembered = Remember({})
        self.config: WorldConfig
        if there is None or there.spec is None:
            self.configure(config)
        else:
            self._take_spec(config, there.spec)
            self.backend, self.warning = there.spec.backend or "none", ""

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
        return Crew(self.size, self.backend, self.machines, self.pids, self.namespace, heals)

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
        if self.config.launched_by != LOCAL and not isinstance(workers, int):
            return self.size  # other machines have been asked
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

    def is_left(self, seconds: float = 0.0) -> bool:
        """Say whether this process is about to end, and the workers stay; wait for that so long."""
        return self.config.detach and self.leaving.wait(seconds)

    # --- what changes ---------------------------------------------------------------------

    def advance(self, event: Event) -> None:
        """Go to another state: there is no other door."""
        self.state = next_state(self.state, event)

    def configure(self, config: WorldConfig) -> None:
        """Work out the spec of the workers; UsageError for what cannot be."""
        spec, self.warning = make_spec(config, self.name)
        self._take_spec(config, spec)

    def _take_spec(self, config: WorldConfig, spec: WorldSpec) -> None:
        self.spec: WorldSpec = spec
        self.size, self.name = spec.world_size, spec.name
        self.config = config
        self.folder = Path(spec.cwd)
        self.code = CodeSync(self.folder) if config.sync_code else None
        self.surroundings = NotebookSurroundings(config, spec)

    def _become(self, spec: WorldSpec | None) -> None:
        """Take in how many workers there are, and with what, where other machines decide that."""
        if spec is not None:
            self.spec, self.size = spec, spec.world_size
            self.backend = spec.backend or "none"

    def remember(self, patience: Patience | None = None) -> None:
        """Tell the agent what only this process knows, where another may take the world over."""
        may_be = self.config.detach or self._remembered.options.get("detach")
        if self._link is None or not self._link.is_up or not may_be:
            return
        memory = self.memory(patience or self.config.patience)
        if memory != self._remembered:
            self._remembered = memory
            self._link.remember(memory)

    def memory(self, patience: Patience) -> Remember:
        """Return what another notebook has to know, where another launcher may be the usual one."""
        options = {**vars(self.config), "launcher": self.config.launched_by}
        return Remember(options, dict(vars(patience)), self.setup.kept)

    def take_healed(self, healed: Healed) -> None:
        """Take in what the agent says of the workers there are now, more or fewer."""
        found = compare(processes(self.pids, self.spec.seats), processes(healed.pids, healed.seats))
        self.pids, self.logs, self.problem = healed.pids, healed.logs, healed.problem
        self.way_back = healed.way_back
        after = found.after
        if found.before != after:
            if healed.spec is None:
                self.spec, _ = scaled(self.spec, self.config, after)
                self.config = self.config.of_size(after)
            self.size = after
        self.spec = replace(self.spec, seats=healed.seats)
        self._become(healed.spec)
        if found.before != after or found.moved:
            self.names.renumbered(found.was, after)
            self.setup.renumber(found)
            self.past.renumber(found)
        # One that was to be added may have died instead, and numbers are others' now.
        self.dead = {
            rank: died
            for rank, died in self.dead.items()
            if rank < after and (died.pid == self.pids[rank] or not found.moved)
        }
        self._place(healed.hosts, self.machines.name(0))
        self.renumbering = found
        self._renumbered = self._renumbered.then(found) if self._renumbered else found

    def _place(self, hosts: Mapping[int, str], host: str) -> None:
        """Note where all ranks are: where nothing is said of it, on this one machine."""
        self.is_elsewhere = bool(hosts)
        if hosts:
            self.machines = Machines.of(hosts, self.spec)
        else:
            self.machines = Machines.one(host, self.size)

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

    def told(self, ranks: Iterable[int]) -> None:
        """Note that an error has said that these were replaced."""
        for rank in ranks:
            self.replaced.pop(rank, None)

    def take_moved(self) -> Mapping[int, int]:
        """Return what ranks have become that have other numbers since this was last asked."""
        found, self._renumbered = self._renumbered, None
        return found.moved if found else {}
