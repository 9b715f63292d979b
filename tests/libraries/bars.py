"""Cells that draw progress bars, run on real ranks, and what was seen of them meanwhile."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nbdist import World
from nbdist.output.bars import BarTable, bar_table, merged_line
from nbdist.output.final import final_layout
from nbdist.output.layout import live_layout
from nbdist.output.text import panel_text
from nbdist.wire.task import Source

UNTIL_SEEN = """
def until_seen(name, folder={folder!r}):
    'Wait until somebody has seen the bar of this name on all ranks, in the middle.'
    import os, time
    give_up_at = time.monotonic() + 60
    while not os.path.exists(os.path.join(folder, 'seen ' + name.encode().hex())):
        assert time.monotonic() < give_up_at, f'nobody has seen {{name!r}} in the middle'
        time.sleep(0.01)
"""


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

    def stays(self, bar: str) -> bool:
        """Whether a bar that begins so has stayed of both ranks: a line of each, or one of both.

        Their rates can be the same, and so all of their lines.
        """
        assert re.search(r"^── ranks 0-1 \(same( except for bars)?\) ──$", self.final, re.MULTILINE)
        ranks = re.findall(rf"^(rank \d  |){re.escape(bar)}", self.final, re.MULTILINE)
        return ranks in ([""], ["rank 0  ", "rank 1  "])


def drawn(world: World, folder: Path, source: str, ranks: Sequence[int] = (0, 1)) -> Drawn:
    """Run a cell as a notebook does, which has bars on these ranks.

    It can wait in the middle of one `until_seen(name)`: until that one was in the table with a
    row for each of them, somewhere between 0 and 1.
    """
    helped = UNTIL_SEEN.format(folder=str(folder)) + source
    running = world.submit(world.task(Source(helped)))
    found = Drawn([], [], "")
    for _ in world.follow(running):
        if table := bar_table(running.transcript):
            found.tables.append(table)
            found.lines.append(merged_line(running.transcript))
            assert "\n── rank" in panel_text(live_layout(running.transcript, time.monotonic()))
            for name in moving(table, ranks):
                (folder / f"seen {name.encode().hex()}").touch()
    world.session.check(running)
    final = panel_text(final_layout(running.transcript))
    world.session.let_go(running)
    return Drawn(found.tables, found.lines, final)


def moving(table: BarTable, ranks: Sequence[int]) -> set[str]:
    """The name of the bar that all of these ranks are in the middle of, where it is one."""
    rows = {row.rank: row for row in table.rows}
    if any(rank not in rows or not 0 < (rows[rank].bar.fraction or 0) < 1 for rank in ranks):
        return set()
    names = {rows[rank].name for rank in ranks}
    return names if len(names) == 1 else set()
