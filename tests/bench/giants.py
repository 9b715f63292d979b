"""Rows of what is far too much: errors and displays of many megabytes, beside a plain kernel's."""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench.harness import Figure
from tests.bench.lab import Lab
from tests.bench.starting import start_world

CELLS = {
    "RecursionError": "def again(n):\n    return again(n + 1)\nagain(0)",
    "a message of 10 MB": "raise ValueError('x' * 10_000_000)",
    "a message of 100 MB": "raise ValueError('x' * 100_000_000)",
    "HTML of 20 MB": "class Big:\n    def _repr_html_(self): return '<b>x</b>' * 2_500_000\nBig()",
    "HTML of 50 MB": "class Big:\n    def _repr_html_(self): return '<b>x</b>' * 6_250_000\nBig()",
}
BUDGET = 2.0


def giants(lab: Lab) -> Iterator[Figure]:
    """What one rank says of many megabytes, as a multiple of what a plain kernel takes."""
    with lab.notebook() as plain, lab.notebook() as notebook:
        plain.run("import torch")  # as a worker has: tracebacks look through all modules
        start_world(notebook, 1)
        for what, source in CELLS.items():
            pairs = [
                (
                    plain.run(source, may_fail=True).seconds,
                    notebook.run(f"%%distributed\n{source}", may_fail=True).seconds,
                )
                for _ in range(lab.runs)
            ]
            yield Figure("giants", f"{what}, n=1", "s", tuple(pair[1] for pair in pairs))
            yield Figure(
                "giants", "  a plain kernel beside it", "s", tuple(pair[0] for pair in pairs)
            )
            ratios = tuple(cell / alone for alone, cell in pairs)
            yield Figure("giants", "  of a plain one", "x", ratios, BUDGET)
