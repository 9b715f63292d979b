"""Why a world takes no cell now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.errors import (
    NbdistError,
    WorkerDied,
    WorldBroken,
    WorldBusy,
    WorldNotStarted,
    WorldStuck,
)
from nbdist.world.healing import healing_text
from nbdist.world.states import State

if TYPE_CHECKING:
    from nbdist.world.world import World


def refusal(world: World) -> NbdistError | None:
    """The error that says so, with the remedy; None where it takes one."""
    if world.state.takes_cells:
        return None
    if world.state in (State.STOPPED, State.STARTING, State.STOPPING):
        return WorldNotStarted("The cell")
    if world.state is State.BROKEN:
        return _death(world)
    if world.lost is not None:
        return world.lost
    assert world.running is not None
    if world.state is State.STUCK:
        return WorldStuck(world.running.unfinished)
    return WorldBusy(world.running.unfinished, world.running.age)


def _death(world: World) -> NbdistError:
    """Why the workers share no group; said again for every cell until a restart."""
    running = world.running
    if running is not None and running.died and (error := running.error()):
        return error
    dead = world.losses.dead
    rank, died = next(iter(dead.items()), (0, None))
    if died is None:
        return WorldBroken(world.problem)
    pid = world.pids.get(rank, 0)
    told = WorkerDied(rank, world.host, pid, dead, 0, 0.0, died.exit_code)
    told.add(healing_text(world, dead))
    return told
