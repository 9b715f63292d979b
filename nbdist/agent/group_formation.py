"""Starts, heals and scales a world over its machines, and decides which groups are kept.

Runs in the agent of a world on one machine, or in the head of a world on several.  `WorkerGroup`
carries out the requests that this file sends (`nbdist.wire.node_messages`) on each machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from nbdist.wire import node_messages as part
from nbdist.wire.control import HeldGroups
from nbdist.wire.messages import StartFailure
from nbdist.wire.spec import WorldSpec
from nbdist.wire.world_facts import Renumbering

HEAL_TRIES = 3  # the most attempts to form the group, while a rank has no live process
LEAVE_GRACE = 0.5  # seconds for the exit handlers of ranks that `scale` removes

_T = TypeVar("_T")


class NodeWorkers(Protocol):
    """A machine with workers, to which `GroupFormation` sends requests."""

    async def execute(self, request: part.PartRequest[_T]) -> _T:
        """Carry out a request and return the answer.

        If the machine is lost or too slow, the answer is what `request.lost_answer` returns.
        """


@dataclass(frozen=True, slots=True)
class Formation:
    """The world's ranks after a start, a heal or a change of the size.

    `pids` has the ranks' process ids, and `logs` their log folders, both by rank.  `change` says
    how the ranks' numbers have changed.  `problem` says why not all ranks share the group, or is
    "".  `not_scaled` says why a request to scale the world was not carried out, or is "".
    `missing` has sentences about things that the workers' torch or IPython lacks.
    """

    spec: WorldSpec
    pids: Mapping[int, int]
    logs: Mapping[int, str]
    change: Renumbering
    problem: str = ""
    not_scaled: str = ""
    missing: tuple[str, ...] = ()


class GroupFormation:
    """Starts, heals and scales a world by requests to its machines.

    `parts` has the machines by node number.  With `on_one_machine`, machine 0 has all ranks, even
    if the world's spec simulates several nodes.
    """

    def __init__(self, parts: Mapping[int, NodeWorkers], *, on_one_machine: bool = False) -> None:
        self.parts = parts
        self._on_one_machine = on_one_machine
        self.spec: WorldSpec | None = None
        self.generation = self.attempt = 0
        self._sized_in = 0
        self._pids: dict[int, int] = {}
        self._logs: dict[int, str] = {}

    async def start(self, spec: WorldSpec) -> Formation | StartFailure:
        """Start all ranks of the world; if a rank fails, stop all ranks and return the failure."""
        self.spec = spec
        self.attempt += 1
        self.generation = self._sized_in = 1
        self._pids, self._logs = {}, {}
        by_node = self._ranks_on(spec).items()
        starts = {node: part.StartPart(spec, ranks, self.attempt) for node, ranks in by_node}
        answers = await self._ask_until_failure(starts, lambda each: isinstance(each, StartFailure))
        if failed := next((a for a in answers if isinstance(a, StartFailure)), None):
            await self.stop(grace=0.0)
            return failed
        started = [each for each in answers if isinstance(each, part.Formed)]
        for each in started:
            self._record(each)
        missing = dict.fromkeys(lack for each in started for lack in each.missing)
        return replace(self.unchanged(), missing=tuple(missing))

    def unchanged(self, *, problem: str = "", not_scaled: str = "") -> Formation:
        """Return the world's present ranks as a `Formation` in which each rank keeps its number."""
        assert self.spec is not None
        change = Renumbering.none(self.spec.world_size)
        pids, logs = dict(sorted(self._pids.items())), dict(sorted(self._logs.items()))
        return Formation(self.spec, pids, logs, change, problem, not_scaled)

    async def stop(self, grace: float) -> None:
        """Stop all workers: idle workers have `grace` seconds to exit, others are killed."""
        if self.spec is not None:
            await self._stop(range(self.spec.world_size), grace, drops=True)

    async def _stop(self, ranks: Collection[int], grace: float, *, drops: bool = False) -> None:
        assert self.spec is not None
        by_node = self._ranks_on(self.spec, ranks)
        await self._ask({node: part.EndRanks(by_node[node], grace, drops) for node in by_node})
        for rank in ranks:
            self._pids.pop(rank, None)
            self._logs.pop(rank, None)

    async def heal(self, spec: WorldSpec | None = None) -> Formation:
        """Start the ranks that have no live process, and form the group of all ranks again.

        If a rank has no live process after an attempt, the attempt is repeated, up to `HEAL_TRIES`
        attempts in all.  An attempt in which a machine does not answer which of its ranks are alive
        is the last, and starts or kills no worker.  `spec`, if given, becomes the world's spec.
        """
        self.spec = spec or self.spec
        assert self.spec is not None
        problem = ""
        for _ in range(HEAL_TRIES):
            problem, is_final = await self._form_anew(self.spec)
            if not problem or is_final:
                break
        return self.unchanged(problem=problem)

    async def scale(self, spec: WorldSpec, keep: Sequence[int]) -> Formation:
        """Give the world the size in `spec`; the present ranks in `keep` become ranks 0, 1, ...

        Present ranks that are not in `keep` are stopped, and missing ranks are started.  The world
        keeps its old size if a machine is not ready to start new ranks.  The world returns to its
        old size if ranks were only added and no group can be formed with them.  In these two cases
        `not_scaled` in the answer says why.
        """
        assert self.spec is not None
        before, size = self.spec, self.spec.world_size
        new = range(len(keep), spec.world_size)
        if new and (problem := await self._prepare(spec, new)):
            return self.unchanged(not_scaled=problem)
        scaled = await self._scale_to(spec, keep, LEAVE_GRACE)
        if not scaled.problem or not new or [*keep] != [*range(size)]:
            return scaled
        restored = await self._scale_to(before, keep, 0.0)
        change = scaled.change.then(restored.change)
        return replace(restored, change=change, not_scaled=scaled.problem)

    async def _scale_to(self, spec: WorldSpec, keep: Sequence[int], grace: float) -> Formation:
        assert self.spec is not None
        size, became = self.spec.world_size, {rank: number for number, rank in enumerate(keep)}
        await self._stop({*range(size)} - {*keep}, grace)
        await self._renumber(became)
        pids = dict(self._pids)
        healed = await self.heal(spec)
        # Leave out ranks that have got another number and were then restarted: these are new ranks,
        # because nothing of their old processes is left.
        became = {
            rank: number
            for rank, number in became.items()
            if rank == number or healed.pids.get(number) == pids.get(number)
        }
        return replace(healed, change=Renumbering(size, spec.world_size, became))

    async def _renumber(self, became: Mapping[int, int]) -> None:
        assert self.spec is not None
        if all(rank == number for rank, number in became.items()):
            return
        by_node = self._ranks_on(self.spec, became)
        await self._ask({n: part.Renumber({r: became[r] for r in by_node[n]}) for n in by_node})
        self._pids = {became[rank]: pid for rank, pid in self._pids.items()}
        self._logs = {became[rank]: folder for rank, folder in self._logs.items()}

    async def _form_anew(self, spec: WorldSpec) -> tuple[str, bool]:
        """Form the group of all ranks again.

        Returns why this failed, or "", and whether this result is final.  If a rank is known to
        have no live process, the result is not final: another attempt could start the rank.
        """
        by_node = self._ranks_on(spec)
        answers = await self._ask(dict.fromkeys(by_node, part.GetHeld()))
        # A machine that does not answer may only be slow.  Give up, so that its ranks keep their
        # variables.
        if problem := next((each.problem for each in answers if each.problem), ""):
            return problem, True
        alive = {rank: groups for each in answers for rank, groups in each.ranks.items()}
        missing = tuple(rank for rank in range(spec.world_size) if rank not in alive)
        # Before survivors regroup, make sure that the missing ranks can be started.  Otherwise the
        # survivors would wait in vain for ranks that never start.
        if problem := await self._prepare(spec, missing):
            return problem, not missing
        self.generation += 1
        groups = groups_to_keep(alive, spec.world_size)
        if groups is None:
            self._sized_in = self.generation
        plan = self.attempt, self.generation, self._sized_in, missing, groups
        forms = {node: part.Form(spec, ranks, *plan) for node, ranks in by_node.items()}
        formed = await self._ask_until_failure(forms, lambda each: bool(each.problem))
        for each in formed:
            self._record(each)
        alive_count = sum(len(each.alive) for each in formed)
        problem = next((each.problem for each in formed if each.problem), "")
        return problem, alive_count == spec.world_size

    async def _prepare(self, spec: WorldSpec, ranks: Collection[int]) -> str:
        by_node = self._ranks_on(spec, ranks)
        problems = await self._ask({node: part.Prepare(spec, by_node[node]) for node in by_node})
        return next(filter(None, problems), "")

    def _ranks_on(
        self, spec: WorldSpec, ranks: Iterable[int] | None = None
    ) -> dict[int, tuple[int, ...]]:
        """Return, by the number of a machine in `parts`, which of `ranks` are on the machine.

        By default, return all ranks of the world.  Ranks that the world does not have are left out.
        """
        nodes = nodes_of(spec)
        if self._on_one_machine:
            nodes = dict.fromkeys(nodes, 0)
        return group_by_node(nodes if ranks is None else ranks, nodes)

    async def _ask(self, requests: Mapping[int, part.PartRequest[_T]]) -> list[_T]:
        return await asyncio.gather(*(self.parts[n].execute(each) for n, each in requests.items()))

    async def _ask_until_failure(
        self, requests: Mapping[int, part.PartRequest[_T]], has_failed: Callable[[_T], bool]
    ) -> list[_T]:
        """Send each node its request; return all answers, in no fixed order.

        When an answer is a failure (`has_failed`), send `CallOff` to the nodes that have not yet
        answered, so that their ranks stop waiting for the failed node.
        """
        answers: list[_T] = []
        waiting = {asyncio.ensure_future(self.parts[n].execute(r)): n for n, r in requests.items()}
        is_called_off = False
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    del waiting[each]
                    answers.append(each.result())
                if not is_called_off and any(map(has_failed, answers)):
                    is_called_off = True
                    await self._ask(dict.fromkeys(waiting.values(), part.CallOff(self.generation)))
        finally:
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        return answers

    def _record(self, formed: part.Formed) -> None:
        self._pids.update(formed.pids)
        self._logs.update(formed.logs)


def nodes_of(spec: WorldSpec) -> dict[int, int]:
    """Return the number of each rank's node, by rank."""
    return dict(enumerate(spec.nodes))


def group_by_node(ranks: Iterable[int], node_of: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """Return, by node, which of `ranks` are on it; `node_of` has the node of each rank.

    Ranks that `node_of` lacks are left out.
    """
    ranks_on: dict[int, tuple[int, ...]] = {}
    for rank in ranks:
        if rank in node_of:
            ranks_on[node_of[rank]] = (*ranks_on.get(node_of[rank], ()), rank)
    return ranks_on


def groups_to_keep(groups: Mapping[int, HeldGroups | None], world_size: int) -> part.Groups | None:
    """Return, by name, the ranks of each group that survivors keep and reconnect; pure.

    The world's own group is kept, too, but is not in the result.  Returns None if all groups must
    be made again, because a survivor belongs to a world's group that does not have `world_size`
    ranks, or has another rank there.  `groups` has the answer of each survivor, by rank; a
    survivor that has not answered has None and does not matter.
    """
    answered = {rank: each for rank, each in groups.items() if each is not None}
    if any((each.rank, each.world_size) != (rank, world_size) for rank, each in answered.items()):
        return None
    return {name: ranks for each in answered.values() for name, ranks in each.members.items()}
