"""Sends a prepared cell with its names to the workers, again where `--max-restarts` says so."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nbdist.notebook.why import why_of
from nbdist.world.restarts import restart_text

if TYPE_CHECKING:
    from nbdist.notebook.desk import Desk
    from nbdist.notebook.display import CellDisplay
    from nbdist.notebook.ship.plan import Shipment
    from nbdist.wire.messages import Cell
    from nbdist.world.running import RunningCell
    from nbdist.world.watch import Patience

Pack = Callable[[], "Shipment | None"]
"""Says what has to go along now; asked before each attempt."""


@dataclass(frozen=True, slots=True)
class Orders:
    """How to run a cell: `setup` is its key where new workers are to run it too."""

    patience: Patience | None = None
    setup: str = ""
    max_restarts: int = 0


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One that has ended: what went along, and the ranks that were replaced after it."""

    running: RunningCell
    shipment: Shipment | None
    stopped: bool
    replaced: Iterable[int] = ()


def run_attempts(
    desk: Desk, cell: Cell, pack: Pack, display: CellDisplay, orders: Orders | None = None
) -> None:
    """Run a cell and show it; raises the error of its last attempt when that failed too.

    What an attempt has bound counts only once there is no other: so each has the names of
    the notebook as the first one had them, and new ranks get those that they lack.
    """
    assert desk.world is not None
    orders = orders or Orders()
    earlier: list[_Attempt] = []
    try:
        for restart in range(orders.max_restarts + 1):
            restarts = (restart, orders.max_restarts)
            cell = replace(cell, id=uuid.uuid4().hex, restarts=restarts)
            last = _run(desk, cell, pack(), display, orders)
            text = None if last.stopped else restart_text(desk.world, last.running)
            if text is None:
                break
            display = _start_over(desk, last.running, text)
            replaced = desk.world.losses.take_replaced()
            desk.ledger.forget(replaced)
            earlier.append(replace(last, replaced=tuple(replaced)))
    finally:
        for attempt in earlier:
            _record(desk, attempt)
            desk.ledger.forget(attempt.replaced)
    _record(desk, last)
    desk.check_end(desk.world, last.running, stopped=last.stopped)


def _run(
    desk: Desk, cell: Cell, shipment: Shipment | None, display: CellDisplay, orders: Orders
) -> _Attempt:
    assert desk.world is not None
    for notice in shipment.notices if shipment else ():
        display.note(notice)
    if shipment and shipment.names:
        cell = replace(cell, names=shipment.payload)
    segment = shipment.segment if shipment else None
    try:
        running = desk.last = desk.world.submit(cell, orders.patience)
        stopped = desk.follow(running, display)
        if orders.setup and not running.error():
            desk.world.setup.keep(orders.setup, replace(cell, restarts=(0, 0)), segment)
            segment = None
    finally:
        if segment:
            segment.close()
    return _Attempt(running, shipment, stopped)


def _start_over(desk: Desk, failed: RunningCell, text: str) -> CellDisplay:
    """Where the next attempt is shown, below the one that has failed."""
    if error := failed.error():
        desk.why = why_of(failed, error, desk.log_files()) or desk.why
    display = desk.display()
    display.note(text)
    return display


def _record(desk: Desk, attempt: _Attempt) -> None:
    """The ledger learns what has reached the ranks, and what they have bound."""
    running, shipment = attempt.running, attempt.shipment
    if shipment:
        desk.ledger.shipped(shipment.records, running.ranks_with_names)
    desk.ledger.bound_on_workers(running.bound, running.cell.ranks)
