"""Transfer of values: gather, scatter, sync, and snapshots on the disk (`snapshot_store`).

`World` and the notebook's magics use this module, in the notebook's process.

Values are bound in two tasks, so that either all ranks bind new values or none does.  In the first
task the ranks receive the values without binding them: that may take long, can fail, and is
interrupted by Stop.  In the second task they bind the values; the first Stop does not interrupt it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

from nbdist.errors import BadRanks, NbdistError, UsageError, VariableNotSent, WorkerError
from nbdist.output.events import NAME_PROBLEM, Died, Failure
from nbdist.output.wording import fold_ranks
from nbdist.values.payload import (
    INLINE_LIMIT,
    Payload,
    StepwiseValue,
    open_payload,
    packing,
    size_of,
)
from nbdist.values.pickling import Buffer, pickle, unpickle
from nbdist.values.unpicklable import blame, fails_in
from nbdist.wire.ops import Brought, Loaded, Mesh, Written
from nbdist.wire.spec import difference, versions_here
from nbdist.wire.work import OpCall, Task, Work
from nbdist.words import count, did_you_mean, format_ranks, name_ranks, one_line
from nbdist.world import dispatch, inbox, recovery
from nbdist.world.engine import Engine
from nbdist.world.name_table import WORKERS_OWN, check_are_free
from nbdist.world.outcome_texts import death_error
from nbdist.world.sent_objects import Parcel
from nbdist.world.snapshot_store import Snapshot, SnapshotStore
from nbdist.world.split_join import Joining, join, length_of, split, unit_of
from nbdist.world.task_error import error_of
from nbdist.world.task_run import TaskRun


def check_expressions(expressions: Sequence[str]) -> None:
    """Raise UsageError if one of the texts is not a Python expression."""
    for text in expressions:
        try:
            compile(text, "<gather>", "eval")
        except SyntaxError as error:
            raise UsageError(f"`{text}` is no expression: {error.msg}.") from None


def variable_in(expression: str) -> str:
    """Return `model` for an expression that begins with `model.` or `model[`; "" for others."""
    match = re.match(r"(\w+)[.\[]", expression)
    return match[1] if match and match[1].isidentifier() else ""


def gather(
    engine: Engine,
    expressions: Sequence[str],
    ranks: Sequence[int] | None,
    run_task: Callable[[Task], Mapping[int, Brought]],
    *,
    rank: int | None = None,
    how: Joining | None = None,
    dim: int = 0,
) -> list[Any]:
    """Return the values of expressions on these ranks, by default all; see `World.gather`.

    The returned list has an item for each expression: the list of the ranks' values, with `rank`
    only the value of that rank, with `how` the joined value.  `run_task` runs a task and returns
    its result by rank.  Call `check_expressions` before.
    """
    # `nbdist.world.task_history` reads `expressions` of such a task.
    arguments: dict[str, Any] = {"expressions": tuple(expressions)}
    task = engine.task(OpCall("values.gather", arguments), ranks=ranks)
    brought = run_task(task)
    if spread := {rank: each for rank, each in brought.items() if each.spread}:
        _check_spread(spread, task.ranks)
        task = engine.task(OpCall("values.gather", {**arguments, "joins": True}), ranks=task.ranks)
        brought = run_task(task)
    values = _read(engine, task, brought)
    if rank is not None:
        return [by_rank[rank] for by_rank in values]
    if how is None:
        return [[*by_rank.values()] for by_rank in values]
    return [join(how, name, each, dim) for name, each in zip(expressions, values, strict=True)]


def _check_spread(replies: Mapping[int, Brought], ranks: Sequence[int]) -> None:
    """Raise UsageError if a sharded value cannot be put together from its parts.

    All ranks that hold a part of the value must be among `ranks`, and must shard the value in the
    same way.
    """
    for brought in replies.values():
        for number, part in enumerate(brought.spread):
            parts = {rank: each.spread[number : number + 1] for rank, each in replies.items()}
            lacking = [rank for rank in part.ranks if parts.get(rank) != (part,)]
            over = f"`{brought.of}` is spread over {name_ranks(part.ranks)} (DTensor, FSDP2)"
            if {*lacking} - {*ranks}:
                raise UsageError(
                    f"{over}: gather it from all of them, without `-r`. Or run in a cell of all of "
                    "them `whole = x.full_tensor()`, for a model `whole = get_model_state_dict("
                    "model, options=StateDictOptions(full_state_dict=True))`."
                )
            if lacking:
                who = f"{name_ranks(lacking)} {'does' if len(lacking) == 1 else 'do'} not"
                raise UsageError(f"{over}, and {who} have the same of it there.")


def _read(engine: Engine, task: Task, replies: Mapping[int, Brought]) -> list[dict[int, Any]]:
    """Unpickle the replies; return for each expression its values by rank.

    Raises UsageError if a rank has no value.
    """
    try:
        if error := missing_error(engine, replies):
            raise error
        opened = {
            rank: unpickle(open_payload(brought.packed), engine.names.namespace)
            for rank, brought in replies.items()
            if brought.packed is not None
        }
    finally:
        lent = (rank for rank, each in replies.items() if each.packed and each.packed.segment)
        engine.connection.release_lent_values(task, lent)
    number = len(next(iter(opened.values()), ()))
    return [{rank: values[index] for rank, values in opened.items()} for index in range(number)]


def missing_error(engine: Engine, replies: Mapping[int, Brought]) -> UsageError | None:
    """Return the error that names the ranks without a value; None if all ranks have a value."""
    lacking = {rank: each for rank, each in replies.items() if each.packed is None}
    if not lacking:
        return None
    if missing := next((each.missing for each in lacking.values() if each.missing), ""):
        return UsageError(_missing_text(engine, missing, replies))
    problems = fold_ranks({rank: (each.of, each.problem) for rank, each in lacking.items()})
    (of, problem), ranks = next(iter(problems.items()))
    more = f" (and {len(problems) - 1} other problems)" if len(problems) > 1 else ""
    return UsageError(f"`{of}` on {name_ranks(ranks)}: {one_line(problem).rstrip('.')}{more}.")


def _missing_text(engine: Engine, name: str, replies: Mapping[int, Brought]) -> str:
    lack = [rank for rank, each in replies.items() if each.missing == name]
    lacking = f"{name_ranks(lack)} {'has no' if len(lack) == 1 else 'have no'}"
    had = engine.names.ranks_that_own(name) | engine.names.ranks_that_have(name)
    if have := {r for r, each in replies.items() if each.packed is not None} | (
        had - replies.keys()
    ):
        verb = "has" if len(have) == 1 else "have"
        return f"{lacking} `{name}`; {name_ranks(have)} {verb} it: `-r {format_ranks(have)}`."
    lacking = "no rank has" if len(lack) == engine.size else lacking
    if name in engine.names.namespace and name not in WORKERS_OWN:
        return f"{lacking} `{name}`; the notebook has it: `%dist_push {name}`."
    names = [each for rank in replies for each in engine.names.bound(rank)]
    return f"{lacking} `{name}`.{did_you_mean(name, names)}"


def bind_steps(
    engine: Engine, take: Task, work: Work, shipped: Mapping[int, Parcel] | None = None
) -> Iterator[TaskRun]:
    """Send the task `take`, and then a task with `work`; yield each, for the caller to follow it.

        for running in bind_steps(engine, take, OpCall("values.bind_scattered")):
            dispatch.wait(engine, running)
        dispatch.check(engine, running)

    In the first task ranks receive values, and in the second they bind the values.  The second is
    sent only if the first has succeeded and was not stopped.  If the values are the notebook's,
    `shipped` has by rank the names and objects that are bound.  Raises the errors of
    `dispatch.submit` and `commit`.
    """
    taken, bound = dispatch.submit(engine, take), None
    try:
        yield taken
        if not (taken.stop.was_pressed or error_of(taken)):
            bound = commit(engine, taken, work, shipped)
    finally:
        if bound is None and engine.state.has_workers:
            engine.connection.release_lent_values(take, take.ranks)
    if bound is not None:
        yield bound


def commit(
    engine: Engine, taken: TaskRun, work: Work, shipped: Mapping[int, Parcel] | None = None
) -> TaskRun:
    """Have the ranks of the finished task `taken` bind the values that they received in it.

    Returns the new task, with the given `work`, in which the ranks bind the values; the first Stop
    does not interrupt it.  Raises an error, with nothing bound, if a rank has died or was replaced
    since it received the values, or if no task can be sent.  `shipped` is as in `bind_steps`.
    """
    inbox.receive_waiting(engine)
    recovery.heal(engine)
    dispatch.check_ready(engine, taken.task.ranks)
    before, ranks = taken.members.pids, taken.task.ranks
    table = engine.rank_table
    if lost_ranks := [rank for rank in ranks if table.pids.get(rank) != before[rank]]:
        died, lost = dict(table.replaced), Died(None, time.time_ns())
        table.mark_reported(lost_ranks)
        error = death_error(engine, {rank: died.get(rank, lost) for rank in lost_ranks})
        error.add("Nothing was bound.")
        raise error
    patience = replace(taken.patience, holds_stop=True)
    return engine.send(engine.task(work, ranks=ranks), patience, shipped)


def bind(engine: Engine, take: Task, work: Work) -> TaskRun:
    """Run both tasks of `bind_steps` to their end, and return the second.

    Raises the errors of `bind_steps` and of the tasks, and KeyboardInterrupt after Stop.
    """
    for running in bind_steps(engine, take, work):
        dispatch.wait(engine, running)
    dispatch.check(engine, running)
    return running


class Scatter:
    """A value that is split into a part for each rank; owns the parts' shared memory.

        with closing(Scatter(engine, "x", value)) as scatter:
            for copied in scatter.packing():
                ...
            bind(engine, *scatter.tasks())

    Raises UsageError for a value that cannot be split or a name that cannot be used, and
    VariableNotSent for a part that cannot be pickled.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        value: Any,
        ranks: Sequence[int] | None = None,
        dim: int | None = None,
    ) -> None:
        if not name.isidentifier():
            raise UsageError(f"`{name}`: name the parts: `--as x`.")
        check_are_free([name], "`%dist_scatter`")
        self.name = name
        self.ranks = engine.rank_table.everyone if ranks is None else tuple(ranks)
        self._engine = engine
        self._memory = ExitStack()
        self._payloads: dict[int, Payload] = {}
        cut = dict(zip(self.ranks, split(name, value, len(self.ranks), dim), strict=True))
        self._sizes = {rank: length_of(part, dim) for rank, part in cut.items()}
        self._unit = unit_of(value, dim)
        self._frames: dict[int, Sequence[Buffer]] = {}
        for rank, part in cut.items():
            try:
                self._frames[rank] = pickle(part, engine.names.namespace, exact=True).frames
            except NbdistError:  # such as NotEnoughMemory
                raise
            except Exception as problem:  # noqa: BLE001 (a user's __reduce__ can raise anything)
                explanation = blame(name, part, fails_in(engine.names.namespace), problem)
                raise VariableNotSent(name, *explanation) from None
        self.bytes = sum(map(size_of, self._frames.values()))

    def __str__(self) -> str:
        """Write `x: 10 rows, 3 to each of ranks 0-1, 2 to each of ranks 2-3`."""
        shares = fold_ranks(self._sizes).items()
        texts = (f"{n} to {'each of ' if len(r) > 1 else ''}{name_ranks(r)}" for n, r in shares)
        return f"{self.name}: {sum(self._sizes.values())} {self._unit}, {', '.join(texts)}"

    def packing(self) -> Generator[int, None, None]:
        """Copy large parts to shared memory; yield again and again the bytes copied so far."""
        # Small parts are in the task's message.  All ranks get all parts in that message, so the
        # limit for a part is divided by the number of ranks.
        limit, done = INLINE_LIMIT // len(self.ranks), 0
        for rank, frames in self._frames.items():
            with closing(StepwiseValue(packing(frames, limit))) as steps:
                for copied in steps:
                    yield done + copied
            self._payloads[rank], segment = steps.made
            if segment is not None:
                self._memory.callback(segment.close)
            done += size_of(frames)

    def tasks(self) -> tuple[Task, OpCall]:
        """Return the task in which ranks receive the parts, and the work that binds them.

        These are arguments of `bind`.  Call this method after `packing` has ended.
        """
        arguments = {"name": self.name, "parts": self._payloads}
        take = self._engine.task(OpCall("values.scatter", arguments), ranks=self.ranks)
        return take, OpCall("values.bind_scattered")

    def close(self) -> None:
        """Release the shared memory of the parts; call this after ranks have received them."""
        self._memory.close()


def sync(
    engine: Engine, names: Sequence[str], source: int, ranks: Sequence[int] | None
) -> tuple[int, ...]:
    """Copy variables from the rank `source` to other ranks; see `World.sync`.

    Returns the ranks that have got copies.  Either all receivers bind the variables or none does.
    """
    if not names:
        raise UsageError("`%dist_sync`: which names? `%dist_sync model opt --from 0`.")
    if bad := [name for name in names if not name.isidentifier()]:
        remedy = ""
        if whole := variable_in(bad[0]):
            remedy = f": `%dist_sync {whole}` copies all of `{whole}`"
        raise UsageError(f"`%dist_sync {bad[0]}`: variables are copied by name{remedy}.")
    check_are_free(names, "`%dist_sync`")
    if engine.rank_table.spec.backend is None and engine.state.has_workers:
        why = "copies through the process group, and these workers have none (`--backend none`)"
        raise UsageError(f"`%dist_sync` {why}.")
    for rank in (source, *(ranks or ())):
        if not 0 <= rank < engine.size:
            raise BadRanks(str(rank), engine.size, f"there is no rank {rank}")
    to = None if ranks is None else tuple(rank for rank in ranks if rank != source)
    unique = tuple(dict.fromkeys(names))
    take = OpCall("values.sync", {"wanted": unique, "source": source, "to": to})
    try:
        running = bind(engine, engine.task(take), OpCall("values.bind_synced", {"wanted": unique}))
    except WorkerError as error:
        for rank, failure in error.errors.items():
            if isinstance(failure, Failure) and failure.name == NAME_PROBLEM:
                raise UsageError(f"`%dist_sync`, rank {rank}: {failure.message}") from None
        raise
    got = tuple(
        track.rank
        for track in running.transcript
        if track.rank != source and track.done is not None and track.done.bound >= {*names}
    )
    for rank in got:
        engine.names.objects.record_copies(source, rank, running.gained(rank))
    return got


# --- snapshots: each rank writes and reads a file of its own (`nbdist.worker.ops.snapshot`) ----


@dataclass(frozen=True)
class Restored:
    """The result of `restore`: the `names` of a snapshot's variables that were bound on `ranks`."""

    snapshot: Snapshot
    names: tuple[str, ...]
    ranks: tuple[int, ...]


def save(
    engine: Engine,
    store: SnapshotStore,
    names: Sequence[str] | None = None,
    name: str | None = None,
) -> Snapshot:
    """Write variables of each rank to a new snapshot, and return it; see `World.snapshot`.

    If `names` is None, these are the variables that cells have bound or changed on the rank,
    without imports and without those that cannot be pickled.  `name` is by default the store's
    `default_name`.  Raises UsageError, and leaves no snapshot, if files cannot be written, if one
    of `names` is on no rank or cannot be pickled, or if there is no variable to write.
    """
    name = store.default_name if name is None else name
    if names is None:
        recovery.record_changes(engine, engine.rank_table.everyone)
    theirs = engine.names.theirs
    everyone = engine.rank_table.everyone
    names_by_rank = {r: theirs(r) if names is None else [*names] for r in everyone}
    with store.writing(name) as folder:
        arguments = {"folder": str(folder), "wanted": names_by_rank, "leave_out": names is None}
        write = engine.task(OpCall("snapshot.write", arguments), ranks=None)
        parts: Mapping[int, Written] = dispatch.run(engine, write).by_rank
        if problem := _problem(parts):
            raise UsageError(f"No snapshot was written: {problem}.")
        saved = {each for part in parts.values() for each in part.names}
        if names is not None and (missing := [each for each in names if each not in saved]):
            text = f"No snapshot was written: no rank has `{'`, `'.join(missing)}`."
            whole = variable_in(missing[0])
            if engine.names.ranks_with(whole):
                text += f" Variables are saved by name: `%dist_snapshot {whole}` saves `{whole}`."
            elif missing == [names[0]]:
                named = " ".join(["%dist_snapshot", *names[1:], "--name", names[0]])
                text += f" If that is to be the snapshot's name: `{named}`."
            raise UsageError(text)
        if not saved:
            raise UsageError("No snapshot was written: no cell has bound a name on the workers.")
        return store.publish(folder, name, parts)


def restore(
    engine: Engine,
    store: SnapshotStore,
    snapshot: Snapshot,
    names: Sequence[str] | None = None,
    ranks: Sequence[int] | None = None,
    from_rank: int | None = None,
) -> Restored:
    """Bind variables of a snapshot, by default all, on these ranks, by default all.

    Each rank reads its own file, and gets the saved states of its random number generators.  With
    `from_rank`, each rank reads that rank's file instead, and keeps its present random states.
    Sharded values are then put together from all files, and sharded over this world.  Raises
    UsageError, with nothing bound, if a file is damaged or the snapshot does not fit the ranks.
    """
    if snapshot.distrust:
        raise store.distrust_error(snapshot, snapshot.distrust)
    if snapshot.problem:
        raise store.damage_error(snapshot, snapshot.problem)
    if missing := [name for name in names or () if name not in snapshot.names]:
        text = f"`{snapshot.key}` has no {', '.join(missing)}; it has {', '.join(snapshot.names)}."
        if store.of(missing[0].partition("@")[0]):
            text += f" `%dist_restore --name {missing[0]}` restores the snapshot of this name."
        raise UsageError(text)
    sources = _sources(snapshot, engine.size, ranks, from_rank)
    on = (*sources,)
    if meshes := _meshes(snapshot, engine.size, from_rank):
        dispatch.run(engine, engine.task(OpCall("sharded.meshes", {"instead": meshes})))
    files = {rank: (rank, part.digest) for rank, part in snapshot.parts.items()}
    parts = {rank: files[source] for rank, source in sources.items()}
    everyones = [*files.values()] if meshes and from_rank is not None else []
    arguments = {"folder": str(snapshot.folder), "parts": parts, "everyones": everyones}
    load, running = engine.task(OpCall("snapshot.load", arguments), ranks=on), None
    try:
        loaded = dispatch.submit(engine, load)
        _check_loaded(dispatch.finish(engine, loaded).by_rank, store, snapshot)
        bind_arguments = {"names": names and [*names], "with_random": from_rank is None}
        running = commit(engine, loaded, OpCall("snapshot.bind", bind_arguments))
    finally:
        if running is None and engine.state.has_workers:
            engine.connection.release_lent_values(load, on)
    bound = dispatch.finish(engine, running).values()
    for rank in on:
        engine.names.objects.record_gained(rank, running.gained(rank))
    return Restored(snapshot, tuple(sorted(set().union(*bound))), on)


def _check_loaded(loaded: Mapping[int, Loaded], store: SnapshotStore, snapshot: Snapshot) -> None:
    """Raise UsageError if a rank has not loaded its file; the error says why."""
    if distrust := next((part.distrust for part in loaded.values() if part.distrust), ""):
        raise store.distrust_error(snapshot, distrust)
    if damage := next((part.damage for part in loaded.values() if part.damage), ""):
        raise store.damage_error(snapshot, damage)
    if problem := _problem(loaded):
        if differs := difference(snapshot.versions, versions_here()):
            problem += f" (written with {differs.what} {differs.there}, here is {differs.here})"
        raise UsageError(f"The snapshot `{snapshot.key}` cannot be restored: {problem}.")


def _problem(parts: Mapping[int, Written | Loaded]) -> str:
    problems = fold_ranks({rank: part.problem for rank, part in parts.items() if part.problem})
    return next((f"{name_ranks(ranks)}: {text}" for text, ranks in problems.items()), "")


def _sources(
    snapshot: Snapshot, size: int, ranks: Sequence[int] | None, from_rank: int | None
) -> dict[int, int]:
    """Return, by rank of this world, the rank of the snapshot whose file the rank reads.

    Raises UsageError if the snapshot lacks a file that is needed.  Also raises it if the snapshot
    has another number of ranks than `size`, and neither `ranks` nor `from_rank` is given.
    """
    on, before = range(size) if ranks is None else ranks, len(snapshot.parts)
    of = count(before, "rank") + (f" (0-{before - 1})" if before > 1 else "")
    if from_rank is not None:
        if from_rank not in snapshot.parts:
            raise UsageError(f"`--from {from_rank}`: `{snapshot.key}` is of {of}.")
        return dict.fromkeys(on, from_rank)
    if not snapshot.parts.keys() >= {*on} or (ranks is None and before != size):
        raise UsageError(
            f"`{snapshot.key}` is of {of}, and this world has {size}. "
            f"`-r {format_ranks(range(min(before, size)))}` restores these alone, `--from 0` "
            "gives every rank the variables of rank 0 and its part of sharded values, "
            f"`%dist_restart -n {before}` starts that many."
        )
    return {rank: rank for rank in on}


def _meshes(snapshot: Snapshot, size: int, from_rank: int | None) -> dict[Mesh, Mesh]:
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
