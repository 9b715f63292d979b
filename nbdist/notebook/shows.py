"""What the magics that only look show: of the workers, the last cell, the last failure."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from nbdist.errors import UsageError
from nbdist.notebook.desk import ranks_of
from nbdist.notebook.draw import whole_text
from nbdist.notebook.stacks import stacks_html, stacks_text
from nbdist.notebook.status import headline, owners_text, rows, status_html, status_text
from nbdist.notebook.why import nothing

if TYPE_CHECKING:
    from nbdist.notebook.desk import Desk

LINES_AGAIN = 1000
"""Lines that `%dist_output -r 3` shows without `--all`."""


def show_output(desk: Desk, ranks: str | None, *, everything: bool) -> None:
    """The last cell's panel once more; or some ranks' own lines, or all lines there are."""
    if desk.last is None or desk.world is None:
        raise UsageError("No distributed cell has run yet, so there is no output to show.")
    transcript = desk.last.transcript
    if ranks is None and not everything:
        desk.display().end(transcript, desk.log_files())
        return
    on = [rank for rank in ranks_of(ranks, desk.world) if rank in transcript.ranks]
    text = whole_text(transcript, on)
    if not everything:
        text = "\n".join(text.splitlines()[-LINES_AGAIN:])
    html = f'<pre style="font-family:monospace;white-space:pre-wrap">{escape(text)}</pre>'
    desk.display().show_table(html, text)


def show_status(desk: Desk, *, with_owners: bool) -> None:
    """The table of `%dist_status`, and who owns which name."""
    workers = desk.world.status() if desk.world is not None else ()
    head, table = headline(desk.world), rows(workers)
    text, html = status_text(head, table), status_html(head, table)
    if with_owners:
        owners = owners_text(desk.ledger.owners())
        text += f"\n{owners}"
        html += f'<pre style="font-family:monospace">{escape(owners)}</pre>'
    desk.display().show_table(html, text)


def show_stacks(desk: Desk, ranks: str | None) -> None:
    """Where each rank is, and how it came there."""
    world = desk.world
    stacks = world.stacks(ranks_of(ranks, world)) if world is not None else ()
    head = headline(world)
    desk.display().show_table(stacks_html(head, stacks), stacks_text(head, stacks))


def show_why(desk: Desk) -> None:
    """The last failure; restarts do not change it."""
    html, text = (desk.why.html, desk.why.text) if desk.why else nothing()
    desk.display().show_table(html, text)
