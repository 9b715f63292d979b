"""Hands out the items of a `World.map` to ranks, and collects the results.

Runs in the notebook's process and does no I/O.  `nbdist.world.inbox` passes the ranks' requests to
`ItemQueue.answer`, and `nbdist.world.mapping` reads the results.
"""

from __future__ import annotations

import reprlib
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from nbdist.errors import NbdistError, UsageError
from nbdist.output.events import ItemOutcome, ItemsWanted
from nbdist.values.payload import (
    Payload,
    Segment,
    open_payload,
    pack_frames,
    pack_inline,
    size_of,
)
from nbdist.values.pickling import Buffer, frames_of, unpickle
from nbdist.wire.work import MAX_ITEM_BYTES, InputReply
from nbdist.words import size_text

CHUNK_SECONDS = 0.05
"""Seconds that a rank should need for the items of one answer to its request.

A request costs about a millisecond, so answers with few short items would waste time."""

CHUNK_BYTES = 4 << 20
"""An answer gets no further items once its items have this many bytes."""

GROWTH = 4
"""An answer has at most `GROWTH` times as many items as the last answer to the same rank.

The first answer to a rank has at most one item."""

CHUNKS_LEFT = 2
"""If n items are left, an answer has at most n / (`CHUNKS_LEFT` * ranks) of them, but at least one.

Without this limit, one rank could still have many items when none is left for the others.  The
limit does not apply if the number of items is not known."""

MAX_TRIES = 2
"""Once this many ranks have died with an item, no further rank gets the item."""

Packed = tuple[Payload, Segment | None]
"""A pickled item, and its shared memory, if it has any.

`ItemQueue` closes the memory when the item is done or given up, or when the queue ends."""


@dataclass(slots=True)
class _Handed:
    """The items that a rank has got and not finished, by index, and facts about its last answer."""

    items: dict[int, Packed] = field(default_factory=dict)
    since: float = 0.0  # when the rank was last given items, in monotonic seconds
    count: int = 0  # how many items it was given then


class ItemQueue:
    """The items of a `World.map`: which items ranks have, which are left, and the results.

    `results` has, by index, the results that have come from ranks.  `failures` has, by index, the
    rank and the outcome of each item for which the function raised or its result could not be sent.
    `problem` is the exception that the iterable `items` has raised, or that says which item cannot
    be pickled or which result cannot be unpickled.  Once there is a problem, no further items are
    handed out.
    """

    def __init__(
        self,
        items: Iterable[Any],
        namespace: dict[str, Any],
        *,
        returns_errors: bool,
        is_elsewhere: bool,
    ) -> None:
        """Make a queue; nothing is read from `items` yet.

        If ranks may be on other machines (`is_elsewhere`), items are sent whole in messages,
        because other machines cannot open the shared memory of this machine.
        """
        self.ranks = 1  # the number of ranks among which the items are shared
        self.is_paused = False  # while True, ranks get no items and end their task
        self.total = _length_of(items)  # the number of items, None if it is not known
        self.results: dict[int, Any] = {}
        self.failures: dict[int, tuple[int, ItemOutcome]] = {}
        self.texts: dict[int, str] = {}  # by index: short `repr` of failed and given-up items
        self.problem: Exception | None = None
        self.has_ended = False  # if True, no further items are handed out
        self.deaths = 0  # how often an item was with a rank that died
        self.gave_up: dict[int, int] = {}  # by index: the rank that died last with the item
        self._returns_errors, self._is_elsewhere = returns_errors, is_elsewhere
        self._items = enumerate(items)
        self._is_exhausted = False
        self._returned: deque[tuple[int, Packed]] = deque()  # items that were taken back from ranks
        self._tries: dict[int, int] = {}  # by index: how many ranks have died with the item
        self._names = namespace
        self._handed: dict[int, _Handed] = {}
        self._unreported: list[int] = []  # indices for `pop_new`
        self._read_count = 0  # items that were read from the iterable

    def __repr__(self) -> str:
        handed = {rank: len(each.items) for rank, each in self._handed.items()}
        return f"<ItemQueue {len(self.results)} of {self.total} done, handed out {handed}>"

    @property
    def done(self) -> int:
        """How many items have a result or an exception, or are in `gave_up`."""
        return len(self.results) + len(self.failures) + len(self.gave_up)

    @property
    def is_done(self) -> bool:
        """Whether the queue has ended, or all items were handed out and are finished.

        If an error has ended the queue, ranks may still run items.
        """
        is_held = any(each.items for each in self._handed.values())
        return self.has_ended or (self._is_exhausted and not (self._returned or is_held))

    def answer(self, rank: int, request: ItemsWanted, now: float) -> InputReply:
        """Record the outcomes that a rank has sent, and return the reply with its next items.

        The reply has no items if the queue `is_paused` or has ended, if no item is left, or if the
        rank has not finished its earlier items.
        """
        handed = self._handed.setdefault(rank, _Handed())
        for outcome in request.outcomes:
            if (packed := handed.items.pop(outcome.item, None)) is not None:
                self._record(rank, outcome, packed[0])
                _close(packed)
        if self.has_ended or self.is_paused:
            return InputReply(request.number)
        if handed.items:  # the rank has sent big results early, and goes on with its other items
            return InputReply(request.number, "")
        seconds = (now - handed.since) / max(1, handed.count)  # per item that the rank got last
        limit = max(1, min(int(CHUNK_SECONDS / max(seconds, 1e-6)), GROWTH * handed.count))
        handed.items, handed.since = dict(self._next(limit)), now
        handed.count = len(handed.items)
        items = tuple((index, payload) for index, (payload, _) in handed.items.items())
        return InputReply(request.number, "" if items else None, items=items)

    def end(self) -> None:
        """Hand out no further items, and close the shared memory of all items."""
        self.has_ended = True
        for handed in self._handed.values():
            self._returned.extend(handed.items.items())
        for _, packed in self._returned:
            _close(packed)
        self._handed, self._returned = {}, deque()

    def lose(self, ranks: Iterable[int]) -> None:
        """Take back the items of ranks that have died, to hand them out one by one.

        An item that was with two ranks that died is recorded in `gave_up`.
        """
        for rank in ranks:
            lost = self._handed.pop(rank, _Handed()).items
            self.deaths += len(lost)
            for index, packed in lost.items():
                self._tries[index] = self._tries.get(index, 0) + 1
                if self._tries[index] < MAX_TRIES:
                    self._returned.append((index, packed))
                else:
                    self.gave_up[index] = rank
                    self._describe(index, packed[0])
                    self._unreported.append(index)
                    _close(packed)

    def begin_round(self) -> None:
        """Take back all items that ranks have.

        Call this between two tasks of a map: a task can end before its ranks finish all items.
        """
        for handed in self._handed.values():
            self._returned.extend(handed.items.items())
        self._handed = {}

    def pop_new(self) -> Iterator[int]:
        """Remove and yield the indices of items that are done, in the order in which they ended."""
        while self._unreported:
            yield self._unreported.pop(0)

    def name_of(self, index: int) -> str:
        """Write `item 3 of 1,000 (17)`: an item's index from 0 on, and its `repr` if known."""
        of = f" of {self.total:,}" if self.total is not None else ""
        text = f" ({self.texts[index]})" if index in self.texts else ""
        return f"item {index:,}{of}{text}"

    def _record(self, rank: int, outcome: ItemOutcome, payload: Payload) -> None:
        index = outcome.item
        if outcome.failure is not None:
            self.failures[index] = rank, outcome
            self._describe(index, payload)
            self.has_ended |= not self._returns_errors
        else:
            try:
                assert isinstance(outcome.values, Payload)
                frames = open_payload(outcome.values)
                if outcome.values.segment is not None:
                    # Copied, since a mapping of shared memory holds a descriptor, and there can be
                    # very many results.
                    frames = [bytearray(frame) for frame in frames]
                self.results[index] = unpickle(frames, self._names)
            except Exception as problem:  # noqa: BLE001 (a user's class can raise anything)
                error = UsageError(
                    f"the result of {self.name_of(index)} could not be rebuilt in the notebook: "
                    f"{type(problem).__name__}: {problem}"
                )
                error.__cause__ = problem
                self._fail(error)
                return
        self._unreported.append(index)

    def _describe(self, index: int, payload: Payload) -> None:
        with suppress(Exception):  # a user's class can raise anything
            self.texts[index] = reprlib.repr(unpickle(open_payload(payload), self._names))

    def _next(self, limit: int) -> Iterator[tuple[int, Packed]]:
        """Yield index and pickle of at most `limit` items, or of one item that was taken back."""
        if self._returned:
            yield self._returned.popleft()
            return
        if self.total is not None:
            left = self.total - self._read_count
            limit = min(limit, max(1, left // (CHUNKS_LEFT * self.ranks)))
        size = 0
        while limit > 0 and size < CHUNK_BYTES and not self._is_exhausted:
            try:
                index, item = next(self._items)
            except StopIteration:
                self._is_exhausted = True
                return
            except Exception as problem:  # noqa: BLE001 (the iterable is the user's)
                self._fail(problem)
                return
            self._read_count += 1
            try:
                frames = self._frames_of(index, item)
                packed = (pack_inline(frames), None) if self._is_elsewhere else pack_frames(frames)
            except (NbdistError, OSError) as problem:
                self._fail(problem)
                return
            size += size_of(frames)
            limit -= 1
            yield index, packed

    def _frames_of(self, index: int, item: Any) -> list[Buffer]:
        try:
            frames = frames_of(item, self._names)
        except Exception as problem:
            raise UsageError(
                f"{self.name_of(index)} cannot be sent to a rank: "
                f"{type(problem).__name__}: {problem}"
            ) from problem
        if self._is_elsewhere and (size := size_of(frames)) > MAX_ITEM_BYTES:
            raise UsageError(
                f"{self.name_of(index)} has {size_text(size)}, and World.map sends at most "
                f"{size_text(MAX_ITEM_BYTES)} an item to other machines: let the function read it "
                "from a file, or share it with `scatter`."
            )
        return frames

    def _fail(self, problem: Exception) -> None:
        self.problem, self.has_ended = self.problem or problem, True


def _length_of(items: Iterable[Any]) -> int | None:
    """Return the number of items, None if it is not known, as for `tqdm` around a generator."""
    try:
        return len(items) if isinstance(items, Sized) else None
    except TypeError:  # raised by `__len__`; `list(items)` ignores this error, too
        return None


def _close(packed: Packed) -> None:
    _, segment = packed
    if segment is not None:
        segment.close()
