"""Snapshots as the notebook's magics take, bring back and list them."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from nbdist.errors import (
    Interrupted,
    NbdistError,
    UsageError,
    WorldNotStarted,
    count,
    name_ranks,
    one_line,
)
from nbdist.notebook.desk import ranks_of
from nbdist.world.losses import list_names
from nbdist.world.shelf import Shelf, Snapshot, root_folder
from nbdist.world.spec import default_log_dir

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from nbdist.notebook.desk import Desk


def snapshot(desk: Desk, options: argparse.Namespace) -> None:
    """Write a snapshot now; with `--every` also after every so many cells that succeed."""
    routine, every = desk.routine, _number(options.every)
    if every == 0 and options.name is None:
        routine.every = 0
        desk.say("no more snapshots by themselves")
        return
    if options.name is None:
        raise UsageError("`%dist_snapshot` needs a name: `%dist_snapshot epoch-3 model step`.")
    names = _names(options.variables)
    taken = _take(desk, options.name, names)
    if every is not None:
        routine.every, routine.name, routine.names, routine.cells = every, options.name, names, 0
    again = f"again after every {count(routine.every, 'cell')}" if every else ""
    left = "; ".join(f"{name} ({why})" for name, why in taken.left_out.items())
    parts = [_said(taken), left and f"left out: {left}", again, str(taken.folder)]
    desk.say(" · ".join(filter(None, parts)))


def after_cell(desk: Desk) -> None:
    """A distributed cell has succeeded: take the snapshot that is due, which never fails it."""
    routine = desk.routine
    if not routine.is_due():
        return
    try:
        _take(desk, routine.name, routine.names)
    except NbdistError as error:
        desk.say(f"no snapshot `{routine.name}` after this cell: {one_line(str(error))}")


def restore(desk: Desk, options: argparse.Namespace) -> None:
    """Bind what a snapshot has."""
    if desk.world is None:
        raise WorldNotStarted("`%dist_restore`")
    ranks = ranks_of(options.ranks, desk.world) if options.ranks is not None else None
    source = _number(options.from_rank, "--from-rank")
    display = desk.display()
    display.wait_for("restoring …")
    try:
        done = desk.world.restore(
            options.name, _names(options.variables), ranks=ranks, from_rank=source
        )
    except KeyboardInterrupt:
        raise Interrupted(range(desk.world.size)) from None
    desk.ledger.bound_on_workers(done.names, done.ranks)
    taken = done.snapshot
    of_rank = f" of rank {source}" if source is not None else ""
    display.say(
        f"{name_ranks(done.ranks)}: {list_names(done.names)}{of_rank} "
        f"restored from `{taken.key}` of {taken.clock}"
    )


def show_list(desk: Desk) -> None:
    """All snapshots there are, the newest first."""
    shelf = desk.world.shelf if desk.world else Shelf(root_folder(default_log_dir()))
    rows = [("snapshot", "taken", "ranks", "size", "variables")]
    rows += [_row(snapshot) for snapshot in shelf.all()]
    if len(rows) == 1:
        desk.say(f"no snapshots in {shelf.root}")
        return
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join([*(f"{c:<{w}}" for c, w in zip(row, widths, strict=False)), row[4]])
             for row in rows]  # fmt: skip
    text = "\n".join([*lines, f"in {shelf.root}"])
    style = "font-family:monospace;white-space:pre-wrap"
    desk.display().show_table(f'<pre style="{style}">{escape(text)}</pre>', text)


def _take(desk: Desk, name: str, names: Sequence[str] | None) -> Snapshot:
    if desk.world is None:
        raise WorldNotStarted("`%dist_snapshot`")
    try:
        taken = desk.world.snapshot(name, names)
    except KeyboardInterrupt:
        raise Interrupted(range(desk.world.size)) from None
    desk.routine.newest = taken
    return taken


def _said(taken: Snapshot) -> str:
    ranks = count(len(taken.parts), "rank")
    return f"snapshot `{taken.name}` · {ranks} · {list_names(taken.names)} · {_size(taken.size)}"


def _row(taken: Snapshot) -> tuple[str, str, str, str, str]:
    if taken.problem:
        return taken.key, "", "", "", f"damaged: {taken.problem}"
    what = list_names(taken.names)
    return taken.key, taken.clock, str(len(taken.parts)), _size(taken.size), what


def _names(given: Sequence[str]) -> tuple[str, ...] | None:
    """With spaces or commas between; None for none."""
    return tuple(name for words in given for name in words.split(",") if name) or None


def _size(number: int) -> str:
    """`820 kB`, `1.2 GB`."""
    if number < 1000:
        return f"{number} B"
    for power, unit in ((6, "kB"), (9, "MB")):
        if number < 10**power:
            return f"{number / 10 ** (power - 3):.1f} {unit}"
    return f"{number / 10**9:,.1f} GB"


def _number(text: str | None, option: str = "--every") -> int | None:
    if text is None:
        return None
    if not text.isdigit():
        raise UsageError(f"`{option} {text}`: a number, such as `{option} 1`, or 0.")
    return int(text)
