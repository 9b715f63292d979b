"""The store in which the ranks of a world meet: what is asked of it, all of it bytes, and itself.

A worker sends an `Operation` to its agent's socket in the runtime folder, one at a time, and reads
its `Answer`; for several machines the agent passes both on.  Where users' code runs is no
place to trust: both ends check what they read.  `HostedStore` is kept by whoever all ranks can ask:
the head, or an agent.  Nothing of it is on a disk.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

from nbdist.wire.frames import BadFrame, framed, object_from

SOCKET = "store.sock"
"""Its name in the runtime folder."""

MOST_BYTES = 64 << 20
"""Of one operation or answer: addresses and names take some kilobytes, user code may keep more."""

LONGEST_WAIT = 20.0
"""Seconds that one operation may wait; who waits longer asks again."""


@dataclass(frozen=True, slots=True)
class Set:
    """Have these values under these keys; answered by None."""

    values: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Get:
    """Answered by the values, once all are there; by None where they do not come in time."""

    keys: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Answered by whether all keys are there, at the latest after so many seconds."""

    keys: tuple[str, ...]
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Add:
    """Add to the number, 0 where there is none; answered by the sum."""

    key: str
    amount: int


@dataclass(frozen=True, slots=True)
class CompareSet:
    """Have the value `desired` where it is `expected`, or where none is there and none expected.

    Answered by the value that is there then, and where there is none by `expected`: as torch
    has it.
    """

    key: str
    expected: bytes
    desired: bytes


@dataclass(frozen=True, slots=True)
class Append:
    """Have more bytes at the end of the value; answered by None."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Delete:
    """Answered by whether it was there."""

    key: str


@dataclass(frozen=True, slots=True)
class Count:
    """Answered by how many keys there are."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Instead of an answer: why there can be none, a sentence."""

    why: str


Waiting = Get | Wait
Operation = Waiting | Set | Add | CompareSet | Append | Delete | Count
Answer = None | bool | int | bytes | tuple[bytes, ...] | Refused


def to_frame(said: Operation | Answer) -> bytes:
    """Pack it as one frame of a stream."""
    return framed(pickle.dumps(said, protocol=5))


def operation_from(frame: bytes) -> Operation:
    """Return what a rank asks for; raises BadFrame."""
    operation: Operation = object_from(frame, Operation)
    if isinstance(operation, Get | Wait) and not 0 <= operation.seconds <= LONGEST_WAIT:
        raise BadFrame(f"a wait of {operation.seconds} s")
    return operation


def answer_from(frame: bytes) -> Answer:
    """Return what a rank is answered; raises BadFrame."""
    answer: Answer = object_from(frame, Answer)
    return answer


# --- the store itself -------------------------------------------------------------------------


class KeyValues:
    """What torch's stores mean by their operations, without any clock, thread or socket.

    As TCPStore and FileStore have it, where the two agree.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waits: dict[Hashable, Waiting] = {}
        self._missing: dict[Hashable, set[str]] = {}
        self._waiting_for: dict[str, dict[Hashable, None]] = {}

    def __repr__(self) -> str:
        return f"<KeyValues {len(self._values)} keys, {len(self._waits)} wait>"

    def take(self, asker: Hashable, operation: Operation) -> Iterator[tuple[Hashable, Answer]]:
        """Do it, and yield who is to be answered by what: mostly the one who asks.

        It is not among them while its keys are missing; then `give_up` ends its wait.
        """
        match operation:
            case Get() | Wait():
                self._waits[asker] = operation
                yield from self._look_again(asker)
                if asker in self._waits and not operation.seconds:
                    yield asker, self.give_up(asker)
            case Set(values):
                yield asker, None
                for key, value in values.items():
                    yield from self._put(key, value)
            case Append(key, value):
                yield asker, None
                yield from self._put(key, self._values.get(key, b"") + value)
            case Add(key, amount):
                yield from self._add(asker, key, amount)
            case CompareSet(key, expected, desired):
                # What is not there is as empty.
                if self._values.get(key, b"") == expected:
                    yield from self._put(key, desired)
                yield asker, self._values.get(key, expected)
            case Delete(key):
                yield asker, self._values.pop(key, None) is not None
            case Count():
                yield asker, len(self._values)

    def give_up(self, asker: Hashable) -> Answer:
        """End its wait, and return what it is answered when the keys have not come."""
        for key in self._missing.pop(asker, ()):
            askers = self._waiting_for[key]
            del askers[asker]
            if not askers:
                del self._waiting_for[key]
        return False if isinstance(self._waits.pop(asker, None), Wait) else None

    def _add(self, asker: Hashable, key: str, amount: int) -> Iterator[tuple[Hashable, Answer]]:
        before = self._values.get(key, b"0")
        try:
            total = int(before) + amount
        except ValueError:
            yield asker, Refused(f"{key} holds {before[:40]!r}, to which no number can be added")
            return
        yield asker, total
        yield from self._put(key, b"%d" % total)

    def _put(self, key: str, value: bytes) -> Iterator[tuple[Hashable, Answer]]:
        self._values[key] = value
        for asker in self._waiting_for.pop(key, {}):
            missing = self._missing[asker]
            missing.discard(key)
            if not missing:
                yield from self._look_again(asker)

    def _look_again(self, asker: Hashable) -> Iterator[tuple[Hashable, Answer]]:
        """Answer a wait whose keys are all there; what was there may have been deleted again."""
        wait = self._waits[asker]
        missing = {key for key in wait.keys if key not in self._values}
        if not missing:
            self.give_up(asker)
            is_get = isinstance(wait, Get)
            yield asker, tuple(self._values[key] for key in wait.keys) if is_get else True
            return
        self._missing[asker] = missing
        for key in missing:
            self._waiting_for.setdefault(key, {})[asker] = None


class HostedStore:
    """Answers any number of ranks at once, on an event loop, each within the time that it gave."""

    def __init__(self) -> None:
        self._key_values = KeyValues()
        self._asked: dict[Hashable, asyncio.Future[Answer]] = {}

    def __repr__(self) -> str:
        return f"<HostedStore {self._key_values}>"

    async def ask(self, operation: Operation) -> Answer:
        """Return the answer; who does not want it any more cancels."""
        loop, asker = asyncio.get_running_loop(), object()
        answer = self._asked[asker] = loop.create_future()
        try:
            for who, what in self._key_values.take(asker, operation):
                self._asked[who].set_result(what)
            if not answer.done() and isinstance(operation, Get | Wait):
                await asyncio.wait({answer}, timeout=operation.seconds)
            return answer.result() if answer.done() else self._key_values.give_up(asker)
        finally:
            self._key_values.give_up(asker)
            del self._asked[asker]

    def begin_world(self) -> None:
        """Forget all keys; the ranks of the world before have ended, and so have their waits."""
        self._key_values = KeyValues()
