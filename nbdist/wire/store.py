"""The store in which the ranks of several machines meet: its operations, and the store itself.

The head has the `HostedStore`.  A worker sends one `Operation` at a time to its agent's socket in
the runtime folder; the agent checks it and asks the head.  The worker checks the `StoreReply`.  The
ranks of a world on a single machine meet in a file of torch's instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from nbdist.wire.frames import BadFrame, framed, object_from, pack

STORE_SOCKET = "store.sock"
"""The name of the agent's socket in the runtime folder."""

MAX_STORE_BYTES, MAX_STORE_WAIT = 64 << 20, 20.0
"""The bytes of one operation or answer, and the seconds that one operation may wait.

Addresses of ranks take some kilobytes; user code may store more.  For longer waits a rank asks
again.
"""


class Set(NamedTuple):
    """Store each value under its key; answered by None."""

    values: Mapping[str, bytes]


class Get(NamedTuple):
    """Wait until all keys exist; answered by their values, or by None after `seconds` seconds."""

    keys: tuple[str, ...]
    seconds: float


class Wait(NamedTuple):
    """Wait at most `seconds` seconds until all keys exist; answered by whether all exist."""

    keys: tuple[str, ...]
    seconds: float = 0.0


class Add(NamedTuple):
    """Add to the number under the key, 0 if the key is missing; answered by the sum."""

    key: str
    amount: int


class CompareSet(NamedTuple):
    """Replace the value by `desired` if it is `expected`; a missing key counts as b"".

    Answered by the value that is stored then, or by `expected` if there is none, as in torch.
    """

    key: str
    expected: bytes
    desired: bytes


class Append(NamedTuple):
    """Append bytes to the value; answered by None."""

    key: str
    value: bytes


class Delete(NamedTuple):
    """Delete the key; answered by whether it existed."""

    key: str


@dataclass(frozen=True, slots=True)
class Count:
    """Count the keys; answered by their number."""


@dataclass(frozen=True, slots=True)
class StoreRefused:
    """Answers an operation that failed; `why` is a sentence."""

    why: str


Waiting = Get | Wait
Operation = Waiting | Set | Add | CompareSet | Append | Delete | Count
StoreReply = None | bool | int | bytes | tuple[bytes, ...] | StoreRefused


def to_frame(message: Operation | StoreReply) -> bytes:
    """Pack an operation or answer as one frame of a stream."""
    return framed(pack(message))


def operation_from(frame: bytes) -> Operation:
    """Unpack a rank's operation; raises BadFrame for anything else, and for too long a wait."""
    operation: Operation = object_from(frame, Operation)
    if isinstance(operation, Get | Wait) and not 0 <= operation.seconds <= MAX_STORE_WAIT:
        raise BadFrame(f"a wait of {operation.seconds} s")
    return operation


def answer_from(frame: bytes) -> StoreReply:
    """Unpack the answer to a rank; raises BadFrame for anything else."""
    answer: StoreReply = object_from(frame, StoreReply)
    return answer


_Values = tuple[bytes, ...]


class HostedStore:
    """A store in memory whose operations mean the same as those of torch's own stores.

    Any number of operations may wait at the same time.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waits: dict[str, dict[asyncio.Future[_Values], tuple[str, ...]]] = {}

    def __repr__(self) -> str:
        waiting = {wait for waits in self._waits.values() for wait in waits}
        return f"<HostedStore {len(self._values)} keys, {len(waiting)} wait>"

    async def ask(self, operation: Operation) -> StoreReply:
        """Apply an operation and return its answer; `Get` and `Wait` wait as long as they say."""
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
                    return StoreRefused(why)
                self._put(key, b"%d" % total)
                return total
            case CompareSet(key, expected, desired):
                # As in torch, a missing key counts as an empty value.
                if self._values.get(key, b"") == expected:
                    self._put(key, desired)
                return self._values.get(key, expected)
            case Delete(key):
                return self._values.pop(key, None) is not None
            case Count():
                return len(self._values)
        return None

    def begin_world(self) -> None:
        """Delete all keys: the ranks of the previous world have ended, and so have their waits."""
        self._values.clear()
        self._waits.clear()

    async def _wait_for(self, keys: tuple[str, ...], seconds: float) -> _Values | None:
        """Return the values once all keys exist; None if one is missing after `seconds`."""
        if (values := self._found(keys)) is not None or not seconds:
            return values
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
            if not wait.done() and (values := self._found(keys)) is not None:
                wait.set_result(values)

    def _found(self, keys: tuple[str, ...]) -> _Values | None:
        """Return the values, or None if a key is missing."""
        if all(key in self._values for key in keys):
            return tuple(self._values[key] for key in keys)
        return None
