"""The magics that copy variables: notebook to ranks and back, rank to rank, and snapshots.

They run in the notebook's process when a user calls them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from IPython.core.magic_arguments import argument

from nbdist.config import whole_number
from nbdist.errors import NbdistError, UsageError
from nbdist.notebook.cells import bind, fetch_results, make_shipment
from nbdist.notebook.command import MagicCall, MagicResult, command, is_used
from nbdist.notebook.display import CommandOutput, block, moved
from nbdist.notebook.options import names_in, ranks_option
from nbdist.notebook.pool import Pool
from nbdist.notebook.shipment import replaced_text
from nbdist.notebook.shipping import push
from nbdist.wire.work import OpCall
from nbdist.words import aligned, count, did_you_mean, name_ranks, one_line, size_text
from nbdist.world import value_transfer
from nbdist.world.name_table import list_names
from nbdist.world.snapshot_store import Snapshot
from nbdist.world.split_join import Joining
from nbdist.world.value_transfer import Scatter
from nbdist.world.world import World

ONE_RANK = re.compile(r"-?\d+")


@command(
    argument("names", nargs="+", help="variables of the workers, or an expression such as "
        "loss.item()"),
    ranks_option,
    argument("--as", dest="targets", metavar="NAME", help="the result's name in the notebook: "
        "train,test for two"),
    argument("--stack", action="store_true", help="one tensor or array instead of the list, with "
        "a dimension for the ranks"),
    argument("--cat", action="store_true", help="the ranks' values end to end"),
    argument("--dim", metavar="D", type=int, help="along which dimension (0)"),
    # Users end a line with `;` by habit, so that IPython does not show its value.
    split=lambda _, line: (line.rstrip("; "), []),
)  # fmt: skip
def dist_gather(line: MagicCall) -> MagicResult:
    """Copy variables from all ranks into the notebook, as a list per variable.

    Each list gets the name of its variable, or a name after `--as`; either all variables are copied
    or none.  `x = %dist_gather y` also assigns the list to `x`.  With one rank, such as `-r 0`, the
    result is that rank's value instead of a list.  Tensors arrive on the CPU.  The workers'
    variables do not change.
    """
    options, pool = line.options, line.pool
    expressions = [*expressions_in(options.names)]
    targets = targets_of(expressions, options.targets, is_assigned=is_used())
    if options.stack and options.cat:
        raise UsageError("use either `--stack` or `--cat`.")
    if options.dim is not None and not (options.stack or options.cat):
        raise UsageError(f"`--dim {options.dim}` needs `--stack` or `--cat`.")
    how: Joining | None = "stack" if options.stack else "cat" if options.cat else None
    engine, ranks = line.world.engine, line.ranks
    is_one = how is None and ONE_RANK.fullmatch(options.ranks or "")
    one, dim = ranks[0] if is_one else None, options.dim or 0
    what = f"gathering {list_names(expressions)}"
    fetch = partial(fetch_results, pool, line.world, display=line.display, what=what)
    results = value_transfer.gather(engine, expressions, ranks, fetch, rank=one, how=how, dim=dim)
    named = zip(targets, results, strict=True)
    values = {target: value for target, value in named if target.isidentifier()}
    _bind_gathered(pool, values, [each for each in values if each in expressions], ranks)
    return MagicResult(results[0] if len(results) == 1 else tuple(results))


def _bind_gathered(
    pool: Pool, values: Mapping[str, Any], rank_names: Sequence[str], ranks: Collection[int]
) -> None:
    """Bind values in the notebook that were gathered from `ranks`.

    `values` has the values by name.  Later cells do not send these values to the ranks.
    `rank_names` are the names that `ranks` also use for these variables.  From now on these names
    belong to the ranks.
    """
    pool.shell.user_ns.update(values)
    pool.gathered.add(values)
    if pool.world is not None:
        for name in values:
            pool.world.engine.names.record_gathered(name, ranks if name in rank_names else ())


def expressions_in(words: Sequence[str]) -> Iterator[str]:
    """Yield the expressions in a line's words: two in `a b[0, 1]` or `a, b[0]`, one in `x + 1`."""
    whole = " ".join(words)
    if not all(map(_between_commas, words)) and (expressions := _between_commas(whole)):
        yield from expressions
        return
    words_so_far: list[str] = []
    for word in words:
        words_so_far.append(word)
        if expressions := _between_commas(" ".join(words_so_far)):
            yield from expressions
            words_so_far = []
    if words_so_far:
        yield " ".join(words_so_far)


def _between_commas(text: str) -> list[str]:
    """Split a text at commas into expressions, as Python splits the arguments of a call.

    Returns an empty list if the text is not a list of expressions.
    """
    call = f"_({text.strip()})"
    try:
        node = ast.parse(call, mode="eval").body
    except (SyntaxError, ValueError):
        return []
    if not isinstance(node, ast.Call) or node.keywords or node.end_col_offset != len(call.encode()):
        return []
    return [ast.get_source_segment(call, each) or "" for each in node.args]


def targets_of(
    expressions: Sequence[str], given: str | None, *, is_assigned: bool = False
) -> list[str]:
    """Return for each gathered expression the name of its result in the notebook.

    `given` is the text after `--as`, None without `--as`.  Without `--as`, the result has the name
    of the variable, such as `y`.  An expression such as `y[0]` is no name, and is returned as it is
    if the cell assigns the magic's value (`is_assigned`): `x = %dist_gather y[0]`.

    Raises UsageError if a text is no expression, if a result would have no name, if `--as` has more
    or fewer names than there are expressions, or if two results would have the same name.
    """
    value_transfer.check_expressions(expressions)
    line = f"`%dist_gather {' '.join(expressions)}`"
    targets = _target_names(expressions, given, f"{line}: {len(expressions)} values")
    for expression, target in zip(expressions, targets, strict=True):
        if not (target.isidentifier() or (is_assigned and given is None)):
            remedy = f"`%dist_gather {expression} --as values`"
            raise UsageError(f"{line}: give the result a name: {remedy}.")
    if len({*targets}) < len(targets):
        raise UsageError(f"{line}: two results would have the same name: use `--as a,b`.")
    return targets


def _target_names(names: Sequence[str], given: str | None, have: str) -> list[str]:
    """Return the names in `given`, the text after `--as`; without `--as` return `names`.

    Raises UsageError if `--as` has more or fewer names than `names`.  `have` is the beginning of
    the message, which says how many names are needed.
    """
    targets = [*names] if given is None else given.replace(" ", "").split(",")
    if len(targets) == len(names):
        return targets
    example = "such as `--as first,second`"
    raise UsageError(
        f"{have} but {count(len(targets), 'name')} after `--as`: give one for each, {example}."
    )


@command(argument("names", nargs="+", help="variables of the notebook"), ranks_option)
def dist_push(line: MagicCall) -> str:
    """Send notebook variables to the workers, replacing theirs."""
    names, pool, world = names_in(line.options.names), line.pool, line.world
    _check_are_here(line, names)
    pack = partial(push, names, ranks=line.ranks)
    shipment = make_shipment(pool, world, world.engine.names, pack)
    with shipment.packed(line.display) as packed:
        task = world.task(OpCall("values.push", {"packed": packed.payloads}), ranks=line.ranks)
        running = bind(
            pool, world, task, OpCall("values.bind_pushed"), line.display, shipment.parcels
        )
    replaced = {rank: each for rank, each in running.result().by_rank.items() if each}
    for name in names:
        if by_rank := {rank: each[name] for rank, each in replaced.items() if name in each}:
            line.display.add_note(replaced_text(name, line.pool.shell.user_ns[name], by_rank))
    is_all = len(line.ranks) == world.size
    to = count(world.size, "rank") if is_all else name_ranks(line.ranks)
    return f"sent {list_names(names, MAX_NAMED_VARIABLES)} to {to}"


def _check_are_here(line: MagicCall, names: Sequence[str]) -> None:
    user_ns = line.pool.shell.user_ns
    if missing := [name for name in names if name not in user_ns]:
        listed, near = "`, `".join(missing), did_you_mean(missing[0], user_ns)
        if value_transfer.variable_in(missing[0]) in user_ns:
            near = f" Variables are sent by name: assign it first, as in `part = {missing[0]}`."
        raise UsageError(f"`{line.command.shown_name}`: the notebook has no `{listed}`.{near}")


@command(
    argument("names", nargs="+", help="variables of the notebook"),
    argument("--dim", metavar="D", type=int,
             help="the dimension of a tensor or array to split (0)"),
    ranks_option,
    argument("--as", dest="target", metavar="NAME",
             help="the parts' name on the ranks: x,y for two"),
)  # fmt: skip
def dist_scatter(line: MagicCall) -> str:
    """Split variables into parts, one per rank: `%dist_scatter data labels`.

    A variable is a tensor, an array, a list or tuple, a DataFrame or Series, or a
    `datasets.Dataset`.  If the parts cannot have equal sizes, the first parts have one element
    more, as with torch.tensor_split.  Each rank gets its part under the variable's name; the
    notebook's variable stays whole.
    """
    names, world = names_in(line.options.names), line.world
    have = f"`%dist_scatter {' '.join(names)}`: {count(len(names), 'variable')}"
    targets = _target_names(names, line.options.target, have)
    _check_are_here(line, names)
    values = [line.pool.shell.user_ns[name] for name in names]
    texts = []
    for target, value in zip(targets, values, strict=True):
        scatter = Scatter(world.engine, target, value, line.ranks, line.options.dim)
        with closing(scatter):
            moved(scatter.packing(), scatter.bytes, line.display, f"scattering {target}")
            bind(line.pool, world, *scatter.tasks())
            texts.append(str(scatter))
    return f"scattered {'; '.join(texts)}"


@command(
    argument("names", nargs="+", help="variables of the workers, copied together"),
    argument("--from", "--from-rank", dest="source", metavar="RANK", default="0",
             help="copy from (0)"),
    ranks_option,
)  # fmt: skip
def dist_sync(line: MagicCall) -> str:
    """Copy variables from one rank to ranks that do not have them: `%dist_sync model opt --from 0`.

    With `-r`, copy to these ranks even if they have the variables.
    """
    names, world = names_in(line.options.names), line.world
    sources = line.ranks_of(line.options.source)
    if len(sources) != 1:
        raise UsageError(
            f"`%dist_sync --from {line.options.source}`: it takes one rank to copy from."
        )
    source = sources[0]
    to = None if line.options.ranks is None else line.ranks
    listed = ", ".join(names)
    line.display.show_status(f"copying {listed} …")
    got = world.sync(names, source, to)
    if got:
        return f"copied {listed} from rank {source} to {name_ranks(got)}"
    return f"all ranks have {listed} already; `-r all` copies to all of them"


# --- snapshots of the workers' variables ------------------------------------------------------

EVERY_OPTION = whole_number("--every", "a number, such as `--every 1`, or 0", minimum=0)
MAX_NAMED_VARIABLES = 20  # the most variables named in messages on pushes and snapshots

FROM_RANK = whole_number("--from", "a number, such as `--from 1`, or 0", minimum=0)


@command(
    argument("variables", nargs="*", help="by default all that cells have bound on the workers"),
    argument("--name", metavar="NAME", help="what to call it, by default as the notebook, which"
             " keeps its 3 newest of a name"),
    argument("--every", metavar="N", type=EVERY_OPTION,
             help="also after every N-th distributed cell that"
             " succeeds; 0 ends that"),
    argument("--remove", metavar="NAME", help="remove this notebook's snapshots of this name,"
             " or NAME@STAMP"),
)  # fmt: skip
def dist_snapshot(line: MagicCall) -> str:
    """Save variables and RNG states of every rank: `%dist_snapshot model step --name epoch-3`.

    Each rank writes a file of its own.  The snapshot exists only if all ranks have written theirs.
    `%dist_restore` restores it, also into new workers or a new notebook kernel.
    """
    options, routine, every = line.options, line.pool.routine, line.options.every
    if options.remove is not None:
        removed = line.pool.snapshot_store.remove(options.remove)
        return f"removed {', '.join(f'`{each.key}`' for each in removed)}"
    selection = tuple(names_in(options.variables)) or None, options.name
    if every == 0 and selection == (None, None):
        routine.every = 0
        return "automatic snapshots are off"
    snapshot = _save_snapshot(line.pool, line.world, *selection)
    if every is not None:
        routine.every, routine.selection, routine.cells = every, selection, 0
    ranks = count(len(snapshot.parts), "rank")
    listed = list_names(snapshot.names, MAX_NAMED_VARIABLES)
    saved = f"saved {listed} of {ranks} · snapshot `{snapshot.name}`"
    again = f"again after every {count(routine.every, 'cell')}" if every else ""
    left_out = "; ".join(f"{name} ({why})" for name, why in snapshot.left_out.items())
    left_out = left_out and f"left out: {left_out}"
    parts = [saved, size_text(snapshot.size), left_out, again, str(snapshot.folder)]
    return " · ".join(filter(None, parts))


def save_due_snapshot(pool: Pool) -> None:
    """Save a snapshot after a cell that succeeded, if one is due by `--every`.

    Does nothing while ranks run another cell.  If the snapshot fails, a line says why, and the cell
    still succeeds.
    """
    routine = pool.routine
    if pool.world is None or not pool.world.engine.task_table.is_idle:
        return  # a snapshot needs all ranks to be idle, so this cell is not counted
    if not routine.is_due():
        return
    try:
        _save_snapshot(pool, pool.world, *routine.selection)
    except NbdistError as error:
        named = f" `{name}`" if (name := routine.selection[1]) else ""
        text = f"no snapshot{named} after this cell: {one_line(str(error))}"
        pool.display().show_text(text)


@command(
    argument("variables", nargs="*", help="by default all that it has"),
    argument("--name", metavar="NAME", help="which snapshot, by default this notebook's newest;"
             " NAME@STAMP for an older one"),
    argument("--list", action="store_true", dest="lists", help="show what snapshots there are"),
    argument("--from", "--from-rank", dest="from_rank", metavar="RANK", type=FROM_RANK,
             help="give every rank the variables of this one; the random states stay as they are"),
    ranks_option,
)  # fmt: skip
def dist_restore(line: MagicCall) -> CommandOutput | str:
    """Restore a snapshot: variables and RNG states of every rank, each from its own file.

    `%dist_restore model --name epoch-3` restores one variable of one snapshot.  With `-r 0` only
    rank 0 is restored; a DDP or FSDP2 module must be restored on all ranks.  If the number of ranks
    has changed since, use `--from 0`: sharded values are then sharded again.  If a file is damaged,
    no variable is bound.
    """
    options = line.options
    if options.lists:
        store = line.pool.snapshot_store
        rows = [("snapshot", "taken", "saved by", "ranks", "size", "variables")]
        rows += [_row(each, store.owner) for each in store.all()]
        if len(rows) == 1:
            return f"no snapshots in {store.root}"
        return block("\n".join([*aligned(rows), f"in {store.root}"]))
    world = line.world
    ranks = line.ranks if options.ranks is not None else None
    source = options.from_rank
    line.display.show_status("restoring …")
    store = world.snapshot_store
    names = names_in(options.variables)
    done = world.restore(names or (), name=options.name, ranks=ranks, from_rank=source)
    snapshot = done.snapshot
    of_rank = f" of rank {source}" if source is not None else ""
    listed = list_names(done.names, MAX_NAMED_VARIABLES)
    text = f"restored {listed}{of_rank} on {name_ranks(done.ranks)} "
    of_other = "" if snapshot.owner == store.owner else ", which this notebook did not save"
    return f"{text}from `{snapshot.key}` of {snapshot.clock}{of_other}"


def _save_snapshot(
    pool: Pool, world: World, names: tuple[str, ...] | None, name: str | None
) -> Snapshot:
    pool.routine.newest = snapshot = world.snapshot(names or (), name=name)
    return snapshot


def _row(snapshot: Snapshot, owner: str) -> tuple[str, str, str, str, str, str]:
    if snapshot.distrust:
        return snapshot.key, "", "", "", "", f"not to be restored: {snapshot.distrust}"
    if snapshot.problem:
        return snapshot.key, "", "", "", "", f"damaged: {snapshot.problem}"
    file = snapshot.owner if snapshot.owner.startswith("/") else "another session"
    by = "this notebook" if snapshot.owner == owner else file
    ranks, size = str(len(snapshot.parts)), size_text(snapshot.size)
    return snapshot.key, snapshot.clock, by, ranks, size, list_names(snapshot.names)
