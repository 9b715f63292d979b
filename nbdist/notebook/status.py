"""The table of `%dist_status`."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from nbdist.errors import count
from nbdist.world.watch import doing_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.wire.messages import WorkerStatus
    from nbdist.world.world import World

HEADINGS = ("rank", "state", "pid", "device", "memory")
MORE_HEADINGS = ("where", "last collective")
"""Shown where there is something to say of any rank."""
STATE_COLOURS = {"idle": "#2aa44f", "busy": "#1f77e0", "dead": "#d03030", "starting": "#b8860b"}
CELL_STYLE = "padding:0 16px 0 0;text-align:left;border:none;font-family:monospace"


def pool_text(world: World) -> str:
    """`pool ps · `, before whatever is said of a world that is not the default one."""
    return f"pool {world.asked.other_pool} · " if world.asked.other_pool else ""


def headline(world: World | None) -> str:
    """`4 workers on node01 · gloo · ready`, or that there are none.

    With its `--name` where it was given one, and `8 workers as 2x4` where nodes are simulated.
    """
    if world is None or not world.state.has_workers:
        return "no workers are running · `%%distributed -n 4` or `%dist_init -n 4` starts them"
    pool = pool_text(world)
    name = f" · {world.asked.name}" if world.asked.name else ""
    shape = "" if world.layout.startswith("1x") else f" as {world.layout}"
    who = f"{pool}{count(world.size, 'worker')}{shape} on {world.host}"
    return f"{who} · {world.backend} · {world.state.value}{name}"


def rows(workers: Sequence[WorkerStatus]) -> list[tuple[str, ...]]:
    """A line of headings, and one of texts per rank; nothing where there are none."""
    if not workers:
        return []
    table = [(*HEADINGS, *MORE_HEADINGS), *map(_row, workers)]
    shown = [
        index
        for index, column in enumerate(zip(*table, strict=True))
        if index < len(HEADINGS) or any(column[1:])
    ]
    return [tuple(line[index] for index in shown) for line in table]


def _row(worker: WorkerStatus) -> tuple[str, ...]:
    collective = worker.collective
    done = "done" if collective and collective.is_done else "not done"
    return (
        str(worker.rank),
        f"busy {worker.busy_seconds:.0f} s" if worker.state == "busy" else worker.state,
        str(worker.pid),
        worker.device,
        f"{worker.memory / 2**20:.0f} MiB",
        doing_of([worker.rank], worker.place, worker.code) if worker.place else "",
        f"{collective}, {done}" if collective else "",
    )


def status_text(head: str, table: Sequence[Sequence[str]]) -> str:
    """The table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    body = [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]
    return "\n".join([head, *body])


def status_html(head: str, table: Sequence[Sequence[str]]) -> str:
    """The table with the states in colour, inline styles only."""
    html = f'<div style="font-family:monospace"><b>{escape(head)}</b>'
    if table:
        first, *others = table
        bold = "".join(f'<th style="{CELL_STYLE}">{heading}</th>' for heading in first)
        body = "".join(f"<tr>{''.join(map(_cell, line))}</tr>" for line in others)
        html += f'<table style="border:none;margin:4px 0"><tr>{bold}</tr>{body}</table>'
    return f"{html}</div>"


def owners_text(owners: Mapping[str, tuple[str, frozenset[int]]]) -> str:
    """Who owns which name, a line for each owner."""
    lines = []
    for owner, words in (("workers", "the workers' own"), ("notebook", "the notebook's, shipped")):
        names = sorted(name for name, (whose, _) in owners.items() if whose == owner)
        lines.append(f"{words}: {', '.join(names) or 'none'}")
    return "\n".join(lines)


def _cell(text: str) -> str:
    colour = STATE_COLOURS.get(text.partition(" ")[0], "")
    style = f"{CELL_STYLE};color:{colour}" if colour else CELL_STYLE
    return f'<td style="{style}">{escape(text)}</td>'
