"""A part of a world without processes, which answers as `tests.agent.test_parts` asks of all."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence

from nbdist.wire.control import HeldGroups
from nbdist.wire.messages import StartFailure, WorldStarted
from nbdist.wire.node_messages import Formed, Held, Plan
from nbdist.wire.spec import WorldSpec

KILLED = "it was killed by SIGKILL"


class FakePart:
    """Has ranks that are no processes, and notes what it is `asked`.

    `lack` is what keeps it from starting any, `fails` why a start fails.  Its next groups have
    these `problems`, in whose forming its last rank dies, unless that `stays`.  Where it `waits`,
    ranks of other parts do not come, until that is called off.
    """

    def __init__(self, node: int = 0) -> None:
        self.asked: list[str] = []
        self.alive: dict[int, HeldGroups] = {}
        self.lack = self.fails = ""
        self.problems: list[str] = []
        self.waits = self.stays = False
        self._node = node
        self._numbers = itertools.count(100 * node + 1)
        self._pids: dict[int, int] = {}
        self._generation = 0
        self._off = asyncio.Event()

    async def start_part(
        self, spec: WorldSpec, ranks: Sequence[int], attempt: int
    ) -> WorldStarted | StartFailure:
        """Start, or fail where it is to; at once or when it is called off."""
        self.asked.append(f"start {[*ranks]}")
        why = await self._called_off(1) or self.fails
        if why:
            return StartFailure(ranks[0], f"node{self._node}", "", why, ())
        self._have(spec, ranks, ranks, {})
        return WorldStarted({**self._pids}, dict.fromkeys(ranks, ""), ("no nccl",))

    async def held(self) -> Held:
        """Say which live."""
        return Held(dict(self.alive))

    async def prepare(self, spec: WorldSpec, ranks: Sequence[int]) -> str:
        """Lack something, or not."""
        self.asked.append(f"prepare {[*ranks]}")
        return self.lack

    async def form(self, plan: Plan, ranks: Sequence[int]) -> Formed:
        """Form it, or have a problem; at once or when it is called off."""
        kept = None if plan.groups is None else sorted(plan.groups)
        self.asked.append(f"form {plan.generation} of {[*ranks]} with {kept}")
        problem = await self._called_off(plan.generation)
        self._have(plan.spec, ranks, plan.missing, plan.groups or {})
        if self.problems:
            problem = self.problems.pop(0)
            if not self.stays:
                self.die(ranks[-1])
        return Formed({**self._pids}, dict.fromkeys(self.alive, ""), tuple(self.alive), problem)

    async def call_off(self, generation: int) -> None:
        """Have those wait no longer that do for this generation."""
        self.asked.append(f"call off {generation}")
        if generation == self._generation:
            self._off.set()

    async def end(self, ranks: Sequence[int], grace: float) -> None:
        """Have these no more."""
        self.asked.append(f"end {[*ranks]}")
        for rank in ranks:
            self.die(rank)

    async def renumber(self, became: Mapping[int, int]) -> None:
        """Call them so."""
        self.asked.append(f"renumber {dict(became)}")
        self.alive = {became[rank]: held for rank, held in self.alive.items()}
        self._pids = {became[rank]: pid for rank, pid in self._pids.items()}

    def die(self, rank: int) -> None:
        """Have this rank live no more."""
        self.alive.pop(rank, None)
        self._pids.pop(rank, None)

    def take_asked(self) -> list[str]:
        """Return what it has been asked since this was last looked at."""
        asked, self.asked = self.asked, []
        return asked

    async def _called_off(self, generation: int) -> str:
        """Wait, where it is to, until it is called off; then say how ranks have ended."""
        self._generation = generation
        self._off.clear()
        if self.waits:
            await self._off.wait()
        return KILLED if self.waits else ""

    def _have(
        self,
        spec: WorldSpec,
        ranks: Sequence[int],
        new: Sequence[int],
        groups: Mapping[str, tuple[int, ...]],
    ) -> None:
        for rank in {*ranks} & {*new}:
            self._pids[rank] = next(self._numbers)
        for rank in ranks:
            mine = {name: members for name, members in groups.items() if rank in members}
            self.alive[rank] = HeldGroups(rank, spec.world_size, mine)
