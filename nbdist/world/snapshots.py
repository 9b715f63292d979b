"""Snapshots of what the ranks of a world have, and their way back; see `nbdist.world.shelf`.

Each rank writes and reads a file of its own: `nbdist.worker.snapshots`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbdist.errors import UsageError, count, format_ranks, name_ranks
from nbdist.world.shelf import Shelf, Snapshot

if TYPE_CHECKING:
    from nbdist.world.world import World


@dataclass(frozen=True)
class Restored:
    """`names` have been bound on `ranks`."""

    snapshot: Snapshot
    names: tuple[str, ...]
    ranks: tuple[int, ...]


def take(world: World, shelf: Shelf, name: str, names: Sequence[str] | None = None) -> Snapshot:
    """Write these names of each rank, by default all that cells have bound.

    Raises UsageError where that cannot be done, and what a cell raises.
    """
    everybody = range(world.size)
    wanted = {r: sorted(world.losses.bound(r)) if names is None else [*names] for r in everybody}
    with shelf.writing(name) as folder:
        parts = ask(world, "write", str(folder), wanted, names is None)
        if problem := _problem(parts):
            raise UsageError(f"No snapshot was written: {problem}.")
        there = {each for part in parts.values() for each in part["names"]}
        if names is not None and (missing := [each for each in names if each not in there]):
            raise UsageError(f"No snapshot was written: no rank has {', '.join(missing)}.")
        if not there:
            raise UsageError("No snapshot was written: no cell has bound a name on the workers.")
        return shelf.publish(folder, name, parts)


def restore(
    world: World,
    shelf: Shelf,
    key: str | None = None,
    names: Sequence[str] | None = None,
    ranks: Sequence[int] | None = None,
    from_rank: int | None = None,
) -> Restored:
    """Bind names of a snapshot, by default all of the newest, on these ranks, by default all.

    Each rank reads its own file and goes on with its own random numbers, or reads that of
    `from_rank` and keeps its random states.  Nothing is bound where any file is damaged.

    Raises UsageError where that cannot be done, and what a cell raises.
    """
    snapshot = shelf.find(key)
    if snapshot.problem:
        raise shelf.damaged(snapshot, snapshot.problem)
    _check_names(snapshot, names)
    on = tuple(range(world.size)) if ranks is None else tuple(ranks)
    sources = _sources(world, snapshot, on, ranks is not None, from_rank)
    parts = {rank: _file_of(snapshot, source) for rank, source in sources.items()}
    loaded = ask(world, "load", str(snapshot.folder), parts, ranks=on)
    damage = next((found["damage"] for found in loaded.values() if "damage" in found), "")
    if damage or (problem := _problem(loaded)):
        ask(world, "forget", ranks=on)
        if damage:
            raise shelf.damaged(snapshot, damage)
        raise UsageError(f"The snapshot `{snapshot.key}` cannot be restored: {problem}.")
    bound = ask(world, "bind", names and [*names], from_rank is None, ranks=on)
    for rank, found in bound.items():
        world.losses.give_back(rank, found)
    return Restored(snapshot, tuple(sorted(set().union(*bound.values()))), on)


def ask(world: World, function: str, *args: Any, ranks: Sequence[int] | None = None) -> Any:
    """What a function of `nbdist.worker.snapshots` returns on each of the ranks.

    It runs as the value that a cell brings back, so it leaves no name behind.
    """
    module = "__import__('nbdist.worker.snapshots', fromlist=['snapshots'])"
    call = f"{module}.{function}(globals(), *{args!r})"
    running = world.submit(world.cell("", ranks=ranks, fetch=(call,)))
    result = running.wait()
    if error := running.error():
        raise error
    return dict(result.values)


def _problem(parts: dict[int, Any]) -> str:
    """What a rank could not do; "" where all could."""
    problems = {rank: part["problem"] for rank, part in parts.items() if "problem" in part}
    same = [rank for rank, said in problems.items() if said == next(iter(problems.values()))]
    return f"{name_ranks(same)}: {problems[same[0]]}" if problems else ""


def _check_names(snapshot: Snapshot, names: Sequence[str] | None) -> None:
    missing = [name for name in names or () if name not in snapshot.names]
    if missing:
        has = ", ".join(snapshot.names)
        raise UsageError(f"`{snapshot.key}` has no {', '.join(missing)}; it has {has}.")


def _sources(
    world: World,
    snapshot: Snapshot,
    on: Sequence[int],
    are_chosen: bool,  # noqa: FBT001
    from_rank: int | None,
) -> dict[int, int]:
    """From which rank's file each rank takes its variables."""
    size = len(snapshot.parts)
    if from_rank is not None:
        if from_rank not in snapshot.parts:
            raise UsageError(f"`--from-rank {from_rank}`: `{snapshot.key}` is of {_of(size)}.")
        return dict.fromkeys(on, from_rank)
    missing = [rank for rank in on if rank not in snapshot.parts]
    if missing or (size != world.size and not are_chosen):
        first = f"`-r {format_ranks(range(min(size, world.size)))}` restores these alone, "
        raise UsageError(
            f"`{snapshot.key}` is of {_of(size)}, and this world has {world.size}. "
            f"{first}`--from-rank 0` gives every rank the variables of rank 0, "
            f"`%dist_restart -n {size}` starts as many."
        )
    return {rank: rank for rank in on}


def _of(size: int) -> str:
    return count(size, "rank") + (f" (0-{size - 1})" if size > 1 else "")


def _file_of(snapshot: Snapshot, rank: int) -> tuple[int, int, str]:
    part = snapshot.parts[rank]
    return rank, part.size, part.digest
