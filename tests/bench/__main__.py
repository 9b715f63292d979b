"""`python -m tests.bench`: measure, and print the table; see `tests/bench/__init__.py`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.bench import cells, many, shipping, starting
from tests.bench.lab import CellFailed, Figure, Lab, header, line

ROWS: dict[str, Callable[[Lab], Iterator[Figure]]] = {
    row.__name__.removesuffix("_cell"): row
    for row in (
        *(starting.load, starting.start, starting.restart, starting.training, cells.pass_cell),
        *(cells.widgets, cells.ratio, cells.calls, starting.memory, cells.lines),
        *(shipping.ship, shipping.differ, shipping.giants, cells.faults),
        *(cells.collect, cells.look, many.many, many.hosts, many.carry, shipping.track),
    )
}


def main() -> None:
    """Measure the chosen rows, and print their figures."""
    options = _options()
    if options.list:
        for name, row in ROWS.items():
            sys.stdout.write(f"{name:10} {(row.__doc__ or '').splitlines()[0]}\n")
        return
    sys.stdout.write(f"{header(options.runs)}\n")
    with Lab(options.runs, options.wait) as lab:
        for name in options.only:
            for figure in _measure(lab, name):
                sys.stdout.write(f"{line(figure)}\n")
                sys.stdout.flush()


def _measure(lab: Lab, name: str) -> Iterator[Figure]:
    try:
        for figure in ROWS[name](lab):
            yield replace(figure, busy=lab.was_busy())
    except CellFailed as error:
        sys.stderr.write(f"{name}: {error}\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.bench", description=__doc__)
    parser.add_argument("--only", type=_row_names, default=list(ROWS), help="rows: start,pass")
    parser.add_argument("--runs", type=int, default=5, help="runs of each (default 5)")
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


main()
