"""Starts, heals and scales a world over its machines, and decides which groups are kept.

Runs in the agent of a world on one machine, or in the head of a world on several.  It sends
requests (`nbdist.wire.node_messages`) to all machines at once; `WorkerGroup` carries them out on
each machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from nbdist.wire import node_messages as part
from nbdist.wire.control import HeldGroups
from nbdist.wire.messages import Healed, StartFailure, WorldStarted
from nbdist.wire.spec import WorldSpec

HEAL_TRIES = 3  # attempts to form the group, if more workers die during an attempt
LEAVE_GRACE = 0.5  # seconds for the exit handlers of ranks that a smaller world no longer has

_T = TypeVar("_T")


class Part(Protocol):
    """The workers on one machine.  For a lost machine `PartRequest.lost` is the answer."""

    async def do(self, request: part.PartRequest[_T]) -> _T:
        """Carry out the request and return the answer."""


class Forming:
    """Starts, heals and scales a world.  `parts` has the workers of each node, by its number.

    On one machine part 0 has all ranks, also those of nodes that are only simulated.
    """

    def __init__(self, parts: Mapping[int, Part], *, on_one_machine: bool = False) -> None:
        self.parts = parts
        self._on_one_machine = on_one_machine
        self.spec: WorldSpec | None = None
        self.generation = self.attempt = 0
        self._sized_in = 0
        self._pids: dict[int, int] = {}
        self._logs: dict[int, str] = {}

    async def start(self, spec: WorldSpec) -> WorldStarted | StartFailure:
        """Start all ranks at once.  If a rank fails, stop the others and return the failure."""
        self.spec = spec
        self.attempt += 1
        self.generation = self._sized_in = 1
        self._pids, self._logs = {}, {}
        on = self._ranks_on(spec).items()
        starts = {node: part.StartPart(spec, ranks, self.attempt) for node, ranks in on}
        answers = await self._until_one_fails(starts, lambda each: isinstance(each, StartFailure))
        if failed := next((a for a in answers if isinstance(a, StartFailure)), None):
            await self.stop(grace=0.0)
            return failed
        started = [each for each in answers if isinstance(each, WorldStarted)]
        for each in started:
            self._note(each)
        missing = dict.fromkeys(lack for each in started for lack in each.missing)
        return WorldStarted(*self.whereabouts(), tuple(missing), spec=spec)

    async def stop(self, grace: float) -> None:
        """Stop all workers: politely for `grace` seconds, then by SIGKILL."""
        if self.spec is not None:
            await self._end(range(self.spec.world_size), grace, drops=True)

    async def _end(self, ranks: Collection[int], grace: float, *, drops: bool = False) -> None:
        assert self.spec is not None
        on = self._ranks_on(self.spec, ranks)
        await self._all({node: part.EndRanks(on[node], grace, drops) for node in on})
        for rank in ranks:
            self._pids.pop(rank, None)
            self._logs.pop(rank, None)

    async def heal(self, spec: WorldSpec | None = None) -> Healed:
        """Start the ranks that have no live process, and form the group of all ranks again.

        If more workers die meanwhile, it tries again, at most `HEAL_TRIES` times in all.  If a
        machine does not answer, no worker is started or ended.  A given `spec` replaces the
        world's.
        """
        self.spec = spec or self.spec
        assert self.spec is not None
        problem = ""
        for _ in range(HEAL_TRIES):
            problem, is_final = await self._form_anew(self.spec)
            if not problem or is_final:
                break
        return Healed(*self.whereabouts(), self.spec, problem)

    async def scale(self, spec: WorldSpec, keep: Sequence[int]) -> Healed:
        """Change the number of ranks; `keep` are the present ranks that stay.

        They become ranks 0, 1, ... in this order.  The other ranks exit, and new ranks are started.
        The world keeps its size if nothing is ready to start new ranks, or if all present ranks
        stay and no group can be formed with the new ranks.  `not_scaled` of the answer says why.
        """
        assert self.spec is not None
        before, size = self.spec, self.spec.world_size
        new = range(len(keep), spec.world_size)
        if new and (problem := await self._prepare(spec, new)):
            return Healed(*self.whereabouts(), before, not_scaled=problem)
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
        await self._all({n: part.Renumber({rank: became[rank] for rank in on[n]}) for n in on})
        self._pids = {became[rank]: pid for rank, pid in self._pids.items()}
        self._logs = {became[rank]: folder for rank, folder in self._logs.items()}

    async def _form_anew(self, spec: WorldSpec) -> tuple[str, bool]:
        """Form a new generation of the group.

        Returns what prevented it, or "", and False if another attempt may succeed, because a rank
        has no live process.
        """
        on = self._ranks_on(spec)
        held = await self._all(dict.fromkeys(on, part.GetHeld()))
        # Ranks of a machine that is only slow live, with their variables: never start them anew.
        if problem := next((each.problem for each in held if each.problem), ""):
            return problem, True
        alive = {rank: groups for each in held for rank, groups in each.ranks.items()}
        missing = tuple(rank for rank in range(spec.world_size) if rank not in alive)
        # First, so that no survivor waits for new ranks that cannot be started.
        if problem := await self._prepare(spec, missing):
            return problem, not missing
        self.generation += 1
        groups = groups_to_keep(alive, spec.world_size)
        if groups is None:
            self._sized_in = self.generation
        plan = self.attempt, self.generation, self._sized_in, missing, groups
        forms = {node: part.Form(spec, ranks, *plan) for node, ranks in on.items()}
        formed = await self._until_one_fails(forms, lambda each: bool(each.problem))
        for each in formed:
            self._note(each)
        found = sum(len(each.alive) for each in formed)
        problem = next((each.problem for each in formed if each.problem), "")
        return problem, found == spec.world_size

    async def _prepare(self, spec: WorldSpec, ranks: Collection[int]) -> str:
        on = self._ranks_on(spec, ranks)
        problems = await self._all({node: part.Prepare(spec, on[node]) for node in on})
        return next(filter(None, problems), "")

    def _ranks_on(
        self, spec: WorldSpec, ranks: Iterable[int] | None = None
    ) -> dict[int, tuple[int, ...]]:
        """Return the ranks by node: all of the world, or the given `ranks` that are in it."""
        nodes = nodes_of(spec)
        if self._on_one_machine:
            nodes = dict.fromkeys(nodes, 0)
        return shares(nodes if ranks is None else ranks, nodes)

    async def _all(self, asked: Mapping[int, part.PartRequest[_T]]) -> list[_T]:
        return await asyncio.gather(*(self.parts[node].do(each) for node, each in asked.items()))

    async def _until_one_fails(
        self, asked: Mapping[int, part.PartRequest[_T]], has_failed: Callable[[_T], bool]
    ) -> list[_T]:
        """Return all answers in the order of their arrival.

        After the first failure the forming is called off on the nodes that have not yet answered.
        """
        answers: list[_T] = []
        waiting = {asyncio.ensure_future(self.parts[n].do(each)): n for n, each in asked.items()}
        is_off = False
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    del waiting[each]
                    answers.append(each.result())
                if not is_off and any(map(has_failed, answers)):
                    is_off = True
                    await self._all(dict.fromkeys(waiting.values(), part.CallOff(self.generation)))
        finally:
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        return answers

    def _note(self, has: WorldStarted | part.Formed) -> None:
        self._pids.update(has.pids)
        self._logs.update(has.logs)

    def whereabouts(self) -> tuple[dict[int, int], dict[int, str]]:
        """Return the process and the log folder of each rank."""
        return dict(sorted(self._pids.items())), dict(sorted(self._logs.items()))


def nodes_of(spec: WorldSpec) -> dict[int, int]:
    """Return the number of each rank's node; 0 for all ranks of a world without slots."""
    return dict(enumerate(spec.nodes))


def shares(ranks: Iterable[int], node_of: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """Group ranks by their nodes; ranks without a node are left out."""
    found: dict[int, tuple[int, ...]] = {}
    for rank in ranks:
        if rank in node_of:
            found[node_of[rank]] = (*found.get(node_of[rank], ()), rank)
    return found


def groups_to_keep(held: Mapping[int, HeldGroups | None], world_size: int) -> part.Groups | None:
    """Return the groups to reconnect, which are all that survivors hold; pure.

    Returns None if a survivor's group has another size, or knows the survivor by another rank.
    Then no group can be kept.  A survivor that did not answer (None in `held`) is left out.
    """
    said = {rank: each for rank, each in held.items() if each is not None}
    if any((each.rank, each.world_size) != (rank, world_size) for rank, each in said.items()):
        return None
    return {name: ranks for each in said.values() for name, ranks in each.members.items()}
