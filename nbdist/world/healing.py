"""What is done about a world whose ranks share no group any more: some died, or were freed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, get_args

from nbdist.errors import AgentLost, StartError, UsageError
from nbdist.wire.messages import Heal, Healed, Kill
from nbdist.world.losses import replaced_text
from nbdist.world.states import Event, State

if TYPE_CHECKING:
    from nbdist.world.world import World

OnFailure = Literal["heal", "restart-all", "stop"]
"""What a death leads to: the dead replaced, all started anew (torchrun's way), or all ended."""

HEAL_TIMEOUT = 70.0
"""Seconds; longer than an agent takes when ranks do not meet."""

KILL_TIMEOUT = 5.0


def parse_on_failure(text: str) -> OnFailure:
    """UsageError for anything that is no policy."""
    for policy in get_args(OnFailure):
        if text == policy:
            return policy  # type: ignore[no-any-return]
    raise UsageError(f"`--on-failure {text}`: there are heal (the default), restart-all and stop.")


def heal(world: World) -> None:
    """Do what the world's policy says; nothing where its group is whole.

    All workers that live keep their variables, and their modules, meshes and subgroups,
    unless the policy is another.  Where that cannot be done, the state stays BROKEN, and
    `problem` says why.
    """
    if world.state is not State.BROKEN:
        return
    if world.losses.dead and world.on_failure != "heal":
        _give_up(world)
    else:
        form_anew(world)


def form_anew(world: World) -> None:
    """Start workers in the place of the dead, and form the group anew in all."""
    world.advance(Event.HEAL)
    outcome, world.problem = Event.HEAL_FAILED, "it was interrupted"
    replaced: tuple[int, ...] = ()
    try:
        healed = world.link.call(Heal(), timeout=HEAL_TIMEOUT)
        assert isinstance(healed, Healed)
        world.take_healed(healed)
        if not world.problem:
            outcome = Event.HEALED
            replaced = world.losses.replace(world.made_lately)
    except AgentLost as lost:
        outcome, world.problem = Event.AGENT_LOST, ""
        world.take_loss(lost)
    finally:
        world.advance(outcome)
    world.setup.replay(world, replaced)


def replace(world: World, ranks: Iterable[int]) -> None:
    """End these ranks, and start new ones in their place; the others keep their variables."""
    ending = tuple(ranks)
    world.link.call(Kill(ending), timeout=KILL_TIMEOUT)
    deadline = time.monotonic() + KILL_TIMEOUT
    while not world.losses.dead.keys() >= set(ending) and time.monotonic() < deadline:
        world.receive(max(0.0, deadline - time.monotonic()))
    if world.state is State.BROKEN:
        form_anew(world)


def _give_up(world: World) -> None:
    """Start all workers anew, or end them all."""
    if world.on_failure == "stop":
        world.shutdown()
        return
    dead = world.losses.dead
    try:
        world.restart_workers()
        world.problem = ""
    except (AgentLost, StartError) as error:
        world.problem = str(error)
        return
    world.losses.replace_all(world.size, dead)
    world.setup.replay(world, range(world.size))


def healing_text(world: World, dead: Iterable[int]) -> str:
    """What became of a world some of whose workers have died."""
    if world.state is State.BROKEN:
        why = f" ({world.problem})" if world.problem else ""
        return f"`%dist_restart` starts all workers anew; their variables are lost{why}."
    if world.on_failure == "stop":
        return "All workers were ended (`--on-failure stop`); the next cell starts new ones."
    if world.on_failure == "restart-all":
        if world.problem:
            return f"All workers were ended, and could not be started anew: {world.problem}"
        done = "All workers were started anew (`--on-failure restart-all`)"
        return f"{done}; their variables are lost.{world.setup.problem}"
    ranks = tuple(dead)
    said = replaced_text(ranks, world.losses.lacking(ranks))
    return f"{said}; the others keep theirs.{world.setup.problem}"
