"""What a notebook has not got yet: outputs, batched by time and bounded in size."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from nbdist.output.events import (
    Clear,
    Comm,
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
    Tracked,
    Update,
    Warned,
    size_of,
)
from nbdist.system.processes import trim_memory
from nbdist.wire.messages import Outputs

# --- what is kept -----------------------------------------------------------------------------

TEXT_KEPT = 4 << 20  # characters per rank that wait; older ones are only in the log file
SHOWN_KEPT = 64 << 20  # characters of figures and tables that wait; older ones are left out
OF_ITEM = 1000  # what each output counts in a batch besides its characters: small ones take time

JOINED_AT_MOST = 1 << 16

Item = tuple[int, str, Output]


class Backlog:
    """Outputs of all ranks, each rank's in order; its oldest make room for its new ones.

    Of each rank's text it keeps `text` characters, of what all have displayed `shown`.  What is
    left out is counted in its place.
    """

    def __init__(self, text: int = TEXT_KEPT, shown: int = SHOWN_KEPT) -> None:
        self._items: dict[int, list[tuple[str, Output]]] = defaultdict(list)
        self._text: Counter[int] = Counter()
        self._shown = 0
        self._most_text, self._most_shown = text, shown

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    @property
    def items(self) -> tuple[Item, ...]:
        """All of them, one rank's after the other's."""
        return tuple((rank, *each) for rank, items in self._items.items() for each in items)

    def add(self, rank: int, cell_id: str, output: Output) -> None:
        """Take one more."""
        items = self._items[rank]
        if isinstance(output, Update):
            self._forget_update(items, output.display_id)
        match output, items[-1:]:
            case Text(stream, text), [(cell, Text(before, start))] if (
                cell == cell_id and before == stream and len(start) < JOINED_AT_MOST
            ):
                items[-1] = cell_id, Text(stream, start + text)
            case _:
                items.append((cell_id, output))
        if isinstance(output, Text):
            self._text[rank] += len(output.text)
            if self._text[rank] > self._most_text:
                self._skip_older(rank)
        else:
            self._shown += size_of(output)
            if self._shown > self._most_shown:
                self._leave_out()

    def answered(self, rank: int, number: int) -> None:
        """Leave out what this rank wanted typed, by its number: it has been."""
        self._items[rank] = [
            (cell_id, output)
            for cell_id, output in self._items[rank]
            if not (isinstance(output, InputRequest) and output.number == number)
        ]

    def take(self, most: int) -> list[Item]:
        """Remove and return the oldest outputs, rank by rank: `most` characters, and one output."""
        batch: list[Item] = []
        while self._items and most > 0:
            rank = next(iter(self._items))
            items, count = self._items.pop(rank), 0
            while count < len(items) and most > 0:
                cell_id, output = items[count]
                batch.append((rank, cell_id, output))
                count += 1
                most -= OF_ITEM + size_of(output)
                if isinstance(output, Text):
                    self._text[rank] -= len(output.text)
                else:
                    self._shown -= size_of(output)
            if rest := items[count:]:  # it has its next turn after the others
                self._items[rank] = rest
        return batch

    def _forget_update(self, items: list[tuple[str, Output]], display: str) -> None:
        """Leave out the update that the next one of this display replaces."""
        for at in reversed(range(len(items))):
            match items[at][1]:
                case Update(display_id=found) as update if found == display:
                    self._shown -= size_of(update)
                    del items[at]
                    return
                case Display(display_id=found) if found == display:
                    return

    def _skip_older(self, rank: int) -> None:
        """Replace the older half of a rank's text by a note of its size."""
        too_many = self._text[rank] - self._most_text // 2
        kept: list[tuple[str, Output]] = []
        for cell_id, output in self._items[rank]:
            if isinstance(output, Text) and too_many > 0:
                cut = min(too_many, len(output.text))
                too_many -= cut
                self._text[rank] -= cut
                _append(kept, cell_id, Skipped(cut, output.text.count("\n", 0, cut)))
                if not (rest := output.text[cut:]):
                    continue
                output = Text(output.stream, rest)
            _append(kept, cell_id, output)
        self._items[rank] = kept

    def _leave_out(self) -> None:
        """Leave out what is no text of ranks that have more than their share of half the room."""
        share = self._most_shown // 2 // len(self._items)
        for rank, items in self._items.items():
            shown = sum(size_of(output) for _, output in items if not isinstance(output, Text))
            newest = {(cell_id, type(output)): at for at, (cell_id, output) in enumerate(items)}
            kept: list[tuple[str, Output]] = []
            for at, (cell_id, output) in enumerate(items):
                # How a cell failed is said by its last error, what is there by the last clearing.
                is_over = at != newest[cell_id, type(output)]
                # Without the message that opens it a widget cannot be shown at all.
                is_change = isinstance(output, Comm) and output.kind == "comm_msg"
                can_go = (
                    isinstance(output, Display | Update | Record | Moved | Tracked)
                    or is_change
                    or (is_over and isinstance(output, Failure | Clear | Warned))
                )
                if shown <= share or not can_go:
                    _append(kept, cell_id, output)
                    continue
                shown -= size_of(output)
                self._shown -= size_of(output)
                if isinstance(output, Display | Failure) or is_change:
                    _append(kept, cell_id, Skipped(0, 0, displays=1))
            self._items[rank] = kept


def _append(items: list[tuple[str, Output]], cell_id: str, output: Output) -> None:
    """Add it; what is skipped is one with what was skipped just before it."""
    match output, items[-1:]:
        case Skipped(), [(last_cell, Skipped() as last)] if last_cell == cell_id:
            items[-1] = cell_id, last + output
        case _:
            items.append((cell_id, output))


# --- what is sent -----------------------------------------------------------------------------

BATCH_SECONDS = 0.02
BATCHES_UNDER_WAY = 4  # that may be unacknowledged; then the notebook is too slow for more
ENOUGH_IN_A_BATCH = 8 << 20  # characters of a full batch: the answer to Stop waits behind these


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

    def forget(self) -> None:
        """Drop what waits: all workers have ended, and later ones are not to be taken for them."""
        self._waiting = Backlog()
        self._running.clear()

    def add(self, rank: int, cell_id: str, output: Output) -> None:
        """Take an output; ends, failures, deaths and what waits for input leave at once."""
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
    """Make equal outputs of several ranks one object, so that a pickle has it once."""
    texts: dict[Text, Text] = {}
    values: dict[str, str] = {}

    def one(output: Output) -> Output:
        match output:
            case Text():
                return texts.setdefault(output, output)
            case Display(data) | Update(data):
                shared: MimeBundle = {
                    kind: values.setdefault(value, value) if isinstance(value, str) else value
                    for kind, value in data.items()
                }
                return output._replace(data=shared)
            case _:
                return output

    return tuple((rank, cell_id, one(output)) for rank, cell_id, output in items)
