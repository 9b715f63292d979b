"""The stores where ranks meet: a wait in one can be aborted, whichever other one it leads to.

`new_group`, for one, waits in the store until the other members have come.  FileStore waits in
C++, where nothing reaches it.  C++ also calls a store that is written in Python, whose wait ends
with what it raises, and which polls more often: a `new_group` of four ranks takes 9 ms less (2
cores, torch 2.13).
"""

from __future__ import annotations

import importlib
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Self

from torch.distributed import DistBackendError, DistStoreError

from nbdist.wire import store as wire
from nbdist.wire.frames import BadFrame, FrameCutter
from nbdist.wire.spec import TorchStore
from nbdist.words import one_line
from nbdist.worker.compat.torch import PrefixStore, Store
from nbdist.worker.process import BadEnvironment, is_ready

FIRST_STEP, LONGEST_STEP = 0.001, 0.02
"""Seconds between two polls: as short as the others are quick, but no burden for long."""

LOOK_EVERY = 0.02  # seconds after which what waits looks whether it is to go on

FORM_TIMEOUT = 120.0
"""Seconds for all ranks to form a group of the world's; torch's own default is ten to thirty
minutes."""

LookOver = Callable[[], None]  # raises what is to end a wait

ABORTED = "Connection closed by peer: it waited in the store and was released"
"""Words that gloo has for the same."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """In which store a group's members find one another, and for how many seconds they wait.

    `number` was not used in this store before; once the file `over` is there, waiting is
    called off.
    """

    store: Any
    number: int = 0
    over: Path | None = None
    timeout: float = FORM_TIMEOUT


def until_over(
    connect: Callable[[], object],
    what: str,
    timeout: float,
    look: LookOver = lambda: None,
    still: Callable[[], bool] = lambda: False,
) -> None:
    """Do what waits in C++ for other ranks; DistBackendError once it takes too long.

    It may take as long again, and again, where `still` allows that.  What `look` raises ends it
    too.  A thread waits, and is left behind.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            connect()
            done.set_result(None)
        except BaseException as error:  # noqa: BLE001 (it is raised where it is waited for)
            done.set_exception(error)

    began = time.monotonic()
    deadline = began + timeout
    threading.Thread(target=run, name=f"nbdist: {what}", daemon=True).start()
    while not wait([done], LOOK_EVERY).done:
        look()
        if (now := time.monotonic()) > deadline:
            if not still():
                raise DistBackendError(f"{what} took more than {int(now - began)} s")
            deadline = now + timeout
    done.result()


class _PythonStore(Store):
    """A store of which C++ asks all that waits by one method, `awaited`."""

    def awaited(
        self, keys: Sequence[str], timeout: timedelta | None, *, values: bool
    ) -> list[bytes]:
        """Return their `values` once all are there; DistStoreError where they do not come."""
        raise NotImplementedError

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self.awaited(keys, None, values=True)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self.awaited(keys, timeout, values=False)

    # C++ calls two of them by these names (torch 2.13).

    def deleteKey(self, key: str) -> bool:
        return self.delete_key(key)

    def getNumKeys(self) -> int:
        return self.num_keys()

    def clone(self) -> Self:
        return self


def _passed_on(name: str) -> Any:
    return lambda self, *args: self.pass_on(name, *args)


class AbortableStore(_PythonStore):
    """Passes all on to the store of a meeting, and waits for it."""

    set: Any = _passed_on("set")
    append: Any = _passed_on("append")
    add: Any = _passed_on("add")
    compare_set: Any = _passed_on("compare_set")
    check: Any = _passed_on("check")
    delete_key: Any = _passed_on("delete_key")
    num_keys: Any = _passed_on("num_keys")
    has_extended_api: Any = _passed_on("has_extended_api")

    def __init__(self, meeting: Meeting) -> None:
        super().__init__()
        self.meeting = meeting
        self._turn = threading.Lock()
        self._aborted = threading.Event()
        self._awaited: Sequence[str] = ()

    def __repr__(self) -> str:
        state = "aborted" if self._aborted.is_set() else f"waits for {[*self._awaited]}"
        return f"<AbortableStore {state if self._awaited else 'at rest'}>"

    def abort(self) -> None:
        """Make each wait raise ConnectionResetError, also later ones; from any thread."""
        self._aborted.set()

    def start_over(self) -> None:
        """Allow waits again, after `abort`."""
        self._aborted.clear()

    @contextmanager
    def at(self, meeting: Meeting) -> Iterator[None]:
        """Take part in this meeting meanwhile; one thread at a time."""
        if not self._turn.acquire(timeout=meeting.timeout):
            raise RuntimeError("another thread is making a group, and does not come to an end")
        before, self.meeting = self.meeting, meeting
        try:
            yield
        finally:
            self.meeting = before
            self._turn.release()

    @property
    def is_waited_in(self) -> bool:
        """Whether a thread waits for what is not there; from any thread."""
        awaited = self._awaited
        return bool(awaited) and not self.check(awaited)

    def awaited(
        self, keys: Sequence[str], timeout: timedelta | None, *, values: bool
    ) -> list[bytes]:
        """Wait for them, and return their `values`; the probe looks for calls of this function."""
        store = self.meeting.store
        allowed = timedelta(seconds=self.meeting.timeout) if timeout is None else timeout
        self._awaited = keys
        try:
            if isinstance(store, AgentStore):
                return store.awaited(keys, allowed, self.look, values=values)
            inner = store
            while isinstance(inner, PrefixStore):
                inner = inner.underlying_store
            # One that leads to an agent waits itself, and is aborted together with this one.
            if not (isinstance(inner, AbortableStore) and inner.has_extended_api()):
                self._poll(keys, allowed)
            elif not values:
                store.wait(keys, allowed)
            if not values:
                return []
            if store.has_extended_api():
                return [*store.multi_get(keys)]
            return [self.pass_on("get", key) for key in keys]
        finally:
            self._awaited = ()

    def _poll(self, keys: Sequence[str], allowed: timedelta) -> None:
        # torch's kNoTimeout is 0.
        end, step = time.monotonic() + (allowed.total_seconds() or math.inf), FIRST_STEP
        while not self.check(keys):
            self._aborted.wait(step)
            self.look()
            if time.monotonic() > end:
                raise DistStoreError(f"wait timeout: {', '.join(keys)} did not come")
            step = min(1.5 * step, LONGEST_STEP)

    def look(self) -> None:
        """End a wait where that has been aborted, or the meeting called off."""
        over = self.meeting.over
        # Not a RuntimeError, as the end of a wait is: torch waits again after some.
        if self._aborted.is_set() or (over is not None and over.exists()):
            raise ConnectionResetError(ABORTED)

    def set_timeout(self, timeout: timedelta) -> None:
        self.meeting = replace(self.meeting, timeout=timeout.total_seconds())

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def pass_on(self, name: str, *args: Any) -> Any:
        """Call this method of the other store."""
        return getattr(self.meeting.store, name)(*args)


# --- the store in which ranks of several machines meet ----------------------------------------

ANSWER_TIMEOUT = 30.0
"""Seconds for an answer, besides those for which it may wait; then the agent is taken for lost."""

KEPT = 2  # connections that are kept for the next question
READ_SIZE = 1 << 18
LOST = "the agent that serves the world's store cannot be reached"
IN_CHILD = "a process forked by the rank cannot use the world's store"


class Connections:
    """To the agent's socket: one for each thread that asks.

    Once one is lost the agent is, and each question raises ConnectionError.
    """

    # No lock: in a forked child one may be held by a thread that is not there.

    def __init__(self, path: str) -> None:
        self._path = path
        self._pid = os.getpid()
        self._free = deque([self._connect()])

    def __repr__(self) -> str:
        return f"<Connections to {self._path}, {len(self._free)} free>"

    def ask(self, operation: wire.Operation, look: LookOver = lambda: None) -> Any:
        """Return the answer; ValueError where it is refused.  What `look` raises ends the wait."""
        if os.getpid() != self._pid:
            raise ConnectionError(IN_CHILD)
        try:
            connection = self._free.pop()
        except IndexError:
            connection = self._connect()
        try:
            answer = self._ask(connection, operation, look)
        except BaseException:  # also Stop's, in whichever line: an answer may be on its way
            connection.close()
            raise
        if len(self._free) < KEPT:
            self._free.append(connection)
        else:
            connection.close()
        if isinstance(answer, wire.Refused):
            raise ValueError(answer.why)
        return answer

    def close(self) -> None:
        """End those that are free, at the end of the worker, or in a forked child."""
        with suppress(IndexError):
            while True:
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

    def _ask(
        self, connection: socket.socket, operation: wire.Operation, look: LookOver
    ) -> wire.Answer:
        seconds = operation.seconds if isinstance(operation, wire.Get | wire.Wait) else 0.0
        end = time.monotonic() + seconds + ANSWER_TIMEOUT
        connection.sendall(wire.to_frame(operation))
        cutter = FrameCutter(wire.MOST_BYTES)
        while time.monotonic() < end:
            if not is_ready(connection, LOOK_EVERY * 1000):
                look()
                continue
            if not (data := connection.recv(READ_SIZE)):
                raise ConnectionError(LOST)
            for frame in cutter.feed(data):
                try:
                    return wire.answer_from(frame)
                except BadFrame as error:
                    raise ConnectionError(f"{LOST}: {error}") from error
        raise ConnectionError(f"{LOST}: it did not answer for {ANSWER_TIMEOUT:.0f} s")


class AgentStore(_PythonStore):
    """Its keys begin with `prefix`, as a PrefixStore's do."""

    def __init__(self, agent: Connections, prefix: str, timeout: float) -> None:
        super().__init__()
        self._agent, self._prefix = agent, prefix
        self._timeout = timedelta(seconds=timeout)

    def awaited(
        self,
        keys: Sequence[str],
        timeout: timedelta | None,
        look: LookOver = lambda: None,
        *,
        values: bool = True,
    ) -> list[bytes]:
        """Wait for them; what `look` raises meanwhile ends that."""
        allowed = self._timeout if timeout is None else timeout
        # torch's kNoTimeout is 0.
        end = time.monotonic() + (allowed.total_seconds() or math.inf)
        asked = tuple(map(self._key, keys))
        while True:
            left = max(0.0, end - time.monotonic())
            kind = wire.Get if values else wire.Wait
            answer = self._agent.ask(kind(asked, min(left, wire.LONGEST_WAIT)), look)
            if not (answer is None or answer is False):
                return [*answer] if values else []
            if time.monotonic() >= end:
                raise DistStoreError(f"wait timeout: {', '.join(asked)} did not come")

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    # --- what torch calls -----------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        named = zip(map(self._key, keys), map(_as_bytes, values), strict=True)
        self._agent.ask(wire.Set(dict(named)))

    def append(self, key: str, value: str | bytes) -> None:
        self._agent.ask(wire.Append(self._key(key), _as_bytes(value)))

    def add(self, key: str, value: int) -> int:
        return int(self._agent.ask(wire.Add(self._key(key), int(value))))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        operation = wire.CompareSet(self._key(key), _as_bytes(expected), _as_bytes(desired))
        return bytes(self._agent.ask(operation))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._agent.ask(wire.Wait(tuple(map(self._key, keys)))))

    def delete_key(self, key: str) -> bool:
        return bool(self._agent.ask(wire.Delete(self._key(key))))

    def num_keys(self) -> int:
        return int(self._agent.ask(wire.Count()))

    def has_extended_api(self) -> bool:
        return True


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


# --- the store where `--rdzv-backend` names one of torch's own rendezvous ---------------------

# torch's registry makes the handler, also one of the user's packages (entry points
# `torchrun.handlers`).  Each rank takes part, under another name whenever the group is formed, so
# that a new rank finds the others.  torch's limits hold: c10d's store ends with the rank that has
# it; nothing there is secret; a wait for ranks cannot be aborted, but ends after `JOIN_TIMEOUT`.

JOIN_TIMEOUT = 25  # seconds for all ranks to come; agents wait 30 s for healing
ETCD = {"etcd", "etcd-v2"}
ETCD_TIMEOUT = 3  # seconds for an etcd to answer; its client asks four times


class NoStore(BadEnvironment, RuntimeError):
    """There is none; the message, one line, says why."""


class TorchRendezvous:
    """One rank's part in a rendezvous of torch's."""

    def __init__(self, where: TorchStore, rank: int) -> None:
        self.compares = True
        """Whether the store can compare a value and set another one, which etcd's cannot."""
        self._where, self.rank = where, rank
        # C++ that has a store keeps alive what it is there, and not what it is in Python; that
        # of etcd-v2, below the one that the handler gives, is the handler's.
        self._kept: list[Any] = []

    def meet(self, generation: int, size: int) -> Any:
        """Return the store of this generation once all ranks have come.  Raises NoStore."""
        # Here, as few worlds have one, and the import takes its time.
        from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

        # torch would open another port, for a store that is never used.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        where = self._where
        try:
            if where.backend in ETCD:
                _ask_etcd(where.endpoint)
            handler = registry.get_rendezvous_handler(
                RendezvousParameters(
                    backend=where.backend,
                    endpoint=where.endpoint,
                    run_id=f"{where.name}-{generation}",
                    min_nodes=size,
                    max_nodes=size,
                    rank=self.rank,
                    timeout=JOIN_TIMEOUT,
                    join_timeout=JOIN_TIMEOUT,
                    read_timeout=ETCD_TIMEOUT if where.backend in ETCD else JOIN_TIMEOUT,
                )
            )
            store = handler.next_rendezvous().store
            # The handler would watch over the ranks: it ends once all have what it is for.
            if store.add("nbdist/parted", 1) == size:
                store.set("nbdist/all", "")
            store.wait(["nbdist/all"])
            handler.shutdown()
            if where.backend in ETCD:
                store = _EtcdStore(store, where)
        except Exception as error:  # whatever package the handler is of
            why = one_line(str(error.__cause__ or error)) or type(error).__name__
            raise _no_store(where, why) from error
        self._kept.append((handler, store))
        try:  # torch has no other way to find out (2.15)
            store.compare_set("nbdist/compared", "", "yes")
        except RuntimeError:
            self.compares = False
        return store


class _EtcdStore(AbortableStore):
    """The store that user code makes groups in, whose errors name its etcd."""

    def __init__(self, store: Any, where: TorchStore) -> None:
        super().__init__(Meeting(store))
        self._where = where
        self._error = importlib.import_module("etcd").EtcdException

    def pass_on(self, name: str, *args: Any) -> Any:
        try:
            return super().pass_on(name, *args)
        except self._error as error:
            raise _no_store(self._where, f"no etcd answers there ({error}); start it") from None


def _no_store(where: TorchStore, why: str) -> NoStore:
    return NoStore(f"`--rdzv-backend {where.backend} --rdzv-endpoint {where.endpoint}`: {why}")


def _ask_etcd(endpoint: str) -> None:
    """Raise ConnectionError where none answers: torch's client would ask for minutes."""
    connection = HTTPConnection(endpoint, timeout=ETCD_TIMEOUT)
    try:
        connection.request("GET", "/version")
        connection.getresponse()
    except (OSError, HTTPException) as error:
        why = getattr(error, "strerror", None) or error
        raise ConnectionError(f"no etcd answers there ({why}); start it") from None
    finally:
        connection.close()
