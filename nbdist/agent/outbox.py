"""What ranks have shown and the notebook has not got yet: batched by time, bounded in size."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace

from nbdist.agent.backlog import Backlog, Item
from nbdist.output.events import (
    Died,
    Display,
    Done,
    Failure,
    InputRequest,
    MimeBundle,
    Output,
    Text,
    Update,
)
from nbdist.wire.messages import Outputs

BATCH_SECONDS = 0.02
BATCHES_UNDER_WAY = 4
"""Batches that may be unacknowledged; beyond them the notebook is too slow for more."""

ENOUGH_IN_A_BATCH = 8 << 20
"""Characters after which a batch is full: the answer to Stop waits behind those under way."""


class Outbox:
    """Collects outputs of all ranks and sends them in batches, each rank's in order."""

    def __init__(self, send: Callable[[Outputs], None]) -> None:
        self._send = send
        self._waiting = Backlog()
        self._running: set[int] = set()
        self._under_way = 0
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Outbox {len(self._waiting)} items, {self._under_way} batches under way>"

    def begin(self, ranks: Iterable[int]) -> None:
        """Note that these ranks run a cell from now on."""
        self._running.update(ranks)

    def add(self, rank: int, cell_id: str, output: Output) -> None:
        """Take an output; some leave at once.

        Failures, deaths, the last rank's end of a cell, and what a rank waits for.
        """
        if isinstance(output, Done | Died):
            self._running.discard(rank)
        self._waiting.add(rank, cell_id, output)
        is_end = isinstance(output, Done) and not self._running
        at_once = is_end or isinstance(output, Died | Failure | InputRequest)
        self._schedule(0.0 if at_once else BATCH_SECONDS)

    def acknowledge(self) -> None:
        """Note that the notebook has taken in one batch."""
        self._under_way -= 1
        if self._waiting:
            self._schedule(0.0)

    def _schedule(self, delay: float) -> None:
        if self._under_way >= BATCHES_UNDER_WAY:
            return  # the next acknowledgement sends
        loop = asyncio.get_running_loop()
        when = loop.time() + delay
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = loop.call_at(when, self._flush)

    def _flush(self) -> None:
        self._timer = None
        if self._waiting:
            items = self._waiting.take(ENOUGH_IN_A_BATCH)
            self._under_way += 1
            self._send(Outputs(folded(items)))
            if self._waiting:
                self._schedule(0.0)


def folded(items: Iterable[Item]) -> tuple[Item, ...]:
    """Have what several ranks show alike be one object: pickled, it is there once.

    So equal lines, and equal figures, go over the network once for each machine.
    """
    texts: dict[Text, Text] = {}
    values: dict[str, str] = {}

    def one(output: Output) -> Output:
        match output:
            case Text():
                return texts.setdefault(output, output)
            case Display(data) | Update(data):
                return replace(output, data=_with(values, data))
            case _:
                return output

    return tuple((rank, cell_id, one(output)) for rank, cell_id, output in items)


def _with(values: dict[str, str], data: MimeBundle) -> MimeBundle:
    """Give the data with those of the values that are equal to its own."""
    return {
        kind: values.setdefault(value, value) if isinstance(value, str) else value
        for kind, value in data.items()
    }
