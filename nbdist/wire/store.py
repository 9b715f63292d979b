"""The store through which the ranks of several machines find each other, and its operations.

The head has the store itself (`HostedStore`).  A worker sends each `Operation` to its agent's
socket in the runtime folder.  The agent checks the operation and asks the head, and the worker
checks the `StoreReply`.  A world on a single machine has a `FileStore` of torch instead.  With the
option `--rdzv-backend`, ranks use a store of torch's rendezvous.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from nbdist.wire.frames import BadFrame, framed, object_from, pack

STORE_SOCKET = "store.sock"
"""The name, in the runtime folder, of the socket at which an agent takes operations."""

MAX_STORE_BYTES, MAX_STORE_WAIT = 64 << 20, 20.0
"""The most bytes of one operation or answer, and the most seconds that one operation waits.

Addresses of ranks take some kilobytes; user code may store more.  A rank that wants to wait longer
sends its operation again.
"""


class Set(NamedTuple):
    """Store each value in the mapping under its key; answered by None."""

    values: Mapping[str, bytes]


class Get(NamedTuple):
    """Wait until all keys exist, at most `seconds` seconds; answered by their values.

    Answered by None if a key is still missing then.
    """

    keys: tuple[str, ...]
    seconds: float


class Wait(NamedTuple):
    """Wait until all keys exist, at most `seconds` seconds; answered by whether all exist."""

    keys: tuple[str, ...]
    seconds: float = 0.0


class Add(NamedTuple):
    """Add to the number under the key; a missing key counts as 0.  Answered by the sum."""

    key: str
    amount: int


class CompareSet(NamedTuple):
    """Set the key's value to `desired` if its value is `expected`; a missing key counts as b"".

    Answered by the value that the key has afterwards.  If there is still no such key, answered by
    `expected`, as in torch.
    """

    key: str
    expected: bytes
    desired: bytes


class Append(NamedTuple):
    """Append bytes to the value under the key; a missing key counts as b"".  Answered by None."""

    key: str
    value: bytes


class Delete(NamedTuple):
    """Delete the key; answered by True if the key existed."""

    key: str


@dataclass(frozen=True, slots=True)
class Count:
    """Count the keys; answered by their number."""


@dataclass(frozen=True, slots=True)
class StoreRefused:
    """The answer to an operation that failed; `why` gives the reason in words."""

    why: str


Waiting = Get | Wait
Operation = Waiting | Set | Add | CompareSet | Append | Delete | Count
StoreReply = None | bool | int | bytes | tuple[bytes, ...] | StoreRefused


def to_frame(message: Operation | StoreReply) -> bytes:
    """Pack an operation or answer as one frame of a stream."""
    return framed(pack(message))


def operation_from(frame: bytes) -> Operation:
    """Return a rank's operation from a frame; raises BadFrame for other objects and long waits."""
    operation: Operation = object_from(frame, Operation)
    if isinstance(operation, Get | Wait) and not 0 <= operation.seconds <= MAX_STORE_WAIT:
        raise BadFrame(f"a wait of {operation.seconds} s")
    return operation


def answer_from(frame: bytes) -> StoreReply:
    """Return the store's answer from its frame; raises BadFrame if the frame is no answer."""
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
        """Apply an operation and return the answer; `Get` and `Wait` wait for at most `seconds`."""
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
        """Delete all keys and forget all waits; called before the ranks of a new world start."""
        self._values.clear()
        self._waits.clear()

    async def _wait_for(self, keys: tuple[str, ...], seconds: float) -> _Values | None:
        """Wait until all keys exist; return their values, or None after `seconds` seconds."""
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
        """Return the values of `keys`, or None if a key is missing."""
        if all(key in self._values for key in keys):
            return tuple(self._values[key] for key in keys)
        return None
