"""Cells that draw progress bars, run on real ranks, and what was seen of them meanwhile."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from nbdist import World
from nbdist.output.bars import BarTable, bar_table, merged_line
from nbdist.output.final import final_layout
from nbdist.output.layout import live_layout
from nbdist.output.text import panel_text
from nbdist.wire.task import Source


@dataclass(frozen=True)
class Drawn:
    """The tables of bars while a cell ran, their lines in a terminal, and its final text."""

    tables: list[BarTable]
    lines: list[str]
    final: str

    @property
    def names(self) -> set[str]:
        return {row.name for table in self.tables for row in table.rows}

    @property
    def ranks(self) -> set[tuple[int, ...]]:
        return {table.ranks for table in self.tables}

    def is_seen_moving(self, name: str) -> bool:
        """Whether the bar of this name was a row in the middle, somewhere between 0 and 1."""
        rows = (row for table in self.tables for row in table.rows if row.name == name)
        return any(0 < (row.bar.fraction or 0) < 1 for row in rows)


def drawn(world: World, source: str, folder: Mapping[str, str] | None = None) -> Drawn:
    """Run a cell as a notebook does; names are put before it as texts."""
    given = "".join(f"{name} = {text!r}\n" for name, text in (folder or {}).items())
    running = world.submit(world.task(Source(given + source)))
    found = Drawn([], [], "")
    for _ in world.follow(running):
        if table := bar_table(running.transcript):
            found.tables.append(table)
            found.lines.append(merged_line(running.transcript))
            assert "\n── rank" in panel_text(live_layout(running.transcript, time.monotonic()))
    running.result()
    final = panel_text(final_layout(running.transcript))
    world.session.let_go(running)
    return Drawn(found.tables, found.lines, final)
