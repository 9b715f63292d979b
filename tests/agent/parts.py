"""A part of a world without processes, which answers as `tests.agent.test_parts` asks of all."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from nbdist.wire import node_messages as asks
from nbdist.wire.control import HeldGroups
from nbdist.wire.messages import StartFailure, WorldStarted
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

    async def do(self, request: asks.PartRequest[Any]) -> Any:
        """Answer as a part does, and note what is asked."""
        match request:
            case asks.StartPart(spec, ranks):
                return await self._start(spec, ranks)
            case asks.GetHeld():
                return asks.Held(dict(self.alive))
            case asks.Prepare(_, ranks):
                self.asked.append(f"prepare {[*ranks]}")
                return self.lack
            case asks.Form():
                return await self._form(request)
            case asks.CallOff(generation):
                self.asked.append(f"call off {generation}")
                if generation == self._generation:
                    self._off.set()
            case asks.EndRanks(ranks):
                self.asked.append(f"end {[*ranks]}")
                for rank in ranks:
                    self.die(rank)
            case asks.Renumber(became):
                self.asked.append(f"renumber {dict(became)}")
                self.alive = {became[rank]: held for rank, held in self.alive.items()}
                self._pids = {became[rank]: pid for rank, pid in self._pids.items()}
        return None

    async def _start(self, spec: WorldSpec, ranks: Sequence[int]) -> WorldStarted | StartFailure:
        """Start, or fail where it is to; at once or when it is called off."""
        self.asked.append(f"start {[*ranks]}")
        why = await self._called_off(1) or self.fails
        if why:
            return StartFailure(ranks[0], f"node{self._node}", "", why, ())
        self._have(spec, ranks, ranks, {})
        return WorldStarted({**self._pids}, dict.fromkeys(ranks, ""), ("no nccl",))

    async def _form(self, plan: asks.Form) -> asks.Formed:
        """Form it, or have a problem; at once or when it is called off."""
        ranks, kept = plan.ranks, None if plan.groups is None else sorted(plan.groups)
        self.asked.append(f"form {plan.generation} of {[*ranks]} with {kept}")
        problem = await self._called_off(plan.generation)
        self._have(plan.spec, ranks, plan.missing, plan.groups or {})
        if self.problems:
            problem = self.problems.pop(0)
            if not self.stays:
                self.die(ranks[-1])
        return asks.Formed(
            {**self._pids}, dict.fromkeys(self.alive, ""), tuple(self.alive), problem
        )

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
