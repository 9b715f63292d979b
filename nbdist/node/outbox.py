"""What ranks have shown and the notebook has not got yet: batched by time, bounded in size."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from nbdist.output.events import (
    Died,
    Display,
    Done,
    Failure,
    InputRequest,
    Output,
    Skipped,
    Text,
    Update,
)
from nbdist.wire.messages import Outputs

BATCH_SECONDS = 0.02
BATCHES_UNDER_WAY = 4
"""Batches that may be unacknowledged; beyond them the notebook is too slow for more."""

TEXT_KEPT = 4 << 20
"""Characters per rank that wait for a slow notebook; older ones are only in the log file."""

JOINED_AT_MOST = 1 << 16

ENOUGH_IN_A_BATCH = 8 << 20
"""Characters after which a batch is full: the answer to Stop waits behind those under way."""

Item = tuple[int, str, Output]


class Outbox:
    """Collects outputs of all ranks and sends them in batches, each rank's in order."""

    def __init__(self, send: Callable[[Outputs], None]) -> None:
        self._send = send
        self._items: list[Item] = []
        self._characters: dict[int, int] = {}
        self._running: set[int] = set()
        self._under_way = 0
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Outbox {len(self._items)} items, {self._under_way} batches under way>"

    def begin(self, ranks: Iterable[int]) -> None:
        """Note that these ranks run a cell from now on."""
        self._running.update(ranks)

    def add(self, rank: int, cell_id: str, output: Output) -> None:
        """Take an output; some leave at once.

        Failures, deaths, the last rank's end of a cell, and what a rank waits for.
        """
        if isinstance(output, Done | Died):
            self._running.discard(rank)
        if isinstance(output, Text):
            self._add_text(rank, cell_id, output)
        else:
            if isinstance(output, Update):
                self._drop_older(rank, output)
            self._items.append((rank, cell_id, output))
        is_end = isinstance(output, Done) and not self._running
        at_once = is_end or isinstance(output, Died | Failure | InputRequest)
        self._schedule(0.0 if at_once else BATCH_SECONDS)

    def acknowledge(self) -> None:
        """Note that the notebook has taken in one batch."""
        self._under_way -= 1
        if self._items:
            self._schedule(0.0)

    def _add_text(self, rank: int, cell_id: str, output: Text) -> None:
        last = self._items[-1] if self._items else None
        match last:
            case (last_rank, last_cell, Text(stream, text)) if (last_rank, last_cell, stream) == (
                rank,
                cell_id,
                output.stream,
            ) and len(text) < JOINED_AT_MOST:
                self._items[-1] = rank, cell_id, Text(stream, text + output.text)
            case _:
                self._items.append((rank, cell_id, output))
        self._count(rank, len(output.text))

    def _count(self, rank: int, characters: int) -> None:
        self._characters[rank] = self._characters.get(rank, 0) + characters
        if self._characters[rank] > TEXT_KEPT:
            self._skip_older(rank)

    def _skip_older(self, rank: int) -> None:
        """Replace the older half of what waits for a rank by a note of its size."""
        too_many = self._characters[rank] - TEXT_KEPT // 2
        kept: list[Item] = []
        for item in self._items:
            item_rank, cell_id, output = item
            if item_rank == rank and isinstance(output, Text) and too_many > 0:
                cut = min(too_many, len(output.text))
                too_many -= cut
                self._characters[rank] -= cut
                skipped = Skipped(output.stream, cut, output.text.count("\n", 0, cut))
                kept.append((rank, cell_id, skipped))
                if output.text[cut:]:
                    kept.append((rank, cell_id, Text(output.stream, output.text[cut:])))
            else:
                kept.append(item)
        self._items = kept

    def _drop_older(self, rank: int, update: Update) -> None:
        """Keep of several updates of one display only the last, the only one to be seen."""
        self._items = [
            (item_rank, cell_id, output)
            for item_rank, cell_id, output in self._items
            if not (
                item_rank == rank
                and isinstance(output, Update)
                and output.display_id == update.display_id
            )
        ]

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
        if self._items:
            items = self._next_batch()
            self._under_way += 1
            self._send(Outputs(tuple(items)))
            if self._items:
                self._schedule(0.0)

    def _next_batch(self) -> list[Item]:
        """Take the oldest items, as many as other messages may have to wait for."""
        count = size = 0
        while count < len(self._items) and size < ENOUGH_IN_A_BATCH:
            size += _size(self._items[count][2])
            count += 1
        batch, self._items = self._items[:count], self._items[count:]
        self._characters.clear()
        for rank, _, output in self._items:
            if isinstance(output, Text):
                self._characters[rank] = self._characters.get(rank, 0) + len(output.text)
        return batch


def _size(output: Output) -> int:
    """Count characters, of what can have many."""
    match output:
        case Text(text=text):
            return len(text)
        case Display(data=data) | Update(data=data):
            return sum(len(said) for said in data.values() if isinstance(said, str))
        case _:
            return 0
