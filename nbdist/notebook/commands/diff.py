"""In which ranks a variable differs, part by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from IPython.core.magic_arguments import argument

from nbdist.notebook.cells import bring
from nbdist.notebook.command import Line, command
from nbdist.notebook.commands.values import expressions_in
from nbdist.notebook.options import ranks_option
from nbdist.notebook.tables import Shown, below, block, table
from nbdist.wire.ops import Brought, Distance, Looked
from nbdist.wire.task import Call
from nbdist.world.comparison import Comparison
from nbdist.world.exchange import check_expressions, refusal

MOST_ROWS = 50

HEADINGS = ("part", "type", "ranks")


@command(
    argument("names", nargs="+", help="variables of the workers, or an expression"),
    ranks_option,
)
def dist_diff(line: Line) -> Shown | str:
    """Show which ranks have different values: `%dist_diff model`.

    A module is compared by parameters and buffers, an optimizer by its state, containers and
    objects by what they hold: shape, dtype, a digest of the contents, made on the ranks.
    Where digests differ the numbers are compared: NaN is equal to NaN, and -0.0 to 0.0.
    """
    expressions = [*expressions_in(line.options.names)]
    check_expressions(expressions)
    shown = [_difference(line, each) for each in expressions]
    if all(isinstance(each, str) for each in shown):
        return "\n".join(map(str, shown))
    return below(block(each) if isinstance(each, str) else each for each in shown)


def _difference(line: Line, expression: str) -> Shown | str:
    found = Comparison(expression, line.call("diff", expression=expression))
    _check(line, found)
    for reference, (others, paths) in found.to_compare().items():
        found.take(_distances(line, expression, reference, others, paths))
    rows = [*found.rows()]
    head, more = found.head(len(rows)), len(rows) - MOST_ROWS
    last = [(f"and {more} more", "", "")] if more > 0 else []
    return table(head, [HEADINGS, *rows[:MOST_ROWS], *last]) if rows else head


def _check(line: Line, found: Comparison) -> None:
    """Raise the error of a value that no rank has, or that cannot be looked at on some."""
    failed: dict[int, Looked] = {r: e for r, e in found.looked.items() if e.missing or e.problem}
    if len(failed) < len(found.looked) and not any(each.problem for each in failed.values()):
        return
    refused = {r: Brought(found.title, None, e.missing, e.problem) for r, e in failed.items()}
    if error := refusal(line.world.session, refused):
        raise error


def _distances(
    line: Line, expression: str, reference: int, others: Sequence[int], paths: Sequence[str]
) -> Mapping[int, Mapping[str, Distance]]:
    """Have ranks compare these parts with those of another one, through shared memory."""
    pool, world = line.pool, line.world
    wanted = {"expression": expression, "paths": tuple(paths)}
    lending = world.task(Call("diff.lend", wanted), ranks=(reference,))
    try:
        lent: Brought = bring(pool, world, lending)[reference]
        # The rank that lends does nothing else meanwhile: its next task would end that.
        given = {"expression": expression, "packed": lent.packed}
        return bring(pool, world, world.task(Call("diff.compare", given), ranks=tuple(others)))
    finally:
        world.session.let_go_of(lending, (reference,))
