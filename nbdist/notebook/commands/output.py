"""The last cell's output, and the last failure."""

from __future__ import annotations

from IPython.core.magic_arguments import argument

from nbdist.errors import UsageError
from nbdist.notebook.below import Below
from nbdist.notebook.command import Line, command
from nbdist.notebook.commands.log import log_of, log_options
from nbdist.notebook.options import ranks_option
from nbdist.notebook.tables import Shown, block
from nbdist.output.text import whole_text
from nbdist.words import count

LINES_AGAIN = 1000
"""Lines that `%dist_output -r 3` shows without `--all`."""


@command(
    argument(
        "cell",
        nargs="?",
        metavar="-N",
        type=int,
        default=-1,
        help="-2: the cell before the last, and so on",
    ),
    ranks_option,
    argument(
        "--all", action="store_true", dest="everything", help="all lines, not only the last ones"
    ),
    argument("--failed", action="store_true", help="the last failure, also after a restart"),
    argument("--log", action="store_true", help="the last lines of the ranks' log files"),
    log_options,
    looks=("log", "failed"),
)
def dist_output(line: Line) -> Shown | str | None:
    """Show the output of the last distributed cell again.

    `--failed` shows when and where the last failure was, with its traceback or last output;
    `--log` the end of all that ranks have written since they were started.
    """
    if line.options.failed:
        return _failure(line)
    if line.options.log:
        return log_of(line)
    _output(line)
    return None


def _output(line: Line) -> None:
    pool, everything = line.pool, line.options.everything
    if pool.last is None or pool.world is None:
        raise UsageError("No distributed cell has run yet, so there is no output to show.")
    pool.page.has_missed(pool.shell, None)  # it misses nothing any more
    pool.show_background()
    past, number = pool.ended.past(pool.last.transcript), line.options.cell
    if not -len(past) <= number < 0:
        raise UsageError(
            f"`%dist_output {number}`: the output of {count(len(past), 'cell')} is kept; "
            f"`%dist_output -1` is the last one{f', -{len(past)} the first' if past[1:] else ''}."
        )
    transcript = past[number]
    if line.options.ranks is None and not everything:
        line.display.again(transcript, pool.log_files())
        return
    ranks = [rank for rank in line.ranks if rank in transcript.ranks]
    text = whole_text(transcript, ranks)
    if not everything:
        text = "\n".join(text.splitlines()[-LINES_AGAIN:])
    block(text).on(line.display)
    if line.display.can_change:
        Below().show(transcript, ranks)


@command(looks=True, short_for="`%dist_output --failed`")
def dist_why(line: Line) -> Shown | str:
    """Show the last failure again: when, which rank, its traceback or last output.

    Also after `%dist_restart`.
    """
    return _failure(line)


def _failure(line: Line) -> Shown | str:
    why = line.pool.why
    return Shown(why.html, why.text) if why else "nothing has failed yet"
