"""The queue of worker outputs that an agent has yet to send to its notebook or head.

The agent's `Outbox` sends the queue in batches and stops while too many batches are
unacknowledged.  `WorldRecord`, in an agent or a head, uses the same `Backlog` to replay a task's
outputs to the next notebook.
"""

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

# --- the backlog ------------------------------------------------------------------------------

TEXT_KEPT = 4 << 20  # characters of pending text per rank; older text is only in the log file
SHOWN_KEPT = 64 << 20  # characters of all other pending output; older figures are dropped
OF_ITEM = 1000  # characters that each output counts more in a batch: small outputs take time, too

JOINED_AT_MOST = 1 << 16  # characters of an output to which later text of the rank is appended

Item = tuple[int, str, Output]
"""Rank, task id, output."""


class Backlog:
    """The pending outputs of all ranks, in order within each rank.

    If the text of a rank exceeds `text` characters, or all other output of all ranks together
    exceeds `shown` characters, the oldest output is dropped.  A `Skipped` in its place counts the
    dropped text, displays, errors and messages of widgets.
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
        """All pending outputs, grouped by rank."""
        return tuple((rank, *each) for rank, items in self._items.items() for each in items)

    def add(self, rank: int, cell_id: str, output: Output) -> None:
        """Append an output, then drop older outputs if a limit is exceeded."""
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
        """Remove the input request of this number, which has been answered."""
        self._items[rank] = [
            (cell_id, output)
            for cell_id, output in self._items[rank]
            if not (isinstance(output, InputRequest) and output.number == number)
        ]

    def take(self, most: int) -> list[Item]:
        """Remove and return the oldest outputs, rank by rank, until they have `most` characters.

        The last output may exceed `most`, so the batch is only empty if the backlog is.
        """
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
            if rest := items[count:]:  # at the end of the dict, so that the other ranks come first
                self._items[rank] = rest
        return batch

    def _forget_update(self, items: list[tuple[str, Output]], display: str) -> None:
        """Remove the pending update of a display that is about to get a newer update."""
        for at in reversed(range(len(items))):
            match items[at][1]:
                case Update(display_id=found) as update if found == display:
                    self._shown -= size_of(update)
                    del items[at]
                    return
                case Display(display_id=found) if found == display:
                    return

    def _skip_older(self, rank: int) -> None:
        """Replace the oldest text of a rank by `Skipped`, down to half of the limit."""
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
        """Drop the oldest non-text output of each rank that exceeds its share of half the limit."""
        share = self._most_shown // 2 // len(self._items)
        for rank, items in self._items.items():
            shown = sum(size_of(output) for _, output in items if not isinstance(output, Text))
            newest = {(cell_id, type(output)): at for at, (cell_id, output) in enumerate(items)}
            kept: list[tuple[str, Output]] = []
            for at, (cell_id, output) in enumerate(items):
                # The last error of a cell says how it failed; the last `Clear` hides all before it.
                is_over = at != newest[cell_id, type(output)]
                # A `comm_open` stays: without it the page cannot show the widget at all.
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
    """Append an output; two consecutive `Skipped` of a cell become one."""
    match output, items[-1:]:
        case Skipped(), [(last_cell, Skipped() as last)] if last_cell == cell_id:
            items[-1] = cell_id, last + output
        case _:
            items.append((cell_id, output))


# --- sending ----------------------------------------------------------------------------------

BATCH_SECONDS = 0.02  # how long an output that is not urgent waits for others
BATCHES_UNDER_WAY = 4  # unacknowledged batches; with so many, outputs wait in the backlog
ENOUGH_IN_A_BATCH = 8 << 20  # characters; the answer to Stop waits behind the batches in flight


class Outbox:
    """Sends the outputs of all ranks in batches, in order within each rank.

    While `BATCHES_UNDER_WAY` batches are unacknowledged, outputs wait in a `Backlog`.
    """

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
        """Record that these ranks run a task: the `Done` of the last rank is sent immediately."""
        self._running.update(ranks)

    def forget(self) -> None:
        """Drop all pending output.

        The agent calls this after all workers have exited, because the next workers get the same
        rank numbers.
        """
        self._waiting = Backlog()
        self._running.clear()

    def add(self, rank: int, cell_id: str, output: Output) -> None:
        """Queue an output.

        Failures, deaths, input requests and the last `Done` of the running ranks are sent
        immediately, with all that is pending; other outputs within `BATCH_SECONDS`.
        """
        if isinstance(output, Done | Died):
            self._running.discard(rank)
        self._waiting.add(rank, cell_id, output)
        is_end = isinstance(output, Done) and not self._running
        at_once = is_end or isinstance(output, Died | Failure | InputRequest)
        self._schedule(0.0 if at_once else BATCH_SECONDS)

    def acknowledge(self) -> None:
        """Record that the notebook has processed a batch, and send pending output.

        After a large backlog has been sent, return its memory to the machine.
        """
        self._under_way -= 1
        if self._waiting:
            self._schedule(0.0)
        elif self._was_full and not self._under_way:
            self._was_full = False
            trim_memory()

    def _schedule(self, delay: float) -> None:
        if self._under_way >= BATCHES_UNDER_WAY:
            return  # `acknowledge` schedules the next batch
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
    """Replace equal texts and equal display data by one object, so that a pickle has it once."""
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
