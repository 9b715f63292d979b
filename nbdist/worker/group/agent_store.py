"""The store in which ranks of several machines meet: each asks its agent, which passes it on.

torch's C++ calls it as any store.  A wait is one question, which is answered when the keys
are there, so that it takes one way there and back, however long that is; who waits looks
meanwhile whether it is to go on.

Everything here is called with the GIL and releases it while it waits for an answer.  So a
thread of C++ that asks, as those of nccl's watchdog do once a second, waits for a cell that
holds the GIL for long, and for nothing else; that thread being joined by one which holds the GIL
would end neither.  By torch's source none does: `abort`, `shutdown` and the ends of groups
let go of it.  Read, in torch 2.13; with nccl on a GPU this store has never been run.
"""

from __future__ import annotations

import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError

from nbdist.wire.frames import BadFrame, FrameCutter
from nbdist.wire.store import (
    LONGEST_WAIT,
    MOST_BYTES,
    Add,
    Answer,
    Append,
    CompareSet,
    Count,
    Delete,
    Get,
    Operation,
    Refused,
    Set,
    Wait,
    Waiting,
    answer_from,
    to_frame,
)
from nbdist.worker.compat.torch import Store

LOOK_EVERY = 0.02
"""Seconds after which one that waits looks whether it is to go on."""

ANSWER_TIMEOUT = 30.0
"""Seconds for an answer, besides those for which it may wait; then the agent is taken for lost."""

KEPT = 2
"""Connections that are kept for the next question."""

READ_SIZE = 1 << 18

LOST = "the agent that serves the world's store cannot be reached"

IN_CHILD = "a process forked by the rank cannot use the world's store"

LookOver = Callable[[], None]
"""Raises what is to end a wait."""


def wait_on() -> None:
    """Let it go on."""


class Connections:
    """To the agent's socket: one for each thread that asks, opened as they are needed.

    From any thread.  Once one is lost the agent is, and each question raises ConnectionError.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._free = [self._connect()]

    def __repr__(self) -> str:
        return f"<Connections to {self._path}, {len(self._free)} free>"

    def ask(self, operation: Operation, look: LookOver = wait_on) -> Answer:
        """Return the answer.  What `look` raises meanwhile ends the wait for it."""
        if os.getpid() != self._pid:
            raise ConnectionError(IN_CHILD)
        with self._lock:
            connection = self._free.pop() if self._free else None
        connection = connection or self._connect()
        try:
            answer = self._ask(connection, operation, look)
        except BaseException:  # also Stop's, in whichever line: an answer may be on its way
            connection.close()
            raise
        with self._lock:
            if len(self._free) < KEPT:
                self._free.append(connection)
                return answer
        connection.close()
        return answer

    def leave(self) -> None:
        """Have none: in a forked child, whose lock may be held by a thread that is not there."""
        for connection in self._free:
            connection.close()
        self._pid = -1

    def close(self) -> None:
        """End those that are free, at the end of the worker."""
        with self._lock:
            while self._free:
                self._free.pop().close()

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(self._path)
        except OSError as error:
            connection.close()
            raise ConnectionError(f"{LOST}: {error.strerror}") from error
        connection.settimeout(ANSWER_TIMEOUT)
        return connection

    def _ask(self, connection: socket.socket, operation: Operation, look: LookOver) -> Answer:
        seconds = operation.seconds if isinstance(operation, Get | Wait) else 0.0
        end = time.monotonic() + seconds + ANSWER_TIMEOUT
        connection.sendall(to_frame(operation))
        # Not `select`, which knows no descriptors from 1,024 on.
        arrival, cutter = select.poll(), FrameCutter(MOST_BYTES)
        arrival.register(connection, select.POLLIN)
        while time.monotonic() < end:
            if not arrival.poll(LOOK_EVERY * 1000):
                look()
                continue
            if not (data := connection.recv(READ_SIZE)):
                raise ConnectionError(LOST)
            for frame in cutter.feed(data):
                return _answer_in(frame)
        raise ConnectionError(f"{LOST}: it did not answer for {ANSWER_TIMEOUT:.0f} s")


def _answer_in(frame: bytes) -> Answer:
    try:
        return answer_from(frame)
    except BadFrame as error:
        raise ConnectionError(f"{LOST}: {error}") from error


class AgentStore(Store):
    """Its keys begin with `prefix`, as a PrefixStore's do."""

    def __init__(self, agent: Connections, prefix: str, timeout: float) -> None:
        super().__init__()
        self._agent = agent
        self._prefix = prefix
        self._timeout = timedelta(seconds=timeout)

    def __repr__(self) -> str:
        return f"<AgentStore {self._prefix} {self._agent}>"

    def awaited(
        self, keys: Sequence[str], timeout: timedelta | None, look: LookOver = wait_on
    ) -> list[bytes]:
        """Return the values once all are there; DistStoreError when they do not come in time."""
        return [*self._when_there(Get, keys, timeout, look)]

    def wait_for(
        self, keys: Sequence[str], timeout: timedelta | None, look: LookOver = wait_on
    ) -> None:
        """Wait until all keys are there; DistStoreError when they do not come in time."""
        self._when_there(Wait, keys, timeout, look)

    def _when_there(
        self, kind: type[Waiting], keys: Sequence[str], timeout: timedelta | None, look: LookOver
    ) -> Any:
        allowed = self._timeout if timeout is None else timeout
        # torch's kNoTimeout is 0.
        end = time.monotonic() + (allowed.total_seconds() or math.inf)
        asked = tuple(map(self._key, keys))
        while True:
            left = max(0.0, end - time.monotonic())
            answer = self._ask(kind(asked, min(left, LONGEST_WAIT)), look)
            if not (answer is None or answer is False):
                return answer
            if time.monotonic() >= end:
                raise DistStoreError(f"wait timeout: {', '.join(asked)} did not come")

    def _ask(self, operation: Operation, look: LookOver = wait_on) -> Any:
        answer = self._agent.ask(operation, look)
        if isinstance(answer, Refused):
            raise ValueError(answer.why)
        return answer

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    # --- what torch calls -----------------------------------------------------------------

    def get(self, key: str) -> bytes:
        """Wait for the value and return it."""
        return self.awaited([key], None)[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for all values and return them: gloo then asks once for all ranks."""
        return self.awaited(keys, None)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there; DistStoreError when they do not come in time."""
        self.wait_for(keys, timeout)

    def set(self, key: str, value: str | bytes) -> None:
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        named: Mapping[str, bytes] = {
            self._key(key): _as_bytes(value) for key, value in zip(keys, values, strict=True)
        }
        self._ask(Set(named))

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(Append(self._key(key), _as_bytes(value)))

    def add(self, key: str, value: int) -> int:
        return int(self._ask(Add(self._key(key), int(value))))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        operation = CompareSet(self._key(key), _as_bytes(expected), _as_bytes(desired))
        found: bytes = self._ask(operation)
        return found

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(Wait(tuple(map(self._key, keys)))))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(Delete(self._key(key))))

    def num_keys(self) -> int:
        return int(self._ask(Count()))

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> AgentStore:
        return self

    # C++ calls two of them by these names (torch 2.13).
    deleteKey, getNumKeys = delete_key, num_keys

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
