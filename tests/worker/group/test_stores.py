"""Tests of `nbdist.worker.group.stores`: called as C++ calls them, through a PrefixStore."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed import DistStoreError

from nbdist.agent.listener import StoreWindow
from nbdist.wire.store import Answer, HostedStore, Operation
from nbdist.worker.group import stores
from nbdist.worker.group.stores import AbortableStore, AgentStore, Connections
from tests.waiting import SOON, wait_until


class CountingStore(HostedStore):
    """Says how often it was asked."""

    asked = 0

    async def ask(self, operation: Operation) -> Answer:
        self.asked += 1
        return await super().ask(operation)


class Agent:
    """A store and its socket, on a thread with a loop of its own."""

    def __init__(self, runtime: Path) -> None:
        self.store = CountingStore()
        self._window = StoreWindow(runtime, self.store.ask)
        self.path = str(self._window.path)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._window.open(), self._loop).result(SOON)

    def end(self) -> None:
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._window.close(), self._loop).result(SOON)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


@pytest.fixture
def agent() -> Iterator[Agent]:
    with tempfile.TemporaryDirectory(prefix="nbt-") as folder:
        agent = Agent(Path(folder))
        yield agent
        agent.end()


@pytest.fixture
def connections(agent: Agent) -> Iterator[Connections]:
    connections = Connections(agent.path)
    yield connections
    connections.close()


@pytest.fixture
def store(connections: Connections) -> AgentStore:
    return AgentStore(connections, "g", timeout=SOON)


def answers_all(asked: Store) -> None:
    """Whatever C++ calls is answered as by a store of torch's own."""
    asked.set("key", "value")
    assert asked.get("key") == b"value"
    asked.wait(["key"])
    asked.wait(["key"], timedelta(seconds=1))
    assert (asked.check(["key"]), asked.check(["other"])) == (True, False)
    assert [asked.add("count", 2), asked.add("count", 3)] == [2, 5]
    assert asked.compare_set("key", "value", "changed") == b"changed"
    assert asked.multi_get(["key", "count"]) == [b"changed", b"5"]


def test_all_that_is_asked_of_a_store(store: AgentStore, connections: Connections) -> None:
    """It reaches the agent, and all is under one prefix."""
    asked: Store = PrefixStore("a", store)
    answers_all(asked)
    asked.multi_set(["one", "two"], ["1", "2"])
    asked.append("two", "nd")
    assert asked.get("two") == b"2nd"
    assert asked.has_extended_api()
    assert asked.num_keys() == 4
    assert asked.delete_key("key")
    assert not asked.delete_key("key")
    assert not asked.check(["key"])
    other = AgentStore(connections, "other", timeout=SOON)
    assert not PrefixStore("a", other).check(["one"])
    assert store.get("a/one") == b"1"
    with pytest.raises(ValueError, match="g/a/two holds b'2nd', to which no number"):
        asked.add("two", 1)


def test_many_threads(store: AgentStore) -> None:
    """All that wait do so at once, and each gets its own answer."""
    with ThreadPoolExecutor(20) as pool:
        got = [pool.submit(PrefixStore("a", store).get, str(n)) for n in range(20)]
        store.multi_set([f"a/{n}" for n in range(20)], [str(n) for n in range(20)])
        assert [each.result(SOON) for each in got] == [b"%d" % n for n in range(20)]
    assert "2 free" in repr(store._agent)


def test_what_never_comes(store: AgentStore) -> None:
    """A wait ends as FileStore's does, after its own time or the store's."""
    with pytest.raises(DistStoreError, match="wait timeout: g/a/key did not come"):
        PrefixStore("a", store).wait(["key"], timedelta(seconds=0.05))
    store.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(DistStoreError, match="wait timeout: g/a/key did not come"):
        PrefixStore("a", store).get("key")


def test_a_wait_of_several_operations(store: AgentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked again, and ends when the key has come."""
    monkeypatch.setattr(stores.wire, "LONGEST_WAIT", 0.02)
    timer = threading.Timer(0.2, store.set, ("key", "value"))
    timer.start()
    assert store.get("key") == b"value"
    timer.join()


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_wait_is_one_question(store: AgentStore, agent: Agent, *, is_nested: bool) -> None:
    """However long it takes, the agent is asked once, and answers when the key is there.

    Also through another store of that kind, as gloo's backends have it from torch 2.14 on.
    """
    inner = waits = AbortableStore(store)
    if is_nested:
        waits = AbortableStore(PrefixStore("a", inner))
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(waits.get, "key")
        wait_until(lambda: "1 wait" in repr(agent.store))
        store.multi_set(["key", "a/key"], ["value", "value"])
        assert got.result(SOON) == b"value"
    assert agent.store.asked == 2


# --- ends of waits ------------------------------------------------------------------------------


def test_aborted(store: AgentStore, agent: Agent) -> None:
    """The wait ends at once, the agent's too; then the store can be used again."""
    abortable = AbortableStore(store)
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(PrefixStore("a", abortable).get, "key")
        wait_until(lambda: abortable.is_waited_in and "1 wait" in repr(agent.store))
        began = time.monotonic()
        abortable.abort()
        with pytest.raises(ConnectionResetError, match="Connection closed by peer"):
            got.result(SOON)
        sys.stdout.write(f"{time.monotonic() - began:.3f} s\n")
    wait_until(lambda: "0 wait" in repr(agent.store))
    assert not abortable.is_waited_in
    abortable.start_over()
    abortable.set("key", "value")
    assert abortable.get("key") == b"value"


def test_called_off(store: AgentStore, tmp_path: Path) -> None:
    """A wait ends once its file is there."""
    over = tmp_path / "over"
    abortable = AbortableStore(store, SOON, over)
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(abortable.wait, ["key"])
        wait_until(lambda: abortable.is_waited_in)
        over.touch()
        with pytest.raises(ConnectionResetError):
            got.result(SOON)


def test_an_agent_that_ends(store: AgentStore, agent: Agent) -> None:
    """Who waits learns of it, and so does who asks later."""
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(PrefixStore("a", store).get, "key")
        wait_until(lambda: "1 wait" in repr(agent.store))
        agent.end()
        with pytest.raises(ConnectionError, match="cannot be reached"):
            got.result(SOON)
    with pytest.raises(ConnectionError, match="cannot be reached: No such file"):
        store.set("key", "value")


def test_an_agent_that_does_not_answer(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken for lost after a while, and so is one that answers garbage."""
    monkeypatch.setattr(stores, "ANSWER_TIMEOUT", 0.1)
    path = agent.path + "2"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(path)
        silent.listen()
        connections = Connections(path)
        with pytest.raises(ConnectionError, match="it did not answer for 0 s"):
            AgentStore(connections, "g", 1.0).num_keys()
        connections = Connections(path)
        silent.accept()[0].close()
        end, _ = silent.accept()
        with end:
            end.sendall(len(pickle.dumps(print)).to_bytes(8, "big") + pickle.dumps(print))
            with pytest.raises(ConnectionError, match="cannot be reached: UnpicklingError"):
                AgentStore(connections, "g", 1.0).num_keys()


@pytest.mark.world
def test_a_forked_child(store: AgentStore, connections: Connections) -> None:
    """It has no part in it, also where it has not been made to leave; the rank goes on."""
    store.set("key", "value")
    for leaves in (True, False):
        if (child := os.fork()) == 0:
            try:
                if leaves:
                    connections.leave()
                store.set("key", "the child's")
            except ConnectionError:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert store.get("key") == b"value"


# --- over a store of torch's own ----------------------------------------------------------------


@pytest.fixture
def over_file(tmp_path: Path) -> AbortableStore:
    return AbortableStore(FileStore(str(tmp_path / "store"), 1), timeout=30.0)


def test_all_that_is_asked_of_a_store_of_torch(over_file: AbortableStore) -> None:
    """It reaches that."""
    asked: Store = PrefixStore("a", over_file)
    answers_all(asked)
    assert asked.num_keys() >= 2
    assert asked.delete_key("key")
    assert not asked.check(["key"])
    assert repr(over_file) == "<AbortableStore at rest>"


def test_aborted_where_torch_waits(over_file: AbortableStore) -> None:
    """Each wait ends at once, also one that begins later; then the store can be used again."""
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(PrefixStore("a", over_file).get, "key")
        wait_until(lambda: over_file.is_waited_in)
        over_file.abort()
        with pytest.raises(ConnectionResetError, match="Connection closed by peer"):
            got.result(timeout=1.0)
        with pytest.raises(ConnectionResetError):
            over_file.get("key")
        over_file.start_over()
        got = pool.submit(PrefixStore("a", over_file).get, "key")
        wait_until(lambda: over_file.is_waited_in)
        over_file.set("a/key", "value")
        assert got.result(timeout=1.0) == b"value"
