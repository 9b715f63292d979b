"""How the group of a world is formed, over the parts that are on one machine each.

Runs in the agent for a world on one machine.  Nothing here starts or asks a worker: the parts
do, all at once, and what is decided between their answers is decided by pure functions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from nbdist.wire.control import HeldGroups
from nbdist.wire.messages import Healed, StartFailure, WorldStarted
from nbdist.wire.node_messages import Formed, Groups, Held, Plan
from nbdist.wire.spec import WorldSpec

HEAL_TRIES = 3
"""As many times as further workers may die while the group is formed."""

LEAVE_GRACE = 0.5
"""Seconds that ranks have to run their exit handlers when the world is to have fewer."""

_T = TypeVar("_T")


class Part(Protocol):
    """The workers on one machine.

    One that is lost answers all the same: as one that has no worker alive, and a problem.
    """

    async def start_part(
        self, spec: WorldSpec, ranks: Sequence[int], attempt: int
    ) -> WorldStarted | StartFailure:
        """Start these ranks; when one fails, or it is called off, end the others of them."""

    async def held(self) -> Held:
        """Say which of its ranks live, and what groups they hold."""

    async def prepare(self, spec: WorldSpec, ranks: Sequence[int]) -> str:
        """Have what can start these ranks; what keeps it from that, else ""."""

    async def form(self, plan: Plan, ranks: Sequence[int]) -> Formed:
        """Start those of its ranks that are missing, and have the others meet them."""

    async def call_off(self, generation: int) -> None:
        """Have its ranks wait no longer for this generation: not all ranks will come."""

    async def end(self, ranks: Sequence[int], grace: float) -> None:
        """End these ranks: politely for `grace` seconds, then by force."""

    async def renumber(self, became: Mapping[int, int]) -> None:
        """Call each rank by another number; itself it learns of that with the next plan."""


class Forming:
    """Starts, heals and scales the world over its parts, which have the numbers of their nodes.

    `node_of` says on which of them a rank is.
    """

    def __init__(
        self,
        parts: Mapping[int, Part],
        node_of: Callable[[WorldSpec, int], int] = lambda spec, rank: 0,
    ) -> None:
        self.parts = parts
        self.spec: WorldSpec | None = None
        self.generation = self.attempt = 0
        self._sized_in = 0
        self._node_of = node_of
        self._pids: dict[int, int] = {}
        self._logs: dict[int, str] = {}

    def __repr__(self) -> str:
        size = self.spec.world_size if self.spec else 0
        return f"<Forming {size} ranks on {len(self.parts)} nodes, generation {self.generation}>"

    # --- start and stop -------------------------------------------------------------------

    async def start(self, spec: WorldSpec) -> WorldStarted | StartFailure:
        """Start all ranks at once; when one fails, end the others, and say which it was."""
        self.spec = spec
        self.attempt += 1
        self.generation = self._sized_in = 1
        self._pids, self._logs = {}, {}
        on = self._ranks_on(spec)
        starts = {
            node: self.parts[node].start_part(spec, ranks, self.attempt)
            for node, ranks in on.items()
        }
        answers = await self._until_one_fails(starts, lambda each: isinstance(each, StartFailure))
        if failed := next((a for a in answers if isinstance(a, StartFailure)), None):
            await self.stop(grace=0.0)
            return failed
        started = [each for each in answers if isinstance(each, WorldStarted)]
        for each in started:
            self._note(each)
        lacks = dict.fromkeys(lack for each in started for lack in each.lacks)
        return WorldStarted(*self.whereabouts(), tuple(lacks))

    async def stop(self, grace: float) -> None:
        """End all workers."""
        if self.spec is not None:
            await self._end(range(self.spec.world_size), grace)

    async def _end(self, ranks: Collection[int], grace: float) -> None:
        assert self.spec is not None
        on = self._ranks_on(self.spec, ranks)
        await asyncio.gather(*(self.parts[node].end(on[node], grace) for node in on))
        for rank in ranks:
            self._pids.pop(rank, None)
            self._logs.pop(rank, None)

    # --- heal and scale -------------------------------------------------------------------

    async def heal(self, spec: WorldSpec | None = None) -> Healed:
        """Give all workers a group again, also where more of them die meanwhile.

        With a spec of as many ranks some may sit on other nodes: they are started there.
        """
        self.spec = spec or self.spec
        assert self.spec is not None
        problem = ""
        for _ in range(HEAL_TRIES):
            problem, are_alive = await self._form_anew(self.spec)
            if not problem or are_alive:
                break
        return Healed(*self.whereabouts(), self.spec.seats, problem)

    async def scale(self, spec: WorldSpec, keep: Sequence[int]) -> Healed:
        """Have as many workers as the spec says, or, where more cannot be had, as before.

        `keep` are the ranks that stay.  They are the first of the new world, in this order;
        all others are ended.
        """
        assert self.spec is not None
        before, size = self.spec, self.spec.world_size
        new = range(len(keep), spec.world_size)
        if new and (problem := await self._prepare(spec, new)):
            return Healed(*self.whereabouts(), before.seats, not_scaled=problem)
        healed = await self._scale_to(spec, keep, LEAVE_GRACE)
        if not healed.problem or not new or [*keep] != [*range(size)]:
            return healed
        return replace(await self._scale_to(before, keep, 0.0), not_scaled=healed.problem)

    async def _scale_to(self, spec: WorldSpec, keep: Sequence[int], grace: float) -> Healed:
        assert self.spec is not None
        await self._end({*range(self.spec.world_size)} - {*keep}, grace)
        await self._renumber({rank: number for number, rank in enumerate(keep)})
        return await self.heal(spec)

    async def _renumber(self, became: Mapping[int, int]) -> None:
        assert self.spec is not None
        if all(rank == number for rank, number in became.items()):
            return
        on = self._ranks_on(self.spec, became)
        await asyncio.gather(
            *(self.parts[node].renumber({rank: became[rank] for rank in on[node]}) for node in on)
        )
        self._pids = {became[rank]: pid for rank, pid in self._pids.items()}
        self._logs = {became[rank]: folder for rank, folder in self._logs.items()}

    async def _form_anew(self, spec: WorldSpec) -> tuple[str, bool]:
        """Form a new generation of the group; a problem or "", and whether all ranks live."""
        on = self._ranks_on(spec)
        held = await asyncio.gather(*(self.parts[node].held() for node in on))
        alive = {rank: groups for each in held for rank, groups in each.ranks.items()}
        missing = tuple(rank for rank in range(spec.world_size) if rank not in alive)
        # Before the survivors wait for those that are to come.
        if problem := await self._prepare(spec, missing):
            return problem, not missing
        self.generation += 1
        groups = groups_to_keep(alive, spec.world_size)
        if groups is None:
            self._sized_in = self.generation
        plan = Plan(spec, self.attempt, self.generation, self._sized_in, missing, groups)
        forms = {node: self.parts[node].form(plan, ranks) for node, ranks in on.items()}
        formed = await self._until_one_fails(forms, lambda each: bool(each.problem))
        for each in formed:
            self._note(each)
        found = sum(len(each.alive) for each in formed)
        problem = next((each.problem for each in formed if each.problem), "")
        return problem, found == spec.world_size

    async def _prepare(self, spec: WorldSpec, ranks: Collection[int]) -> str:
        on = self._ranks_on(spec, ranks)
        problems = (self.parts[node].prepare(spec, on[node]) for node in on)
        return next(filter(None, await asyncio.gather(*problems)), "")

    # --- all parts at once ----------------------------------------------------------------

    def _ranks_on(
        self, spec: WorldSpec, ranks: Iterable[int] | None = None
    ) -> dict[int, tuple[int, ...]]:
        """List the ranks that are on each node; those of `ranks` alone where it is given."""
        found: dict[int, tuple[int, ...]] = {}
        for rank in range(spec.world_size) if ranks is None else ranks:
            node = self._node_of(spec, rank)
            found[node] = (*found.get(node, ()), rank)
        return found

    async def _until_one_fails(
        self, asked: Mapping[int, Awaitable[_T]], has_failed: Callable[[_T], bool]
    ) -> list[_T]:
        """Return all answers, in the order in which they came.

        As soon as there is one that has failed the others are called off, whose ranks would
        wait for those of that part.
        """
        answers: list[_T] = []
        waiting = {asyncio.ensure_future(each): node for node, each in asked.items()}
        is_off = False
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    del waiting[each]
                    answers.append(each.result())
                if not is_off and any(map(has_failed, answers)):
                    is_off = True
                    others = [self.parts[node] for node in waiting.values()]
                    await asyncio.gather(*(each.call_off(self.generation) for each in others))
        finally:
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        return answers

    def _note(self, has: WorldStarted | Formed) -> None:
        self._pids.update(has.pids)
        self._logs.update(has.logs)

    def whereabouts(self) -> tuple[dict[int, int], dict[int, str]]:
        """Return process and log folder of each rank."""
        return dict(sorted(self._pids.items())), dict(sorted(self._logs.items()))


def groups_to_keep(held: Mapping[int, HeldGroups | None], world_size: int) -> Groups | None:
    """Choose the groups to be made whole, with what was made from them: all that survivors hold.

    None where a survivor's has another size or number for it, or none, and a new one is made.
    """
    said = {rank: each for rank, each in held.items() if each is not None}
    if any((each.rank, each.world_size) != (rank, world_size) for rank, each in said.items()):
        return None
    return {name: ranks for each in said.values() for name, ranks in each.members.items()}
