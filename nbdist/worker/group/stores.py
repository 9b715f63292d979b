"""The stores through which ranks find each other, written so that waits in them can be aborted.

For example, `new_group` waits in the store until the other members have come. torch's FileStore
waits in C++, which nothing can interrupt. But torch also calls a store that is written in Python,
and an exception of this store ends the wait. A store in Python can also poll more often: a
`new_group` of four ranks takes 9 ms less (2 cores, torch 2.13). Only a wait in torch's rendezvous
cannot be aborted. The stores are used in each worker, by the threads that make groups.
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
from nbdist.worker.process import SOCKET_READ_SIZE, BadEnvironment, is_ready

FIRST_STEP, LONGEST_STEP = 0.001, 0.02
"""Seconds between two polls: short at first, as all ranks often come at once, then longer."""

STORE_POLL_INTERVAL = 0.02  # seconds after which a wait checks whether it was aborted

FORM_TIMEOUT = 120.0
"""Seconds for all ranks to form the world's group; torch's own default is 10 to 30 minutes."""

LookOver = Callable[[], None]
"""A function that a wait calls repeatedly; it raises an exception to end the wait."""

STORE_WAIT_ABORTED = "Connection closed by peer: it waited in the store and was released"
"""The message if a wait in the store is aborted.

The message begins like gloo's message after an abort, so that both are recognised alike.
"""


@dataclass(frozen=True, slots=True)
class Meeting:
    """The store in which the members of a group find and wait for each other, before they connect.

    By default a wait lasts at most `timeout` seconds. `number` must not have been used in this
    store before. To end the waits, for example because a member has failed, the agent makes the
    file `cancel_path`: this calls the meeting off. Without a path it cannot be called off.
    """

    store: Any
    number: int = 0
    cancel_path: Path | None = None
    timeout: float = FORM_TIMEOUT


def run_with_timeout(
    connect: Callable[[], object],
    what: str,
    timeout: float,
    check_abort: LookOver = lambda: None,
    may_extend: Callable[[], bool] = lambda: False,
) -> None:
    """Call `connect`, which may wait in C++, in a thread of its own, and wait until it returns.

    `check_abort` is called repeatedly, and ends the wait by raising an exception. After `timeout`
    seconds `may_extend` is called: if it returns True, the wait goes on for `timeout` seconds more;
    if not, DistBackendError is raised. If the wait ends early, the thread goes on running. `what`
    names the call in messages.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            connect()
            done.set_result(None)
        except BaseException as error:  # noqa: BLE001 (`done.result` raises it)
            done.set_exception(error)

    began = time.monotonic()
    deadline = began + timeout
    threading.Thread(target=run, name=f"nbdist: {what}", daemon=True).start()
    while not wait([done], STORE_POLL_INTERVAL).done:
        check_abort()
        if (now := time.monotonic()) > deadline:
            if not may_extend():
                raise DistBackendError(f"{what} took more than {int(now - began)} s")
            deadline = now + timeout
    done.result()


class _PythonStore(Store):
    """A torch store that is written in Python; `get` and `wait` call `awaited` to wait for keys."""

    def awaited(
        self, keys: Sequence[str], timeout: timedelta | None, *, values: bool
    ) -> list[bytes]:
        """Wait until all keys are set; with `values` return their values, else [].

        Raises DistStoreError at the timeout.
        """
        raise NotImplementedError

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self.awaited(keys, None, values=True)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self.awaited(keys, timeout, values=False)

    # torch's C++ code calls these two methods by their names in C++ (torch 2.13).

    def deleteKey(self, key: str) -> bool:
        return self.delete_key(key)

    def getNumKeys(self) -> int:
        return self.num_keys()

    def clone(self) -> Self:
        return self


def _forward(name: str) -> Any:
    return lambda self, *args: self.pass_on(name, *args)


class AbortableStore(_PythonStore):
    """Passes calls to the store of a `Meeting`, which `leading_to` can change.

    Waits are done in Python, and not in torch's C++ code, so that they can be aborted.
    """

    set: Any = _forward("set")
    append: Any = _forward("append")
    add: Any = _forward("add")
    compare_set: Any = _forward("compare_set")
    check: Any = _forward("check")
    delete_key: Any = _forward("delete_key")
    num_keys: Any = _forward("num_keys")
    has_extended_api: Any = _forward("has_extended_api")

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
        """Make waits for keys that are not set raise ConnectionResetError, until `start_over`.

        Any thread may call this.
        """
        self._aborted.set()

    def start_over(self) -> None:
        """Allow waits again, after `abort`."""
        self._aborted.clear()

    @contextmanager
    def leading_to(self, meeting: Meeting) -> Iterator[None]:
        """Within this context, pass calls to the store of another meeting.

        If another thread is in this context, wait until it has left. Raises RuntimeError if it does
        not leave within the timeout of `meeting`.
        """
        if not self._turn.acquire(timeout=meeting.timeout):
            raise RuntimeError("another thread is making a group, and does not come to an end")
        before, self.meeting = self.meeting, meeting
        try:
            yield
        finally:
            self.meeting = before
            self._turn.release()

    @property
    def has_waiting_thread(self) -> bool:
        """Whether a thread waits for keys that are not set yet; any thread may ask."""
        awaited = self._awaited
        return bool(awaited) and not self.check(awaited)

    def awaited(
        self, keys: Sequence[str], timeout: timedelta | None, *, values: bool
    ) -> list[bytes]:
        """Wait until all keys are set; with `values` return their values, else [].

        While the main thread is in this function and keys are missing, `Probe` reports that the
        thread waits for other ranks. Raises DistStoreError at the timeout, and ConnectionResetError
        if the wait is aborted or the meeting called off.
        """
        store = self.meeting.store
        allowed = timedelta(seconds=self.meeting.timeout) if timeout is None else timeout
        self._awaited = keys
        try:
            if isinstance(store, AgentStore):
                return store.awaited(keys, allowed, self.check_abort, values=values)
            inner = store
            while isinstance(inner, PrefixStore):
                inner = inner.underlying_store
            # Do not poll if the inner store is an AbortableStore with torch's extended API, such as
            # one for an AgentStore: the inner store waits in its own way, and its waits are aborted
            # together with those of this store.
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
        # A timeout of 0, torch's kNoTimeout, means to wait for ever.
        deadline, step = time.monotonic() + (allowed.total_seconds() or math.inf), FIRST_STEP
        while not self.check(keys):
            self._aborted.wait(step)
            self.check_abort()
            if time.monotonic() > deadline:
                raise DistStoreError(f"wait timeout: {', '.join(keys)} did not come")
            step = min(1.5 * step, LONGEST_STEP)

    def check_abort(self) -> None:
        """Raise ConnectionResetError if the store was aborted, or its `Meeting` called off."""
        path = self.meeting.cancel_path
        # Do not raise RuntimeError: after some errors of this class torch would wait again.
        if self._aborted.is_set() or (path is not None and path.exists()):
            raise ConnectionResetError(STORE_WAIT_ABORTED)

    def set_timeout(self, timeout: timedelta) -> None:
        self.meeting = replace(self.meeting, timeout=timeout.total_seconds())

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def pass_on(self, name: str, *args: Any) -> Any:
        """Call the method `name` of the meeting's store, and return its result."""
        return getattr(self.meeting.store, name)(*args)


# --- the agent's store, for ranks of several machines ---------------------------------------------

STORE_ANSWER_TIMEOUT = 30.0
"""Seconds after which an agent that does not answer a request counts as lost.

If a request waits for keys, the seconds that it may wait are added. `silence`, an argument of
`StoreConnections`, is always added.
"""

MAX_IDLE_CONNECTIONS = 2  # idle connections that are kept for later requests
LOST = "the agent that serves the world's store cannot be reached"
STORE_IN_CHILD = "a process forked by the rank cannot use the world's store"


class StoreConnections:
    """Connections of this worker to the agent's socket for the store, one for each open request.

    Some idle connections are kept for later requests. If the agent is lost, each call of `ask`
    raises ConnectionError. `silence` is the number of seconds for which the agent itself may have
    to wait for the head before it answers.
    """

    # Do not use a lock: if another thread held the lock while the process was forked, nobody would
    # release the lock in the child.

    def __init__(self, path: str, silence: float = 0.0) -> None:
        self._path = path
        self._timeout = STORE_ANSWER_TIMEOUT + silence
        self._pid = os.getpid()
        self._idle = deque([self._connect()])

    def __repr__(self) -> str:
        return f"<StoreConnections to {self._path}, {len(self._idle)} free>"

    def ask(self, operation: wire.Operation, check_abort: LookOver = lambda: None) -> Any:
        """Send an operation to the agent, and return the answer.

        Raises ValueError if the agent refuses the operation. An exception of `check_abort` ends the
        wait.
        """
        if os.getpid() != self._pid:
            raise ConnectionError(STORE_IN_CHILD)
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect()
        try:
            answer = self._ask(connection, operation, check_abort)
        except BaseException:  # also KeyboardInterrupt: no later call may read this late answer
            connection.close()
            raise
        if len(self._idle) < MAX_IDLE_CONNECTIONS:
            self._idle.append(connection)
        else:
            connection.close()
        if isinstance(answer, wire.StoreRefused):
            raise ValueError(answer.why)
        return answer

    def close(self) -> None:
        """Close the idle connections; called when the worker exits, and in a forked child."""
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(self._path)
        except OSError as error:
            connection.close()
            raise ConnectionError(f"{LOST}: {error.strerror}") from error
        connection.settimeout(self._timeout)
        return connection

    def _ask(
        self, connection: socket.socket, operation: wire.Operation, check_abort: LookOver
    ) -> wire.StoreReply:
        seconds = operation.seconds if isinstance(operation, wire.Get | wire.Wait) else 0.0
        deadline = time.monotonic() + seconds + self._timeout
        connection.sendall(wire.to_frame(operation))
        cutter = FrameCutter(wire.MAX_STORE_BYTES)
        while time.monotonic() < deadline:
            if not is_ready(connection, STORE_POLL_INTERVAL * 1000):
                check_abort()
                continue
            if not (data := connection.recv(SOCKET_READ_SIZE)):
                raise ConnectionError(LOST)
            for frame in cutter.feed(data):
                try:
                    return wire.answer_from(frame)
                except BadFrame as error:
                    raise ConnectionError(f"{LOST}: {error}") from error
        raise ConnectionError(f"{LOST}: it did not answer for {self._timeout:.0f} s")


class AgentStore(_PythonStore):
    """A torch store for ranks of several machines, which passes each operation to the agent.

    `prefix` is put before each key, as by torch's PrefixStore.
    """

    def __init__(self, agent: StoreConnections, prefix: str, timeout: float) -> None:
        super().__init__()
        self._agent, self._prefix = agent, prefix
        self._timeout = timedelta(seconds=timeout)

    def awaited(
        self,
        keys: Sequence[str],
        timeout: timedelta | None,
        check_abort: LookOver = lambda: None,
        *,
        values: bool = True,
    ) -> list[bytes]:
        """Wait until all keys are set; with `values` return their values, else [].

        Raises DistStoreError at the timeout. An exception of `check_abort` ends the wait, too.
        """
        allowed = self._timeout if timeout is None else timeout
        # A timeout of 0, torch's kNoTimeout, means to wait for ever.
        deadline = time.monotonic() + (allowed.total_seconds() or math.inf)
        full_keys = tuple(map(self._key, keys))
        while True:
            seconds = max(0.0, deadline - time.monotonic())
            kind = wire.Get if values else wire.Wait
            answer = self._agent.ask(
                kind(full_keys, min(seconds, wire.MAX_STORE_WAIT)), check_abort
            )
            if not (answer is None or answer is False):
                return [*answer] if values else []
            if time.monotonic() >= deadline:
                raise DistStoreError(f"wait timeout: {', '.join(full_keys)} did not come")

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


# --- the store of torch's own rendezvous, with `--rdzv-backend` -----------------------------------

# A rank joins a rendezvous by a handler, an object that torch's registry makes. The handler's class
# may be in a package of the user (entry points `torchrun.handlers`). Whenever the group is formed,
# all ranks, old and new, join a rendezvous with a new name. A wait for ranks can time out, but
# cannot be aborted. With the backend c10d the store ends together with the rank that hosts it, and
# anyone who can connect to the store can read and change its contents.

JOIN_TIMEOUT = 25  # seconds for all ranks to come: less than the 30 s that agents wait for healing
ETCD = {"etcd", "etcd-v2"}
ETCD_TIMEOUT = 3  # seconds for an etcd to answer; torch's client of etcd-v2 asks four times


class NoStore(BadEnvironment, RuntimeError):
    """The rendezvous has given no store; the message says why, in one line for the user."""


class TorchRendezvous:
    """Takes part in torch's rendezvous for this rank, in a world with `--rdzv-backend`."""

    def __init__(self, spec: TorchStore, rank: int) -> None:
        self.compares = True
        """Whether the store has `compare_set`; the stores of etcd do not."""
        self._spec, self.rank = spec, rank
        # Keep the Python objects of the stores: torch's C++ code keeps only the C++ objects. Keep
        # the handlers, too: the handler of etcd-v2 has a store that the returned store uses.
        self._kept: list[Any] = []

    def join(self, generation: int, size: int) -> Any:
        """Wait until `size` ranks have joined the rendezvous, and return the store that they share.

        Each `generation`, in which the world's group is formed once, has its own rendezvous. Raises
        NoStore if ranks do not join in time, or for any other problem.
        """
        # Imported here, because few worlds need the module, and importing it takes long.
        from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

        # Otherwise torch would open another port, for a store that is never used.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        spec = self._spec
        try:
            if spec.backend in ETCD:
                _ask_etcd(spec.endpoint)
            handler = registry.get_rendezvous_handler(
                RendezvousParameters(
                    backend=spec.backend,
                    endpoint=spec.endpoint,
                    run_id=f"{spec.name}-{generation}",
                    min_nodes=size,
                    max_nodes=size,
                    rank=self.rank,
                    timeout=JOIN_TIMEOUT,
                    join_timeout=JOIN_TIMEOUT,
                    read_timeout=ETCD_TIMEOUT if spec.backend in ETCD else JOIN_TIMEOUT,
                )
            )
            store = handler.next_rendezvous().store
            # The handler itself watches the ranks, which is the agents' task here. So end the
            # handler, once all ranks have got the store.
            if store.add("nbdist/parted", 1) == size:
                store.set("nbdist/all", "")
            store.wait(["nbdist/all"])
            handler.shutdown()
            if spec.backend in ETCD:
                store = _EtcdStore(store, spec)
        except Exception as error:  # the handler may be of any package
            why = one_line(str(error.__cause__ or error)) or type(error).__name__
            raise _no_store(spec, why) from error
        self._kept.append((handler, store))
        # Find out whether the store has `compare_set`; torch 2.15 tells it in no other way.
        try:
            store.compare_set("nbdist/compared", "", "yes")
        except RuntimeError:
            self.compares = False
        return store


class _EtcdStore(AbortableStore):
    """The store of an etcd, which raises NoStore with the endpoint if the etcd does not answer."""

    def __init__(self, store: Any, spec: TorchStore) -> None:
        super().__init__(Meeting(store))
        self._spec = spec
        self._error = importlib.import_module("etcd").EtcdException

    def pass_on(self, name: str, *args: Any) -> Any:
        try:
            return super().pass_on(name, *args)
        except self._error as error:
            raise _no_store(self._spec, f"no etcd answers there ({error}); start it") from None


def _no_store(spec: TorchStore, why: str) -> NoStore:
    return NoStore(f"`--rdzv-backend {spec.backend} --rdzv-endpoint {spec.endpoint}`: {why}")


def _ask_etcd(endpoint: str) -> None:
    """Raise ConnectionError if no etcd answers; torch's own client would try for minutes."""
    connection = HTTPConnection(endpoint, timeout=ETCD_TIMEOUT)
    try:
        connection.request("GET", "/version")
        connection.getresponse()
    except (OSError, HTTPException) as error:
        why = getattr(error, "strerror", None) or error
        raise ConnectionError(f"no etcd answers there ({why}); start it") from None
    finally:
        connection.close()
