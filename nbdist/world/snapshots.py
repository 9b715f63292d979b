"""Snapshots of what the ranks of a world have, and their way back.

Where they lie: `nbdist.world.snapshot_store`.

Each rank writes and reads a file of its own: `nbdist.worker.ops.snapshot`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbdist.errors import UsageError
from nbdist.wire.ops import Loaded, Mesh, Written
from nbdist.wire.spec import difference, versions_here
from nbdist.wire.work import Call
from nbdist.words import count, format_ranks, name_ranks
from nbdist.world.exchange import commit
from nbdist.world.session import Session
from nbdist.world.snapshot_store import Snapshot, SnapshotStore


@dataclass(frozen=True)
class Restored:
    """`names` have been bound on `ranks`."""

    snapshot: Snapshot
    names: tuple[str, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Wanted:
    """Which variables, None for all, of which snapshot; `hint` says how it is written today."""

    names: tuple[str, ...] | None
    name: str | None
    hint: str = ""


def wanted_to_save(words: Sequence[str], name: str | None) -> Wanted:
    """Tell variables from a name that comes first, as it once did; only what can be no variable."""
    if name is not None or not words or all(map(str.isidentifier, words[0].split("."))):
        return Wanted(tuple(words) or None, name)
    return _name_first("%dist_snapshot", words)


def wanted_to_restore(store: SnapshotStore, words: Sequence[str], name: str | None) -> Wanted:
    """Do the same where there is a snapshot of that name; UsageError where it may be either."""
    if name is not None or not words or not store.of(words[0].partition("@")[0]):
        return Wanted(tuple(words) or None, name)
    if any(words[0] in each.names for each in store.mine()[:1]):
        of_mine = f"{' '.join(words)} --name {store.find(None).key}"
        raise UsageError(
            f"`{words[0]}` is a variable and a snapshot: `%dist_restore --name {words[0]}` "
            f"restores the snapshot, `%dist_restore {of_mine}` the variable."
        )
    return _name_first("%dist_restore", words)


def arguments(
    given: Sequence[str | Sequence[str] | None], names: Sequence[str] | None, name: str | None
) -> tuple[list[str], str | None]:
    """Return variables and name as Python gives them, also by position with the name first."""
    if name is None and names is None and len(given) == 2 and not isinstance(given[1], str):
        given, names = given[:1], given[1] or ()
    first = given[0] if given else None
    if name is None and names is not None and isinstance(first, str):
        given, name = given[1:], first
    words = ([each] if isinstance(each, str) else each or () for each in (*given, names))
    return [word for some in words for word in some], name


def _name_first(magic: str, words: Sequence[str]) -> Wanted:
    name, *names = words
    today = " ".join([magic, *names, "--name", name])
    return Wanted(tuple(names) or None, name, f"a snapshot's name comes after `--name`: `{today}`")


def take(
    session: Session,
    store: SnapshotStore,
    names: Sequence[str] | None = None,
    name: str | None = None,
) -> Snapshot:
    """Write these variables of each rank, by default all that cells have bound.

    Raises UsageError where that cannot be done, and what a cell raises.
    """
    name = store.default_name if name is None else name
    bound = session.names.bound
    wanted = {r: bound(r) if names is None else [*names] for r in session.everyone}
    with store.writing(name) as folder:
        arguments = {"folder": str(folder), "wanted": wanted, "leave_out": names is None}
        parts: dict[int, Written] = _call(session, "write", None, **arguments)
        if problem := _problem(parts):
            raise UsageError(f"No snapshot was written: {problem}.")
        there = {each for part in parts.values() for each in part.names}
        if names is not None and (missing := [each for each in names if each not in there]):
            raise UsageError(_no_rank_has(names, missing))
        if not there:
            raise UsageError("No snapshot was written: no cell has bound a name on the workers.")
        return store.publish(folder, name, parts)


def restore(
    session: Session,
    store: SnapshotStore,
    snapshot: Snapshot,
    names: Sequence[str] | None = None,
    ranks: Sequence[int] | None = None,
    from_rank: int | None = None,
) -> Restored:
    """Bind names of a snapshot, by default all of them, on these ranks, by default all.

    Each rank reads its own file and goes on with its own random numbers, or reads that of
    `from_rank` and keeps its random states; what is sharded is then put together from all
    files, and sharded over this world.  Nothing is bound where any file is damaged.

    Raises UsageError where that cannot be done, and what a cell raises.
    """
    if snapshot.distrust:
        raise store.distrusted(snapshot, snapshot.distrust)
    if snapshot.problem:
        raise store.damaged(snapshot, snapshot.problem)
    if missing := [name for name in names or () if name not in snapshot.names]:
        has = ", ".join(snapshot.names)
        raise UsageError(f"`{snapshot.key}` has no {', '.join(missing)}; it has {has}.")
    on = session.everyone if ranks is None else tuple(ranks)
    sources = _sources(session, snapshot, on, ranks is not None, from_rank)
    if meshes := _meshes(snapshot, session.size, from_rank):
        session.run(session.task(Call("sharded.meshes", {"instead": meshes})))
    parts = {rank: _file_of(snapshot, source) for rank, source in sources.items()}
    shared = meshes and from_rank is not None
    everyones = [_file_of(snapshot, rank) for rank in snapshot.parts] if shared else []
    arguments = {"folder": str(snapshot.folder), "parts": parts, "everyones": everyones}
    loaded: dict[int, Loaded] = _call(session, "load", on, **arguments)
    damage = next((part.damage for part in loaded.values() if part.damage), "")
    distrust = next((part.distrust for part in loaded.values() if part.distrust), "")
    if damage or distrust or (problem := _problem(loaded)):
        _call(session, "forget", on)
        if distrust:
            raise store.distrusted(snapshot, distrust)
        if damage:
            raise store.damaged(snapshot, damage)
        if differs := difference(snapshot.versions, versions_here()):
            problem += f" (written with {differs.what} {differs.there}, here is {differs.here})"
        raise UsageError(f"The snapshot `{snapshot.key}` cannot be restored: {problem}.")
    wanted = {"names": names and [*names], "with_random": from_rank is None}
    running = commit(session, Call("snapshot.bind", wanted))
    session.wait(running)
    session.check(running)
    bound = running.result().values()
    return Restored(snapshot, tuple(sorted(set().union(*bound))), on)


def _no_rank_has(names: Sequence[str], missing: Sequence[str]) -> str:
    said = f"No snapshot was written: no rank has {', '.join(f'`{each}`' for each in missing)}."
    if missing != [names[0]]:
        return said
    named = " ".join(["%dist_snapshot", *names[1:], "--name", names[0]])
    return f"{said} If that is to be the snapshot's name: `{named}`."


def _call(session: Session, function: str, ranks: Sequence[int] | None, **arguments: Any) -> Any:
    """Return what a function of `nbdist.worker.ops.snapshot` returns on each of the ranks."""
    task = session.task(Call(f"snapshot.{function}", arguments), ranks=ranks)
    return dict(session.run(task).by_rank)


def _problem(parts: Mapping[int, Written | Loaded]) -> str:
    """Say what a rank could not do; "" where all could."""
    problems = {rank: part.problem for rank, part in parts.items() if part.problem}
    same = [rank for rank, said in problems.items() if said == next(iter(problems.values()))]
    return f"{name_ranks(same)}: {problems[same[0]]}" if problems else ""


def _sources(
    session: Session,
    snapshot: Snapshot,
    on: Sequence[int],
    are_chosen: bool,  # noqa: FBT001
    from_rank: int | None,
) -> dict[int, int]:
    """Return from which rank's file each rank takes its variables."""
    size = len(snapshot.parts)
    if from_rank is not None:
        if from_rank not in snapshot.parts:
            raise UsageError(f"`--from {from_rank}`: `{snapshot.key}` is of {_of(size)}.")
        return dict.fromkeys(on, from_rank)
    missing = [rank for rank in on if rank not in snapshot.parts]
    if missing or (size != session.size and not are_chosen):
        first = f"`-r {format_ranks(range(min(size, session.size)))}` restores these alone, "
        raise UsageError(
            f"`{snapshot.key}` is of {_of(size)}, and this world has {session.size}. "
            f"{first}`--from 0` gives every rank the variables of rank 0 and its part of sharded "
            f"values, `%dist_restart -n {size}` starts that many."
        )
    return {rank: rank for rank in on}


def _meshes(snapshot: Snapshot, size: int, from_rank: int | None) -> dict[Mesh, Mesh]:
    """Say which meshes there are to be, for those in the snapshot."""
    before = len(snapshot.parts)
    instead = {}
    for mesh in snapshot.meshes:
        fitted = mesh if from_rank is None else mesh.fitted(before, size)
        if fitted is None or max(fitted.ranks) >= size:
            raise UsageError(
                f"`{snapshot.key}` has {mesh}, which this world of {size} cannot have. "
                f"`%dist_restart -n {before}` starts that many."
            )
        instead[mesh] = fitted
    return instead


def _of(size: int) -> str:
    return count(size, "rank") + (f" (0-{size - 1})" if size > 1 else "")


def _file_of(snapshot: Snapshot, rank: int) -> tuple[int, int, str]:
    part = snapshot.parts[rank]
    return rank, part.size, part.digest
