"""Functions that `nbdist mcp` calls in a notebook's kernel, by code that it sends to the kernel.

Each command that can change workers is shown under the user's last distributed cell, with the
name of the program that sent the command.  So readers of the notebook see who did what.  The
argument `until` is a time in seconds since 1970, after which a call is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from html import escape
from typing import Any

from IPython.core.getipython import get_ipython

from nbdist.errors import UsageError
from nbdist.notebook.display import CommandOutput, block
from nbdist.notebook.extension import pools_of
from nbdist.notebook.pool import Pool
from nbdist.output.html_parts import BLUE, LINES, barred, bold, panel
from nbdist.output.html_parts import line as as_line
from nbdist.output.text import whole_text
from nbdist.topology import parse_ranks
from nbdist.words import count

UNSEEN = "no distributed cell has run in this notebook, under which this would be shown"
TOO_LATE = "the notebook was busy for too long: nothing was run"


def run_unseen(until: float, pool: str, magic: str, line: str = "") -> None:
    """Run a magic that changes nothing; its output goes to `nbdist mcp` and not to the page.

    `until` is the time (`time.time()`) after which nothing is run, since `nbdist mcp` no longer
    waits.
    """
    _call(until, pool, lambda shell, _: shell.run_line_magic(magic, line))


def output(until: float, pool: str, number: int, ranks: str) -> None:
    """Print the output of `ranks` in a past cell.

    The `number` of the last cell is -1, and that of the cell before is -2.  After the time `until`,
    an error is shown instead.
    """

    def show(_: Any, target: Pool) -> None:
        past = target.late.cells.past(target.last.transcript) if target.last else []
        if not -len(past) <= number < 0:
            raise UsageError(f"the output of {count(len(past), 'cell')} is kept; -1 is the last")
        transcript = past[number]
        selected = parse_ranks(ranks, max(transcript.ranks) + 1)
        print(whole_text(transcript, [rank for rank in selected if rank in transcript.ranks]))  # noqa: T201

    _call(until, pool, show)


def run(until: float, pool: str, who: str, magic: str, line: str, cell: str = "") -> None:
    """Run a magic, and show the magic and its output in the notebook.

    `who` is the name of the assistant, which is shown too.  `cell` is the text below a cell magic,
    "" for a line magic.  Nothing is run after the time `until`, or if no distributed cell has run.
    """
    command = f"{'%%' if cell else '%'}{magic} {line}".rstrip()
    head = f"{who} ran this by `nbdist mcp` at {time.strftime('%H:%M:%S')}:"

    def run_it(shell: Any, target: Pool) -> None:
        code = "\n".join([command, *cell.splitlines()])
        body = barred(escape(code, quote=False), BLUE, f";{LINES}")
        CommandOutput(panel(as_line(bold(head)), body), f"{head}\n{code}").show_on(target.display())
        if cell:
            shell.run_cell_magic(magic, line, cell)
        else:
            shell.run_line_magic(magic, line)

    _call(until, pool, run_it, is_seen=True)


def show_note(until: float, pool: str, text: str) -> None:
    """Show a text under the user's last distributed cell, but not after the time `until`."""
    _call(until, pool, lambda _, target: block(text).show_on(target.display()), is_seen=True)


def _call(
    until: float, pool: str, action: Callable[[Any, Pool], object], *, is_seen: bool = False
) -> None:
    """Call `action` with the shell and the pool, and show any error as IPython shows errors.

    After the time `until`, shows an error and does not call `action`.  With `is_seen`, users see
    the output under their last distributed cell.  Otherwise only `nbdist mcp` gets it.  Output that
    comes after this call, such as that of a job, is always shown under that cell, if there is one.
    """
    shell: Any = get_ipython()
    request: dict[str, Any] = {}
    try:
        pools = pools_of(shell)
        if time.time() > until:
            raise UsageError(TOO_LATE)
        if pools is None or (target := pools.find(pool)) is None:
            raise UsageError("this notebook has no such workers any more")
        request = target.request
        if is_seen and not request:
            raise UsageError(f"{UNSEEN}: nothing was run")
        if is_seen:
            shell.set_parent(request)
        action(shell, target)
    except Exception:  # noqa: BLE001 (IPython shows any error, as for a cell)
        shell.showtraceback()
    finally:
        if request:
            shell.set_parent(request)
