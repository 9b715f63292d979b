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
    DisplayUpdate,
    Done,
    Failure,
    InputRequest,
    ItemsWanted,
    MimeBundle,
    Output,
    Record,
    Skipped,
    Text,
    Tracked,
    TransferProgress,
    Warned,
    size_of,
)
from nbdist.system.processes import trim_memory
from nbdist.wire.messages import Outputs, RankOutput

# --- the backlog ------------------------------------------------------------------------------

TEXT_KEPT = 4 << 20  # characters of pending text per rank; older text is dropped
SHOWN_KEPT = 64 << 20  # characters of all ranks' pending output that is no text
OF_ITEM = 1000  # characters that each output counts in addition, since small ones take time, too

JOINED_AT_MOST = 1 << 16  # characters; a text of this length is not extended by later text


class Backlog:
    """The outputs of all ranks that wait to be sent, in order within each rank.

    If the text of a rank exceeds `max_text` characters, its oldest text is dropped.  If all other
    outputs of all ranks together exceed `max_other` characters, old ones are dropped, except some
    such as a cell's last error.  A `Skipped` in place of dropped outputs counts their text,
    displays, errors and widget messages.
    """

    def __init__(self, max_text: int = TEXT_KEPT, max_other: int = SHOWN_KEPT) -> None:
        self._queues: dict[int, list[tuple[str, Output]]] = defaultdict(list)
        self._text_size: Counter[int] = Counter()
        self._other_size = 0
        self._max_text, self._max_other = max_text, max_other

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    def items(self) -> tuple[RankOutput, ...]:
        """All pending outputs, grouped by rank."""
        return tuple((rank, *each) for rank, items in self._queues.items() for each in items)

    def add(self, rank: int, cell_id: str, output: Output) -> None:
        """Append an output, then drop the oldest outputs if a limit is exceeded.

        An update of a display replaces a pending update of the same display.  A text is joined to
        the text before it if both are of the same cell and stream, unless the earlier text is long.
        """
        queue = self._queues[rank]
        if isinstance(output, DisplayUpdate):
            self._drop_pending_update(queue, output.display_id)
        match output, queue[-1:]:
            case Text(stream, text), [(last_cell, Text(last_stream, last_text))] if (
                last_cell == cell_id and last_stream == stream and len(last_text) < JOINED_AT_MOST
            ):
                queue[-1] = cell_id, Text(stream, last_text + text)
            case _:
                queue.append((cell_id, output))
        if isinstance(output, Text):
            self._text_size[rank] += len(output.text)
            if self._text_size[rank] > self._max_text:
                self._drop_older_text(rank)
        else:
            self._other_size += size_of(output)
            if self._other_size > self._max_other:
                self._drop_other_output()

    def discard_input_request(self, rank: int, number: int) -> None:
        """Remove a rank's `InputRequest` or `ItemsWanted` with this number, which was answered."""
        self._queues[rank] = [
            (cell_id, output)
            for cell_id, output in self._queues[rank]
            if not (isinstance(output, InputRequest | ItemsWanted) and output.number == number)
        ]

    def pop_batch(self, size: int) -> list[RankOutput]:
        """Remove and return the oldest outputs, rank by rank, until they have `size` characters.

        The last output may exceed `size`, so the batch is empty only if the backlog is empty.
        """
        batch: list[RankOutput] = []
        while self._queues and size > 0:
            rank = next(iter(self._queues))
            queue, count = self._queues.pop(rank), 0
            while count < len(queue) and size > 0:
                cell_id, output = queue[count]
                batch.append((rank, cell_id, output))
                count += 1
                size -= OF_ITEM + size_of(output)
                if isinstance(output, Text):
                    self._text_size[rank] -= len(output.text)
                else:
                    self._other_size -= size_of(output)
            if remaining := queue[count:]:  # put it last, so that all other ranks come first
                self._queues[rank] = remaining
        return batch

    def _drop_pending_update(self, queue: list[tuple[str, Output]], display: str) -> None:
        """Remove the pending update of a display, because a newer update is about to be added.

        `display` is the id of the display.  An update before its latest `Display` stays.
        """
        for index in reversed(range(len(queue))):
            match queue[index][1]:
                case DisplayUpdate(display_id=other) as update if other == display:
                    self._other_size -= size_of(update)
                    del queue[index]
                    return
                case Display(display_id=other) if other == display:
                    return

    def _drop_older_text(self, rank: int) -> None:
        """Replace the oldest text of a rank by `Skipped`, until half of the limit is left."""
        excess = self._text_size[rank] - self._max_text // 2
        kept: list[tuple[str, Output]] = []
        for cell_id, output in self._queues[rank]:
            if isinstance(output, Text) and excess > 0:
                cut = min(excess, len(output.text))
                excess -= cut
                self._text_size[rank] -= cut
                _append(kept, cell_id, Skipped(cut, output.text.count("\n", 0, cut)))
                if not (remaining := output.text[cut:]):
                    continue
                output = Text(output.stream, remaining)
            _append(kept, cell_id, output)
        self._queues[rank] = kept

    def _drop_other_output(self) -> None:
        """Drop the oldest outputs that are no text, to shorten them to half of their limit.

        Each rank may keep an equal share of this half.  Some outputs are always kept, for example
        the last error of a cell, so that a rank can keep more than its share.
        """
        share = self._max_other // 2 // len(self._queues)
        for rank, queue in self._queues.items():
            size = sum(size_of(output) for _, output in queue if not isinstance(output, Text))
            newest = {(cell_id, type(output)): i for i, (cell_id, output) in enumerate(queue)}
            kept: list[tuple[str, Output]] = []
            for index, (cell_id, output) in enumerate(queue):
                # The last error of a cell says how it failed; the last `Clear` hides all before it.
                is_superseded = index != newest[cell_id, type(output)]
                # A `comm_open` stays: a page cannot show a widget that was not opened.
                is_comm_message = isinstance(output, Comm) and output.kind == "comm_msg"
                is_droppable = (
                    isinstance(
                        output, Display | DisplayUpdate | Record | TransferProgress | Tracked
                    )
                    or is_comm_message
                    or (is_superseded and isinstance(output, Failure | Clear | Warned))
                )
                if size <= share or not is_droppable:
                    _append(kept, cell_id, output)
                    continue
                size -= size_of(output)
                self._other_size -= size_of(output)
                if isinstance(output, Display | Failure) or is_comm_message:
                    _append(kept, cell_id, Skipped(0, 0, displays=1))
            self._queues[rank] = kept


def _append(queue: list[tuple[str, Output]], cell_id: str, output: Output) -> None:
    """Append an output of a cell; two consecutive `Skipped` of the cell become one."""
    match output, queue[-1:]:
        case Skipped(), [(last_cell, Skipped() as last)] if last_cell == cell_id:
            queue[-1] = cell_id, last + output
        case _:
            queue.append((cell_id, output))


# --- sending ----------------------------------------------------------------------------------

BATCH_SECONDS = 0.02  # seconds that an output waits, to be sent in one batch with others
BATCHES_UNDER_WAY = 4  # unacknowledged batches; with this many, outputs wait in the backlog
ENOUGH_IN_A_BATCH = 8 << 20  # characters; the answer to Stop would wait long behind a larger batch


class Outbox:
    """Sends the outputs of all ranks in batches, in order within each rank.

    While `BATCHES_UNDER_WAY` batches are unacknowledged, outputs wait in a `Backlog`.
    """

    def __init__(self, send: Callable[[Outputs], None]) -> None:
        self._send = send
        self._backlog = Backlog()
        self._running: dict[int, str] = {}  # by rank: the task that the rank runs
        self._in_flight = 0
        self._must_trim = False
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Outbox {len(self._backlog)} items, {self._in_flight} batches under way>"

    def mark_running(self, task_id: str, ranks: Iterable[int]) -> None:
        """Record that `ranks` run a task, so that `add` sends the last rank's `Done` at once."""
        self._running.update(dict.fromkeys(ranks, task_id))

    def clear(self) -> None:
        """Drop all pending outputs.

        The agent calls this after all workers have exited, so that no output of an old worker is
        taken for an output of a new worker with the same rank.
        """
        self._backlog = Backlog()
        self._running.clear()

    def add(self, rank: int, cell_id: str, output: Output) -> None:
        """Queue an output.

        Failures, deaths, input requests and the last `Done` of a task are sent at once, other
        outputs within `BATCH_SECONDS`, unless too many batches are unacknowledged.
        """
        if isinstance(output, Done | Died):
            self._running.pop(rank, None)
        self._backlog.add(rank, cell_id, output)
        is_last_done = isinstance(output, Done) and cell_id not in self._running.values()
        is_urgent = is_last_done or isinstance(output, Died | Failure | InputRequest | ItemsWanted)
        self._schedule_flush(0.0 if is_urgent else BATCH_SECONDS)

    def acknowledge(self) -> None:
        """Record that the notebook has processed a batch, and send pending outputs.

        When all outputs of a large backlog are acknowledged, this process returns their memory to
        Linux.
        """
        self._in_flight -= 1
        if self._backlog:
            self._schedule_flush(0.0)
        elif self._must_trim and not self._in_flight:
            self._must_trim = False
            trim_memory()

    def _schedule_flush(self, delay: float) -> None:
        if self._in_flight >= BATCHES_UNDER_WAY:
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
        if self._backlog:
            batch = self._backlog.pop_batch(ENOUGH_IN_A_BATCH)
            self._in_flight += 1
            self._send(Outputs(deduplicated(batch)))
            if self._backlog:
                self._must_trim = True
                self._schedule_flush(0.0)


def deduplicated(items: Iterable[RankOutput]) -> tuple[RankOutput, ...]:
    """Return the outputs, in which equal texts and equal strings of displays are the same object.

    `pickle` writes such an object only once.
    """
    texts: dict[Text, Text] = {}
    values: dict[str, str] = {}

    def share(output: Output) -> Output:
        match output:
            case Text():
                return texts.setdefault(output, output)
            case Display(data) | DisplayUpdate(data):
                shared: MimeBundle = {
                    kind: values.setdefault(value, value) if isinstance(value, str) else value
                    for kind, value in data.items()
                }
                return output._replace(data=shared)
            case _:
                return output

    return tuple((rank, cell_id, share(output)) for rank, cell_id, output in items)
