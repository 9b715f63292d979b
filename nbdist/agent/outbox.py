"""What ranks have shown and the notebook has not got yet: batched by time, bounded in size."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace

from nbdist.output.events import (
    Clear,
    Died,
    Display,
    Done,
    Failure,
    InputRequest,
    MimeBundle,
    Moved,
    Output,
    Record,
    Skipped,
    Text,
    Update,
    size_of,
)
from nbdist.system.processes import trim_memory
from nbdist.wire.messages import Outputs

# --- what is kept -----------------------------------------------------------------------------


TEXT_KEPT = 4 << 20
"""Characters per rank that wait for a slow notebook; older ones are only in the log file."""

SHOWN_KEPT = 64 << 20
"""Characters of figures and tables of all ranks that wait for it; older ones are left out."""

OF_ITEM = 1000
"""Characters that each output counts for in a batch besides its own: small ones take time too."""

JOINED_AT_MOST = 1 << 16

Item = tuple[int, str, Output]


class Backlog:
    """Outputs of all ranks, each rank's in order; the oldest make room for new ones.

    Of each rank's text it keeps `text`, of what was displayed `shown` characters.  What is left
    out is counted in its place.  With `is_long` it is for hours: a rank's text is joined,
    whatever others have said meanwhile.
    """

    def __init__(
        self, text: int = TEXT_KEPT, shown: int = SHOWN_KEPT, *, is_long: bool = False
    ) -> None:
        self._items: list[Item] = []
        self._last: dict[int, int] = {}  # where each rank's last item is
        self._updated: set[tuple[int, str]] = set()  # displays of which there are updates
        self._is_long = is_long
        self._characters: dict[int, int] = {}
        self._most_text, self._most_shown = text, shown
        self._shown = 0

    def __repr__(self) -> str:
        return f"<Backlog of {len(self._items)} items>"

    def __len__(self) -> int:
        return len(self._items)

    @property
    def items(self) -> tuple[Item, ...]:
        """All of them, the oldest first."""
        return tuple(self._items)

    def add(self, rank: int, cell_id: str, output: Output) -> None:
        """Take one more."""
        match output:
            case Text():
                self._add_text(rank, cell_id, output)
                return
            case Update():
                self._drop_older(rank, output)
        self._append(rank, cell_id, output)
        self._shown += size_of(output)
        if self._shown > self._most_shown:
            self._leave_out()

    def answered(self, rank: int, number: int) -> None:
        """Leave out what this rank wanted typed, by its number: it has been."""
        self._keep(
            item
            for item in self._items
            if not (
                item[0] == rank and isinstance(item[2], InputRequest) and item[2].number == number
            )
        )

    def take(self, most: int) -> list[Item]:
        """Take the oldest away, of so many characters, and those of the one that exceeds it."""
        count = size = 0
        while count < len(self._items) and size < most:
            size += OF_ITEM + size_of(self._items[count][2])
            count += 1
        batch = self._items[:count]
        del self._items[:count]  # what is left may be very many, and is not looked at
        self._last = {rank: at - count for rank, at in self._last.items() if at >= count}
        for rank, _, output in batch:
            if isinstance(output, Text):
                self._characters[rank] -= len(output.text)
                continue
            self._shown -= size_of(output)
            if isinstance(output, Update):
                self._updated.discard((rank, output.display_id))
        return batch

    def _size_shown(self) -> int:
        return sum(size_of(output) for _, _, output in self._items if not isinstance(output, Text))

    def _append(self, rank: int, cell_id: str, output: Output) -> None:
        """Add it; what is skipped is one with what was skipped before it."""
        if isinstance(output, Skipped) and (at := self._last.get(rank)) is not None:
            _, last_cell, last = self._items[at]
            if isinstance(last, Skipped) and last_cell == cell_id:
                self._items[at] = rank, cell_id, last + output
                return
        if isinstance(output, Update):
            self._updated.add((rank, output.display_id))
        self._last[rank] = len(self._items)
        self._items.append((rank, cell_id, output))

    def _keep(self, items: Iterable[Item]) -> None:
        kept = [*items]
        self._items, self._last, self._updated = [], {}, set()
        for item in kept:
            self._append(*item)

    def _add_text(self, rank: int, cell_id: str, output: Text) -> None:
        at = self._last.get(rank, -1) if self._is_long else len(self._items) - 1
        match self._items[at] if at >= 0 else None:
            case (last_rank, last_cell, Text(stream, text)) if (last_rank, last_cell, stream) == (
                rank,
                cell_id,
                output.stream,
            ) and len(text) < JOINED_AT_MOST:
                self._items[at] = rank, cell_id, Text(stream, text + output.text)
            case _:
                self._append(rank, cell_id, output)
        self._characters[rank] = self._characters.get(rank, 0) + len(output.text)
        if self._characters[rank] > self._most_text:
            self._skip_older(rank)

    def _skip_older(self, rank: int) -> None:
        """Replace the older half of a rank's text by a note of its size."""
        too_many = self._characters[rank] - self._most_text // 2
        kept: list[Item] = []
        for item in self._items:
            item_rank, cell_id, output = item
            if item_rank == rank and isinstance(output, Text) and too_many > 0:
                cut = min(too_many, len(output.text))
                too_many -= cut
                self._characters[rank] -= cut
                lines = output.text.count("\n", 0, cut)
                kept.append((rank, cell_id, Skipped(cut, lines)))
                if output.text[cut:]:
                    kept.append((rank, cell_id, Text(output.stream, output.text[cut:])))
            else:
                kept.append(item)
        self._keep(kept)

    def _drop_older(self, rank: int, update: Update) -> None:
        """Keep of several updates of one display only the last, the only one to be seen."""
        if (rank, update.display_id) not in self._updated:  # there may be many items to look at
            return
        self._keep(
            item
            for item in self._items
            if not (
                item[0] == rank
                and isinstance(item[2], Update)
                and item[2].display_id == update.display_id
            )
        )

    def _leave_out(self) -> None:
        """Leave out the older half of what is no text, where it is still too much."""
        self._shown = self._size_shown()  # of updates only the last are there
        most = self._most_shown if self._shown <= self._most_shown else self._most_shown // 2
        newest = {(item[0], item[1], type(item[2])): at for at, item in enumerate(self._items)}
        kept: list[Item] = []
        for at, (rank, cell_id, output) in enumerate(self._items):
            # How a cell failed is said by its last error, and what is there by the last clearing.
            is_over = at != newest[rank, cell_id, type(output)]
            can_go = isinstance(output, Display | Update | Record | Moved) or (
                is_over and isinstance(output, Failure | Clear)
            )
            if self._shown <= most or not can_go:
                kept.append((rank, cell_id, output))
                continue
            self._shown -= size_of(output)
            if isinstance(output, Display | Failure):
                kept.append((rank, cell_id, Skipped(0, 0, displays=1)))
        self._keep(kept)


# --- what is sent -----------------------------------------------------------------------------


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
        self._was_full = False
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
        """Note that the notebook has taken in one batch; after a flood give memory back."""
        self._under_way -= 1
        if self._waiting:
            self._schedule(0.0)
        elif self._was_full and not self._under_way:
            self._was_full = False
            trim_memory()

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
                self._was_full = True
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
