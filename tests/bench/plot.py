"""`python -m tests.bench.plot FIGURES.json PICTURE.png`: how cost grows with the ranks.

Of the row `many`: the processor's time that a cell takes of the notebook and of the head, on a
machine that others use: their work does not count.
"""

from __future__ import annotations

import json
import re
import sys

import matplotlib.pyplot as plt

from tests.bench.many import CPU_BUDGET

CELL = re.compile(r"(.*), (\d+) ranks, p50")
COLOURS = {"pass cell": "C0", "the same 100 lines": "C2", "100 different lines": "C1"}
LINES = {"CPU of the notebook": "-o", "CPU of the head": "--s"}

Points = dict[tuple[str, str], dict[int, float]]
"""By cell and process the milliseconds of each number of ranks."""


def points(figures: list[dict[str, object]]) -> Points:
    found, cell, ranks = Points(), "", ""
    for figure in figures:
        what = str(figure["what"]).strip()
        if match := CELL.fullmatch(what):
            cell, ranks = match.groups()
        elif what in LINES:
            found.setdefault((cell, what), {})[int(ranks)] = float(str(figure["median"]))
    return found


def draw(found: Points, file: str) -> None:
    """One line for each cell and process, both axes logarithmic."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for (cell, process), line in found.items():
        label = f"{cell}: {process.removeprefix('CPU of the ')}"
        axes.plot([*line], [*line.values()], LINES[process], color=COLOURS[cell], label=label)
    axes.axhline(CPU_BUDGET, color="grey", linewidth=0.8, linestyle=":")
    axes.annotate("what a pass cell may take", (8, CPU_BUDGET), va="bottom", color="grey")
    axes.set(xscale="log", yscale="log", xlabel="ranks, 8 to an agent", ylabel="ms of CPU a cell")
    ticks = sorted({ranks for line in found.values() for ranks in line})
    axes.set_xticks(ticks, [f"{ranks:,}" for ranks in ticks])
    axes.minorticks_off()
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        rows = json.load(file)["figures"]
    draw(points([row for row in rows if row["row"] == "many"]), sys.argv[2])
