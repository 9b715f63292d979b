"""What a rank asks of the store in which groups meet, and what it is answered; all of it bytes.

A worker sends an `Operation` to its agent's socket in the runtime folder, one at a time, and reads
its `Answer`; for several machines the agent passes both on.  Where users' code runs is no
place to trust: both ends check what they read.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
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
