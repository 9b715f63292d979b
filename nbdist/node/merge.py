"""One order for what a worker says on two channels: text on its pipes, the rest on iopub.

Pure: bytes and messages go in, items come out in the order in which the worker said them.
"""

from __future__ import annotations

import codecs
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from nbdist.output.events import StreamName, Text
from nbdist.wire.marks import Mark, mark_pattern, mark_value

LONGEST_MARK = 80
"""Bytes; what is held back at most of a read that ends in the middle of a mark."""

LOST_AFTER = 5.0
"""Seconds after which a marked message is taken for lost, if none before it came meanwhile."""

Message = TypeVar("Message")


@dataclass(slots=True)
class _Place:
    """Where message `number` belongs, and since when it has been waited for."""

    number: int
    since: float


class Merger(Generic[Message]):
    """Puts the numbered messages of one worker where their marks are in its stdout.

    `up` and `ready` turn true when the worker says so.
    """

    def __init__(self, token: str) -> None:
        self.up = self.ready = False
        self._pattern = mark_pattern(token)
        self._start = f"\x1b_{token};".encode()
        self._queue: deque[Text | _Place] = deque()
        self._messages: dict[int, Message] = {}
        self._placed = 0  # the last number whose place is known; a worker counts them one by one
        self._awaited: set[int] = set()  # those in the queue
        self._arrived = 0.0  # when a message last had its turn
        self._rest = b""
        self._stream: StreamName = "stdout"
        self._decoders = {
            "stdout": codecs.getincrementaldecoder("utf-8")("replace"),
            "stderr": codecs.getincrementaldecoder("utf-8")("replace"),
            "pipe": codecs.getincrementaldecoder("utf-8")("replace"),
        }

    def __repr__(self) -> str:
        return f"<Merger {len(self._queue)} queued, {len(self._messages)} messages early>"

    def receive_stdout(self, data: bytes, now: float) -> None:
        """What was read from the worker's file descriptor 1."""
        pieces = self._pattern.split(self._rest + data)
        last = pieces.pop()
        cut = self._unfinished_mark(last)
        self._rest = last[cut:]
        for index, piece in enumerate(pieces):
            if index % 2:
                self._receive_mark(mark_value(piece), now)
            else:
                self._add(self._stream, self._decoders[self._stream].decode(piece))
        self._add(self._stream, self._decoders[self._stream].decode(last[:cut]))

    def receive_stderr(self, data: bytes) -> None:
        """What was read from file descriptor 2: written by C code and child processes.

        It has no order with the other pipe, so it does not wait for messages, of which one may
        be the end of the cell.
        """
        if text := self._decoders["pipe"].decode(data):
            places = (i for i, item in enumerate(self._queue) if isinstance(item, _Place))
            self._queue.insert(next(places, len(self._queue)), Text("stderr", text))

    def receive_message(self, number: int, message: Message, now: float) -> None:
        """A message that the worker has numbered; it waits for its mark.

        Where that has been read and the message was no longer waited for, it comes now.
        """
        self._messages[number] = message
        if number <= self._placed and number not in self._awaited:
            self._add_place(number, now)

    def has_placed(self, number: int) -> bool:
        """Whether the mark of this message has been read."""
        return number <= self._placed

    def place_up_to(self, number: int, now: float) -> None:
        """No more marks of messages up to this one will come: a worker can lose its stdout."""
        for lost in sorted(lost for lost in self._messages if self._placed < lost <= number):
            self._add_place(lost, now)
        self._placed = max(self._placed, number)

    def take(self, now: float) -> list[Text | Message]:
        """All items whose turn has come."""
        items: list[Text | Message] = []
        while self._queue:
            head = self._queue[0]
            if isinstance(head, Text):
                items.append(head)
            elif head.number in self._messages:
                items.append(self._messages.pop(head.number))
                self._arrived = now
            elif now - max(head.since, self._arrived) < LOST_AFTER:
                break
            self._queue.popleft()
            if isinstance(head, _Place):
                self._awaited.discard(head.number)
        return items

    @property
    def is_waiting(self) -> bool:
        """Whether a message is waited for that may have been lost."""
        return bool(self._queue)

    def take_cut_off(self) -> list[Text]:
        """What is left of characters that were cut off, once a cell has ended."""
        ends: list[Text] = []
        for name, decoder in self._decoders.items():
            if text := decoder.decode(b"", final=True):
                ends.append(Text("stdout" if name == "stdout" else "stderr", text))
        return ends

    def take_all(self) -> list[Text | Message]:
        """Everything that is left of a worker that has ended, arrived messages last."""
        self._add(self._stream, self._decoders[self._stream].decode(self._rest))
        self._rest = b""
        items: list[Text | Message] = self.take(now=float("inf"))
        items.extend(self.take_cut_off())
        items.extend(self._messages.pop(number) for number in sorted(self._messages))
        return items

    def _receive_mark(self, value: Mark, now: float) -> None:
        if value == "up":
            self.up = True
        elif value == "ready":
            self.ready = True
        elif value == "stdout" or value == "stderr":
            self._stream = value
        elif value == self._placed + 1:  # any other is none of the worker's
            self._placed = value
            self._add_place(value, now)

    def _add_place(self, number: int, now: float) -> None:
        self._awaited.add(number)
        self._queue.append(_Place(number, now))

    def _add(self, stream: StreamName, text: str) -> None:
        if text:
            self._queue.append(Text(stream, text))

    def _unfinished_mark(self, data: bytes) -> int:
        """Where a mark begins that the read has cut off; the length of `data` if none does."""
        escape = data.rfind(b"\x1b", max(0, len(data) - LONGEST_MARK))
        if escape < 0:
            return len(data)
        tail = data[escape:]
        if tail == b"\x1b":
            # Perhaps the first byte of a mark's end, perhaps of a mark.
            start = data.rfind(b"\x1b", max(0, escape - LONGEST_MARK), escape)
            if start >= 0 and data[start:].startswith(self._start):
                return start
            return escape
        if tail.startswith(self._start) or self._start.startswith(tail):
            return escape
        return len(data)
