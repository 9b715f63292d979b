"""Tests of `nbdist.agent.group_formation`: the requests to the parts of a world, in order.

A part is what runs the workers of one node. The parts here have no processes; `test_parts` proves
that real parts answer alike.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from nbdist.agent.group_formation import HEAL_TRIES, Formation, GroupFormation, groups_to_keep
from nbdist.topology import Position
from nbdist.wire import node_messages as asks
from nbdist.wire.control import HeldGroups
from nbdist.wire.messages import StartFailure
from nbdist.wire.node_messages import Groups
from nbdist.wire.spec import WorldSpec
from nbdist.wire.world_facts import Renumbering

KILLED = "it was killed by SIGKILL"


class FakePart:
    """A part whose ranks are no processes; its requests are recorded in `asked`.

    `lack` is the reason why no rank can be prepared for a group, and `fails` why the start of a
    world fails. Each of the next groups reports one of the `problems`, which also kills the last
    rank unless `stays` is set. If `waits` is set, a start or a group waits for other parts until it
    is called off.
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

    async def execute(self, request: asks.PartRequest[Any]) -> Any:
        """Answer as a real part does, and record the request."""
        match request:
            case asks.StartPart(spec, ranks):
                return await self._start(spec, ranks)
            case asks.GetHeld():
                return asks.LiveRanks(dict(self.alive))
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

    async def _start(self, spec: WorldSpec, ranks: Sequence[int]) -> asks.Formed | StartFailure:
        """Start ranks, or fail if `fails` is set, at once or when the start is called off."""
        self.asked.append(f"start {[*ranks]}")
        why = await self._called_off(1) or self.fails
        if why:
            return StartFailure(ranks[0], f"node{self._node}", "", why, ())
        self._have(spec, ranks, ranks, {})
        folders = dict.fromkeys(ranks, "")
        return asks.Formed({**self._pids}, folders, (*ranks,), missing=("no nccl",))

    async def _form(self, plan: asks.Form) -> asks.Formed:
        """Form a group, or report a problem, at once or when the forming is called off."""
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
        """End the life of a rank."""
        self.alive.pop(rank, None)
        self._pids.pop(rank, None)

    def take_asked(self) -> list[str]:
        """Return the requests since the last call of this method."""
        asked, self.asked = self.asked, []
        return asked

    async def _called_off(self, generation: int) -> str:
        """Return KILLED once `generation` is called off if `waits` is set, otherwise "" at once."""
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


def spec_of(size: int) -> WorldSpec:
    """Return the spec of a world of `size` ranks, dealt to two nodes in turn."""
    slots = tuple(Position(rank % 2, rank // 2) for rank in range(size))
    return WorldSpec(size, "gloo", {}, "/", (), 1, "python", slots=slots)


class TwoParts:
    """A world on two nodes: ranks 0 and 2 on `one`, ranks 1 and 3 on `other`."""

    def __init__(self) -> None:
        self.one, self.other = FakePart(0), FakePart(1)
        self.forming = GroupFormation({0: self.one, 1: self.other})

    async def start(self, size: int = 4) -> Formation | StartFailure:
        """Start the world, and forget the requests of the start."""
        started = await self.forming.start(spec_of(size))
        self.one.take_asked(), self.other.take_asked()
        return started


@pytest.fixture
def world() -> TwoParts:
    return TwoParts()


@pytest.mark.parametrize(
    ("held", "kept"),
    [
        ([], {}),
        ([(0, 3, {"a": (0, 1)}), (1, 3, {"b": (1, 2)})], {"a": (0, 1), "b": (1, 2)}),
        ([(0, 3, {"a": (0, 1)}), (1, 2, {"a": (0, 1)})], None),
        ([(0, 0, {})], None),
        ([(0, 3, {}), (2, 3, {})], None),
    ],
)
def test_groups_are_kept_unless_a_survivor_has_another_size_or_rank(
    held: list[tuple[int, int, Groups]], kept: Groups | None
) -> None:
    """Groups of survivors are kept unless a survivor had another rank or another world size."""
    said = {rank: HeldGroups(*each) for rank, each in enumerate(held)}
    assert groups_to_keep({**said, 2: None}, 3) == kept


async def test_two_nodes_start_at_once_or_not_at_all(world: TwoParts) -> None:
    """Each node starts its own ranks; if a node fails, the start of the other is called off."""
    started = await world.forming.start(spec_of(4))
    assert started == Formation(
        *(spec_of(4), {0: 1, 1: 101, 2: 2, 3: 102}, dict.fromkeys(range(4), "")),
        *(Renumbering.none(4), "", "", ("no nccl",)),
    )
    assert world.one.take_asked() == ["start [0, 2]"]
    assert world.other.take_asked() == ["start [1, 3]"]
    world.one.waits, world.other.fails = True, "no such file"
    failed = await world.forming.start(spec_of(4))
    assert (failed.rank, failed.host, failed.reason) == (1, "node1", "no such file")
    assert world.one.asked == ["start [0, 2]", "call off 1", "end [0, 2]"]


async def test_a_dead_rank_is_replaced_on_its_node(world: TwoParts) -> None:
    """The dead rank's node first prepares a new rank; then all ranks form the kept groups again."""
    await world.start()
    world.one.die(2)
    world.other.alive[3] = HeldGroups(3, 4, {"pair": (2, 3)})
    healed = await world.forming.heal()
    assert (healed.problem, dict(healed.pids)) == ("", {0: 1, 1: 101, 2: 3, 3: 102})
    assert healed.change == Renumbering.none(4)
    assert world.one.asked == ["prepare [2]", "form 2 of [0, 2] with ['pair']"]
    assert world.other.asked == ["form 2 of [1, 3] with ['pair']"]


@pytest.mark.parametrize("again", [1, HEAL_TRIES - 1])
async def test_ranks_that_die_during_a_heal_are_replaced(world: TwoParts, again: int) -> None:
    """A rank that dies during a heal is replaced in a further generation; the others stay."""
    await world.start()
    world.one.die(0)
    world.other.problems = ["rank 3 died"] * again
    healed = await world.forming.heal()
    assert (healed.problem, [*healed.pids]) == ("", [0, 1, 2, 3])
    assert world.forming.generation == 2 + again
    assert (healed.pids[1], healed.pids[2], healed.pids[3]) == (101, 2, 102 + again)


async def test_a_problem_calls_forming_off_on_all_nodes(world: TwoParts) -> None:
    """A heal reports the problem that came first, not the failures that follow from it."""
    await world.start()
    world.one.waits, world.other.lack = True, "rank 1 could not start"
    world.other.die(1)
    assert (await world.forming.heal()).problem == "rank 1 could not start"
    assert world.one.asked == []  # no rank had to wait
    world.other.lack, world.other.problems = "", ["rank 1 died"] * HEAL_TRIES
    assert (await world.forming.heal()).problem == "rank 1 died"
    assert world.one.asked[:2] == ["form 2 of [0, 2] with []", "call off 2"]


async def test_a_heal_gives_up_after_some_tries(world: TwoParts) -> None:
    """A heal tries `HEAL_TRIES` generations, but only one if all ranks live and do not meet."""
    await world.start()
    for stays, problem, tries in ((False, "it died again", HEAL_TRIES), (True, "do not meet", 1)):
        world.other.problems, world.other.stays = [problem] * 99, stays
        before = world.forming.generation
        assert (await world.forming.heal()).problem == problem
        assert world.forming.generation == before + tries


async def test_scaling_adds_and_removes_ranks(world: TwoParts) -> None:
    """Groups of the old size are not kept; a rank that leaves is ended by its own node."""
    await world.start(2)
    grown = await world.forming.scale(spec_of(3), (0, 1))
    assert (grown.not_scaled, [*grown.pids]) == ("", [0, 1, 2])
    assert grown.change == Renumbering(2, 3, {0: 0, 1: 1})
    assert world.one.take_asked() == [*("prepare [2]", "prepare [2]", "form 2 of [0, 2] with None")]
    assert world.other.take_asked() == ["form 2 of [1] with None"]
    shrunk = await world.forming.scale(spec_of(1), (0,))
    assert ([*shrunk.pids], shrunk.change) == ([0], Renumbering(3, 1, {0: 0}))
    assert world.one.asked == ["end [2]", "form 3 of [0] with None"]
    assert world.other.asked == ["end [1]"]
    await world.forming.stop(1.0)
    assert world.one.alive == {}


@pytest.mark.parametrize("what", [{"lack": "no room"}, {"problems": ["no room"] * HEAL_TRIES}])
async def test_a_failed_scale_keeps_the_old_ranks(world: TwoParts, what: dict[str, Any]) -> None:
    """If ranks cannot be added, the old ranks stay, and the reply says why."""
    await world.start(2)
    vars(world.other).update(what)
    kept = await world.forming.scale(spec_of(4), (0, 1))
    assert (kept.not_scaled, [*kept.pids]) == ("no room", [0, 1])
    assert kept.change == Renumbering.none(2)


async def test_a_rank_that_moves_and_dies_is_a_new_rank(world: TwoParts) -> None:
    """The answer to a scale says which number each rank has, unless the rank was started anew."""
    await world.start()
    moved = await world.forming.scale(spec_of(2), (0, 3))
    assert (moved.problem, moved.pids[1], moved.change.became) == ("", 102, {0: 0, 3: 1})
    await world.forming.scale(spec_of(4), (0, 1))
    world.other.problems = ["rank 1 died"]
    fewer = await world.forming.scale(spec_of(2), (0, 3))
    assert (fewer.problem, fewer.change.became, fewer.change.new) == ("", {0: 0}, (1,))
