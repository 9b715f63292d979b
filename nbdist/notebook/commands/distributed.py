"""Cells on the workers."""

from __future__ import annotations

import re
from argparse import SUPPRESS
from collections.abc import Iterable
from typing import Any

from IPython.core.error import StdinNotImplementedError
from IPython.core.magic_arguments import argument

from nbdist.errors import UsageError
from nbdist.notebook.border.first_line import LineMagic, divide
from nbdist.notebook.cell_source import as_magic
from nbdist.notebook.cells import source_steps, through
from nbdist.notebook.command import Line, command
from nbdist.notebook.commands.snapshot import take_due
from nbdist.notebook.commands.timeline import profile_option, profiled
from nbdist.notebook.job import Steps
from nbdist.notebook.options import Magic, ranks_option, restarts_option, world_options
from nbdist.notebook.sending import send, sending_options

ASKED = (
    "The variables of the notebook and of the ranks will be deleted and cannot be recovered. "
    "Proceed (y/[n])? "
)

_RESET = re.compile(r"\s*%reset\b([^\n]*)")
_BETWEEN = re.compile(r"(?<=\d)\s+(?=[\d-])")
"""Where ranks are divided by blanks alone."""
_POOL = re.compile(r"(?:^|(?<=\s))--pool(?:\s*=\s*|\s+)(\S+)")


@command(
    ranks_option,
    argument("--auto", action="store_true", help=SUPPRESS),
    argument(
        "--setup", action="store_true", help="run the cell again in every worker that is restarted"
    ),
    restarts_option,
    sending_options,
    profile_option,
    argument(
        "--here-too",
        action="store_true",
        help="run the cell in the notebook too, at the same time",
    ),
    world_options,
    kind="cell",
    in_a_line=True,
)
def distributed(line: Line) -> None:
    """Run the cell on all workers at once; the first such cell starts them.

        %%distributed -n 4
        model = DistributedDataParallel(Net().to(device))

        %%distributed -r 0,2-3
        print(rank, loss.item())

    Variables of the notebook that the cell uses are sent with it.  `%distributed x = 1` runs one
    line; magics of the notebook at the end of the cell (`%dist_gather loss`) run after it.
    """
    if line.options.auto and not _reset_here(line):
        return
    line.cell, last = divide(line.cell)
    send(line, _steps(line))
    _run_here(line, last)


def _run_here(line: Line, magics: Iterable[LineMagic]) -> None:
    """Run the notebook's own magics that a cell ends with."""
    shell = line.pool.shell
    for each in magics:
        value = shell.run_line_magic(each.name, each.text)
        if each.target:
            shell.user_ns[each.target] = value


def _reset_here(line: Line) -> bool:
    """Delete the notebook's variables where auto mode's cell deletes the ranks'; ask once."""
    shell: Any = line.pool.shell
    cell = as_magic(shell, line.cell, line.pool.world)
    found = _RESET.match(cell)
    if found is None:
        return True
    if "-f" not in found[1].split():
        try:
            is_meant = shell.ask_yes_no(ASKED, default="n")
        except StdinNotImplementedError:  # as IPython has it
            is_meant = True
        if not is_meant:
            line.display.say("nothing was deleted")
            return False
    shell.run_line_magic("reset", f"-f {found[1]}")
    line.cell = f"%reset -f {found[1]}{cell[found.end() :]}"
    return True


def _steps(line: Line) -> Steps:
    options = line.options
    pool = line.pool
    first_line = "" if options.auto else line.text
    with profiled(line):
        result = yield from source_steps(
            pool, first_line, line.cell, options.ranks, line.display, options
        )
    if not isinstance(result, BaseException):
        take_due(pool)
    return result


def _split_ranks(_: Magic, text: str) -> tuple[str, list[str]]:
    """Take all but `--pool` for ranks: `-1` would be an option, `0, 2` two words."""
    ranks = "".join(_BETWEEN.sub(",", _POOL.sub(" ", text)).split())
    if not ranks:
        raise UsageError("`%%rank` needs ranks: `%%rank 0`, `%%rank 0,2-3`, `%%rank -1`.")
    pool = _POOL.search(text)
    return f"{pool[0] if pool else ''} -- {ranks}", []


@command(
    argument("ranks", help="which ranks: 0  0,2-3  1:3  ::2  -1  all"),
    kind="cell",
    split=_split_ranks,
)
def rank(line: Line) -> None:
    """Run the cell on some ranks only: `%%rank 0,2-3` is `%%distributed -r 0,2-3`."""
    line.cell, last = divide(line.cell)
    through(source_steps(line.pool, line.text, line.cell, line.options.ranks, line.display))
    take_due(line.pool)
    _run_here(line, last)
