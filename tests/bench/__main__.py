"""`python -m tests.bench`: measure, and print the table; see `tests/bench/__init__.py`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.bench.cells import (
    barrier,
    calls,
    collectives,
    firstline,
    lines,
    pass_cell,
    ratio,
    timeline,
)
from tests.bench.drawing import draw, flood
from tests.bench.faults import faults, look
from tests.bench.harness import Figure, header, line, marked_busy, to_json
from tests.bench.lab import CellFailed, Lab
from tests.bench.many import carry, hosts, many
from tests.bench.shipping import differ, giants, ship
from tests.bench.starting import load, memory, ranks32, restart, start, training

ROWS: dict[str, Callable[[Lab], Iterator[Figure]]] = {
    "load": load,
    "start": start,
    "restart": restart,
    "training": training,
    "pass": pass_cell,
    "ratio": ratio,
    "calls": calls,
    "barrier": barrier,
    "memory": memory,
    "lines": lines,
    "firstline": firstline,
    "ranks32": ranks32,
    "ship": ship,
    "differ": differ,
    "draw": draw,
    "giants": giants,
    "faults": faults,
    "collect": collectives,
    "timeline": timeline,
    "look": look,
    "page": flood,
    "many": many,
    "hosts": hosts,
    "carry": carry,
}


def main() -> None:
    """Measure the rows that were asked for."""
    options = _options()
    if options.list:
        for name, row in ROWS.items():
            sys.stdout.write(f"{name:10} {(row.__doc__ or '').splitlines()[0]}\n")
        return
    table = sys.stderr if options.json == "-" else sys.stdout
    table.write(f"{header(options.runs)}\n")
    figures: list[Figure] = []
    with Lab(options.runs, options.wait) as lab:
        for name in options.only:
            for figure in _measure(lab, name):
                figures.append(figure)
                table.write(f"{line(figure)}\n")
                table.flush()
    if options.json == "-":
        sys.stdout.write(f"{to_json(figures, options.runs)}\n")
    elif options.json:
        Path(options.json).write_text(to_json(figures, options.runs), encoding="utf-8")


def _measure(lab: Lab, name: str) -> Iterator[Figure]:
    """The figures of a row; a row whose cells fail is told of, and the next one goes on."""
    try:
        for figure in ROWS[name](lab):
            yield marked_busy(figure, busy=lab.was_busy())
    except CellFailed as error:
        sys.stderr.write(f"{name}: {error}\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.bench", description=__doc__)
    parser.add_argument("--only", type=_row_names, default=list(ROWS), help="rows: start,pass")
    parser.add_argument("--runs", type=_positive, default=5, help="runs of each (default 5)")
    parser.add_argument("--json", nargs="?", const="-", help="to this file, or to stdout")
    parser.add_argument(
        "--wait", type=float, default=20.0, help="seconds to wait for a quiet machine (default 20)"
    )
    parser.add_argument("--list", action="store_true", help="name the rows")
    return parser.parse_args()


def _row_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in ROWS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"no row {', '.join(unknown)}; rows: {', '.join(ROWS)}")
    return names


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


main()
