"""More workers, or fewer, while the others keep what they have."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nbdist.errors import (
    AgentLost,
    NotScaled,
    UsageError,
    WorldBroken,
    WorldNotStarted,
    name_ranks,
)
from nbdist.wire.messages import Healed, Scale
from nbdist.world.refusal import refusal
from nbdist.world.spec import scaled
from nbdist.world.states import Event, State

if TYPE_CHECKING:
    from nbdist.world.world import World

SCALE_TIMEOUT = 200.0
"""Seconds; longer than an agent takes that tries it, then goes back to what there was."""

SIZE = re.compile(r"([+-]?)([0-9]{1,6})")
FORMS = "`%dist_scale 4` is how many there shall be, `+2` and `-1` how many more or fewer."


def parse_size(n: int | str, size: int) -> int:
    """How many workers `n` means for a world that has `size`; UsageError for none."""
    text = str(n).strip()
    found = SIZE.fullmatch(text)
    if found is None:
        raise UsageError(f"`%dist_scale {text}`: that is not a number of workers. {FORMS}")
    sign = "" if isinstance(n, int) else found[1]
    number = int(text if isinstance(n, int) else found[2])
    asked = {"": number, "+": size + number, "-": size - number}[sign]
    if asked < 1:
        there = f" There are {size}." if sign else ""
        raise UsageError(
            f"`%dist_scale {text}`: it takes at least one worker.{there} "
            "`%dist_shutdown` ends them all."
        )
    return asked


def scale(world: World, n: int | str) -> None:
    """Have as many workers as `n` says; nothing where there are."""
    world.receive_waiting()
    if world.is_idle and world.state is State.BROKEN:
        world.heal()
    if not world.state.has_workers:
        raise world.lost or WorldNotStarted("`%dist_scale`")
    if error := refusal(world):
        raise error
    asked = parse_size(n, world.size)
    if asked == world.size:
        return
    spec, world.warning = scaled(world.spec, asked)
    before = world.size
    replaced, why = _have(world, Scale(spec))
    world.setup.replay(world, {*replaced, *range(before, world.size)})
    if world.state is State.BROKEN:
        raise WorldBroken(world.problem)
    if why:
        raise NotScaled(before, asked, why)


def _have(world: World, request: Scale) -> tuple[tuple[int, ...], str]:
    """Ask the agent for them: who of the others died and was replaced, and what went wrong."""
    replaced: tuple[int, ...] = ()
    world.advance(Event.SCALE)
    outcome, world.problem = Event.HEAL_FAILED, "it was interrupted"
    try:
        healed = world.link.call(request, timeout=SCALE_TIMEOUT)
        assert isinstance(healed, Healed)
        world.receive_waiting()  # who has died meanwhile was replaced
        world.take_healed(healed)
        world.losses.end_from(world.size)
        if not world.problem:
            outcome = Event.HEALED
            replaced = world.losses.replace()
        return replaced, healed.not_scaled
    except AgentLost as lost:
        outcome, world.problem = Event.AGENT_LOST, ""
        world.take_loss(lost)
        raise
    finally:
        world.advance(outcome)


def scaled_text(world: World, before: int) -> str:
    """`world 2 -> 4`, and what the new ranks lack."""
    new = range(before, world.size)
    text = f"world {before} -> {world.size}"
    if not new:
        return text
    verb = "is" if len(new) == 1 else "are"
    lacking = world.losses.lacking(new)
    if lacking:
        lacks = "lacks" if len(new) == 1 else "lack"
        verb = f"{verb} new and {lacks} {lacking} · `%dist_sync NAME --from 0` copies names there"
    else:
        verb += " new"
    problem = f" ·{world.setup.problem.rstrip('.')}" if world.setup.problem else ""
    return f"{text} · {name_ranks(new)} {verb}{problem}"
