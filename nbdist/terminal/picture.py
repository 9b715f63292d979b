"""How a world looks in a terminal: a title, and its workers' table.  Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence

from nbdist.output.ansi import strip
from nbdist.wire.places import Usage
from nbdist.wire.seen import WorldSeen
from nbdist.words import aligned, count
from nbdist.world.status import rows, usage_text

NONE = (
    "none of your worlds runs on this machine: `%%distributed -n 4` in a notebook starts one,"
    " after `%load_ext nbdist`"
)


MADE_UP = re.compile(r"\d{8}-\d{6}-\d+|world|")
"""Names of worlds that nobody has given one."""


class CpuMeter:
    """Per cent of a core that processes have had between two looks."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, int], tuple[float, float]] = {}

    def __repr__(self) -> str:
        return f"<CpuMeter of {len(self._before)} processes>"

    def read(self, seen: WorldSeen) -> dict[int, float]:
        """Return it by rank; nothing of processes that are seen for the first time."""
        found = {}
        for worker in seen.workers:
            key, now = (seen.host, worker.pid), (seen.at, worker.cpu_seconds)
            at, seconds = self._before.setdefault(key, now)
            if now[0] > at:
                found[worker.rank] = 100 * max(0.0, now[1] - seconds) / (now[0] - at)
                self._before[key] = now
        return found


def title(seen: WorldSeen) -> str:
    """Say which world it is: `4 workers · gloo · train.ipynb (pid 123) · cell 7`."""
    cells = sorted({each.cell for each in seen.workers if each.cell is not None})
    notebook = os.path.basename(seen.notebook)
    used = [Usage(each.memory, each.gpu) for each in seen.workers]
    parts = [
        f"pool {seen.pool}" if seen.pool not in ("", "default") else "",
        count(len(seen.workers), "worker") if seen.workers else "no workers yet",
        seen.backend,
        "" if MADE_UP.fullmatch(seen.name) else seen.name,
        f"{notebook} (pid {seen.notebook_pid})"
        if notebook
        else f"notebook pid {seen.notebook_pid}",
        f"cell {', '.join(map(str, cells))}" if cells else "",
        usage_text(used),
    ]
    return " · ".join(filter(None, map(printable, parts)))


def table(seen: WorldSeen, cpu: Mapping[int, float]) -> list[tuple[str, ...]]:
    """Lay out headings, and a row per rank."""
    lines = {each.rank: printable(each.last_line).strip() for each in seen.workers}
    found = rows(seen.workers, cpu, lines)
    return [tuple(map(printable, row)) for row in found]


def printable(text: str) -> str:
    """Return it without what a terminal would obey: it may be what a worker has written."""
    return "".join(sign if sign.isprintable() else " " for sign in strip(text))


def as_lines(found: Sequence[tuple[WorldSeen, Mapping[int, float]]], width: int) -> Iterator[str]:
    """Write all worlds, no line longer than that."""
    if not found:
        yield NONE[:width]
    for index, (seen, cpu) in enumerate(found):
        if index:
            yield ""
        for line in (title(seen), *aligned(table(seen, cpu))):
            yield line if len(line) <= width else f"{line[: width - 1]}…"
