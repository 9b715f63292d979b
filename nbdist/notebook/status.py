"""The table of `%dist_status`."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.wire.messages import WorkerStatus
    from nbdist.world.world import World

HEADINGS = ("rank", "state", "pid", "device", "memory")
STATE_COLOURS = {"idle": "#2aa44f", "busy": "#1f77e0", "dead": "#d03030", "starting": "#b8860b"}
CELL_STYLE = "padding:0 16px 0 0;text-align:left;border:none;font-family:monospace"


def headline(world: World | None) -> str:
    """`4 workers on node01 · gloo · ready`, or that there are none."""
    if world is None or not world.state.has_workers:
        return "no workers are running · `%%distributed -n 4` or `%dist_init -n 4` starts them"
    return f"{world.size} workers on {world.host} · {world.backend} · {world.state.value}"


def rows(workers: Sequence[WorkerStatus]) -> list[tuple[str, ...]]:
    """One row of texts per rank, in the order of `HEADINGS`."""
    return [
        (
            str(worker.rank),
            f"busy {worker.busy_seconds:.0f} s" if worker.state == "busy" else worker.state,
            str(worker.pid),
            worker.device,
            f"{worker.memory / 2**20:.0f} MiB",
        )
        for worker in workers
    ]


def status_text(head: str, table: Sequence[Sequence[str]]) -> str:
    """The table with aligned columns."""
    lines = [HEADINGS, *table] if table else []
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    body = [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([head, *body])


def status_html(head: str, table: Sequence[Sequence[str]]) -> str:
    """The table with the states in colour, inline styles only."""
    bold = "".join(f'<th style="{CELL_STYLE}">{heading}</th>' for heading in HEADINGS)
    body = "".join(f"<tr>{''.join(_cell(text) for text in line)}</tr>" for line in table)
    html = f'<div style="font-family:monospace"><b>{escape(head)}</b>'
    if table:
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
    colour = STATE_COLOURS.get(text.split()[0], "")
    style = f"{CELL_STYLE};color:{colour}" if colour else CELL_STYLE
    return f'<td style="{style}">{escape(text)}</td>'
