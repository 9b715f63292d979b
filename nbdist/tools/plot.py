"""`%dist_plot` shows curves of tracked numbers; `%%distributed --plot` tracks logged numbers.

Runs in the notebook's process.  For `--plot`, ops in the workers (`nbdist.tools.plot_op`) read the
numbers from progress bars and logs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from IPython.core.magic_arguments import argument

from nbdist.errors import NbdistError, UsageError
from nbdist.notebook.command import CellOption, MagicCall, command
from nbdist.notebook.display import CommandOutput
from nbdist.output.curves import Curves
from nbdist.output.html_parts import panel
from nbdist.words import one_line
from nbdist.world import inbox
from nbdist.world.name_table import list_names

NOTHING_TRACKED = (
    "nothing was tracked: `track(loss=loss)` in a cell, or `%%distributed --plot loss`"
)


@command(
    argument("names", nargs="*", help="which curves: loss lr; by default all"),
)
def dist_plot(line: MagicCall) -> CommandOutput | str:
    """Show what ranks have tracked, over all cells and restarts: `%dist_plot loss`.

    A curve shows the median of the ranks, and a band from the lowest to the highest of the ranks
    that stay close together.  A rank far from the others is outside of the band and has a line of
    its own.  If steps went back, only the numbers since then are drawn.
    """
    world = line.pool.world
    if world is not None:
        inbox.receive_waiting(world.engine)
    if world is None or not world.engine.outputs.curves.by_name:
        return NOTHING_TRACKED
    curves = world.engine.outputs.curves
    names = choose_curves(curves, line.options.names)
    # Imported late: `%load_ext`, which must be fast, loads this file for its option.
    from nbdist.output.chart import curves_html, curves_text

    return CommandOutput(panel(curves_html(curves, names)), curves_text(curves, names))


def choose_curves(curves: Curves, words: Sequence[str]) -> list[str]:
    """Return the names of the curves that `words` choose, or of all curves if there are no words.

    Raises UsageError for a name that has no curve.
    """
    # The word `loss,lr` stands for two names, unless a curve has the name `loss,lr`.
    parts = ([word] if word in curves.by_name else word.split(",") for word in words)
    names = [name for each in parts for name in each if name]
    for name in names:
        curves.find_curve(name)
    return [*dict.fromkeys(names)] or [*curves.by_name]


# --- `--plot` ----------------------------------------------------------------------------


@contextmanager
def _plotted(line: MagicCall) -> Iterator[None]:
    """While the cell runs, track the numbers in its bars and logs that `--plot` names."""
    if line.options.plot is None:
        yield
        return
    names = tuple(each for each in map(str.strip, line.options.plot.split(",")) if each)
    if not names:
        raise UsageError("`--plot`: give the names of numbers, such as `--plot loss,lr`.")
    if line.options.no_wait:
        raise UsageError(
            "`--plot`: logs are read while a cell is waited for: not with `--no-wait`. "
            "`track(loss=loss)` in the cell works there."
        )
    line.pool.ensure(line.options, line.display)
    line.call("plot.begin", names=names)
    try:
        yield
    finally:
        if text := _stop_reading_logs(line, names):
            line.pool.display().show_text(text)


def _stop_reading_logs(line: MagicCall, names: Sequence[str]) -> str:
    """Stop reading logs; return a line about names of `--plot` that were never logged, or "".

    If the ranks cannot be asked, return a line with the error.
    """
    try:
        logged = line.call("plot.end")
    except NbdistError as error:
        return f"`--plot`: {one_line(str(error))}"
    logged_names = {name for each in logged.values() for name in each or ()}
    missing = [name for name in names if name not in logged_names]
    if not missing:
        return ""
    others = sorted(logged_names.difference(names))
    others_text = f"logged were {list_names(others)}" if others else "nothing else was logged"
    return (
        f"`--plot`: no bar of tqdm and no log of transformers or Lightning had "
        f"{list_names(missing)}; {others_text}. `track(loss=loss)` tracks any number."
    )


PLOT = CellOption(
    argument("--plot", metavar="NAMES",
             help="track numbers of these names that tqdm's postfix and the logs of transformers"
             " and Lightning have: loss,lr"),
    _plotted,
)  # fmt: skip
