"""The store in which the ranks of a world meet: what is asked of it, and itself (`HostedStore`).

A worker sends an `Operation` to its agent's socket in the runtime folder, one at a time, and reads
its `Answer`; of several machines the head has the store.  Both ends check what they read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from nbdist.wire.frames import BadFrame, framed, object_from, pack

SOCKET = "store.sock"
"""Its name in the runtime folder."""

MOST_BYTES, LONGEST_WAIT = 64 << 20, 20.0
"""Of one operation or answer (addresses take some kilobytes, user code may keep more), and seconds
that one operation may wait: for longer ones a rank asks again."""


class Set(NamedTuple):
    """Store these values under these keys; answered by None."""

    values: Mapping[str, bytes]


class Get(NamedTuple):
    """Answered by the values, once all are there; by None where they do not come in time."""

    keys: tuple[str, ...]
    seconds: float


class Wait(NamedTuple):
    """Answered by whether all keys are there, at the latest after so many seconds."""

    keys: tuple[str, ...]
    seconds: float = 0.0


class Add(NamedTuple):
    """Add to the number, 0 where there is none; answered by the sum."""

    key: str
    amount: int


class CompareSet(NamedTuple):
    """Store the value `desired` where it is `expected`, or where none is there and none expected.

    Answered by the value then, where there is none by `expected`, as in torch.
    """

    key: str
    expected: bytes
    desired: bytes


class Append(NamedTuple):
    """Add bytes at the end of the value; answered by None."""

    key: str
    value: bytes


class Delete(NamedTuple):
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
    return framed(pack(said))


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


_Values = tuple[bytes, ...]


class HostedStore:
    """Answers any number of ranks at once; operations mean what they do to torch's own stores."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waits: dict[str, dict[asyncio.Future[_Values], tuple[str, ...]]] = {}

    def __repr__(self) -> str:
        waiting = {wait for waits in self._waits.values() for wait in waits}
        return f"<HostedStore {len(self._values)} keys, {len(waiting)} wait>"

    async def ask(self, operation: Operation) -> Answer:
        """Return the answer, within the time that the operation gives."""
        match operation:
            case Get(keys, seconds):
                return await self._wait_for(keys, seconds)
            case Wait(keys, seconds):
                return await self._wait_for(keys, seconds) is not None
            case Set(values):
                for key, value in values.items():
                    self._put(key, value)
            case Append(key, value):
                self._put(key, self._values.get(key, b"") + value)
            case Add(key, amount):
                before = self._values.get(key, b"0")
                try:
                    total = int(before) + amount
                except ValueError:
                    why = f"{key} holds {before[:40]!r}, to which no number can be added"
                    return Refused(why)
                self._put(key, b"%d" % total)
                return total
            case CompareSet(key, expected, desired):
                # What is not there is as empty.
                if self._values.get(key, b"") == expected:
                    self._put(key, desired)
                return self._values.get(key, expected)
            case Delete(key):
                return self._values.pop(key, None) is not None
            case Count():
                return len(self._values)
        return None

    def begin_world(self) -> None:
        """Forget all keys; the ranks of the world before have ended, and so have their waits."""
        self._values.clear()
        self._waits.clear()

    async def _wait_for(self, keys: tuple[str, ...], seconds: float) -> _Values | None:
        """Return the values once all are there; None where they do not come in time."""
        if (found := self._found(keys)) is not None or not seconds:
            return found
        wait: asyncio.Future[_Values] = asyncio.get_running_loop().create_future()
        for key in keys:
            self._waits.setdefault(key, {})[wait] = keys
        try:
            await asyncio.wait({wait}, timeout=seconds)
            return wait.result() if wait.done() else None
        finally:
            for key in keys:
                waits = self._waits.get(key, {})
                waits.pop(wait, None)
                if not waits:
                    self._waits.pop(key, None)

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for wait, keys in self._waits.get(key, {}).items():
            if not wait.done() and (found := self._found(keys)) is not None:
                wait.set_result(found)

    def _found(self, keys: tuple[str, ...]) -> _Values | None:
        """Return the values, None unless all are there."""
        if all(key in self._values for key in keys):
            return tuple(self._values[key] for key in keys)
        return None
