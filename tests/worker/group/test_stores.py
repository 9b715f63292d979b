"""Tests of `nbdist.worker.group.stores`, as C++ calls them, and of torch's rendezvous."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed import DistStoreError

from nbdist.agent.listener import StoreWindow
from nbdist.config import RDZV_BACKENDS
from nbdist.wire.spec import TorchStore
from nbdist.wire.store import HostedStore, Operation, StoreReply
from nbdist.worker.group import stores
from nbdist.worker.group.stores import (
    AbortableStore,
    AgentStore,
    Meeting,
    NoStore,
    StoreConnections,
    TorchRendezvous,
)
from tests.waiting import SOON, wait_until


class CountingStore(HostedStore):
    """A store that counts its questions, and answers after `silent_for` seconds."""

    asked, silent_for = 0, 0.0

    async def ask(self, operation: Operation) -> StoreReply:
        self.asked += 1
        await asyncio.sleep(self.silent_for)
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
def agent(runtime: Path) -> Iterator[Agent]:
    agent = Agent(runtime)
    yield agent
    agent.end()


@pytest.fixture
def connections(agent: Agent) -> Iterator[StoreConnections]:
    connections = StoreConnections(agent.path)
    yield connections
    connections.close()


@pytest.fixture
def store(connections: StoreConnections) -> AgentStore:
    return AgentStore(connections, "g", timeout=SOON)


def answers_all(asked: Store) -> None:
    """Assert that the store answers all calls of C++ as a store of torch does."""
    asked.set("key", "value")
    assert asked.get("key") == b"value"
    asked.wait(["key"])
    asked.wait(["key"], timedelta(seconds=1))
    assert (asked.check(["key"]), asked.check(["other"])) == (True, False)
    assert [asked.add("count", 2), asked.add("count", 3)] == [2, 5]
    assert asked.compare_set("key", "value", "changed") == b"changed"
    assert asked.multi_get(["key", "count"]) == [b"changed", b"5"]


def test_the_agent_answers_all_operations(store: AgentStore, connections: StoreConnections) -> None:
    """The agent answers all calls of a store, whose keys are under a prefix of its own."""
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


def test_each_thread_gets_its_own_answer(store: AgentStore) -> None:
    """Many threads can wait at once, and each of them gets its own answer."""
    with ThreadPoolExecutor(20) as pool:
        got = [pool.submit(PrefixStore("a", store).get, str(n)) for n in range(20)]
        store.multi_set([f"a/{n}" for n in range(20)], [str(n) for n in range(20)])
        assert [each.result(SOON) for each in got] == [b"%d" % n for n in range(20)]
    assert "2 free" in repr(store._agent)


def test_a_wait_ends_at_its_timeout(store: AgentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait ends at its own timeout or the store's, and may last longer than a single question."""
    with pytest.raises(DistStoreError, match="wait timeout: g/a/key did not come"):
        PrefixStore("a", store).wait(["key"], timedelta(seconds=0.05))
    store.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(DistStoreError, match="wait timeout: g/a/key did not come"):
        PrefixStore("a", store).get("key")
    store.set_timeout(timedelta(seconds=SOON))
    monkeypatch.setattr(stores.wire, "MAX_STORE_WAIT", 0.02)
    timer = threading.Timer(0.2, store.set, ("key", "value"))
    timer.start()
    assert store.get("key") == b"value"
    timer.join()


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_wait_is_one_question(store: AgentStore, agent: Agent, *, is_nested: bool) -> None:
    """A wait asks the agent once, also through nested stores, as gloo's do from torch 2.14 on."""
    inner = waits = AbortableStore(Meeting(store))
    if is_nested:
        waits = AbortableStore(Meeting(PrefixStore("a", inner)))
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(waits.get, "key")
        wait_until(lambda: "1 wait" in repr(agent.store))
        store.multi_set(["key", "a/key"], ["value", "value"])
        assert got.result(SOON) == b"value"
    assert agent.store.asked == 2


def test_an_abort_ends_the_agents_wait(store: AgentStore, agent: Agent, tmp_path: Path) -> None:
    """An abort ends the wait of a rank, also in the agent; then the store works again.

    The file that calls off a meeting ends the wait, too.
    """
    abortable = AbortableStore(Meeting(store))
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(PrefixStore("a", abortable).get, "key")
        wait_until(lambda: abortable.has_waiting_thread and "1 wait" in repr(agent.store))
        abortable.abort()
        with pytest.raises(ConnectionResetError, match="Connection closed by peer"):
            got.result(SOON)
        wait_until(lambda: "0 wait" in repr(agent.store))
        assert not abortable.has_waiting_thread
        abortable.start_over()
        abortable.set("key", "value")
        assert abortable.get("key") == b"value"
        over = tmp_path / "over"
        abortable = AbortableStore(Meeting(store, cancel_path=over))
        got = pool.submit(abortable.wait, ["other"])
        wait_until(lambda: abortable.has_waiting_thread)
        over.touch()
        with pytest.raises(ConnectionResetError):
            got.result(SOON)


def test_waits_and_calls_fail_if_the_agent_ends(store: AgentStore, agent: Agent) -> None:
    """Both a waiting rank and a rank that asks later get an error if the agent has ended."""
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(PrefixStore("a", store).get, "key")
        wait_until(lambda: "1 wait" in repr(agent.store))
        agent.end()
        with pytest.raises(ConnectionError, match="cannot be reached"):
            got.result(SOON)
    with pytest.raises(ConnectionError, match="cannot be reached: No such file"):
        store.set("key", "value")


def test_a_silent_agent_counts_as_lost(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that does not answer in time, or answers garbage, counts as lost."""
    monkeypatch.setattr(stores, "STORE_ANSWER_TIMEOUT", 0.1)
    path = agent.path + "2"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(path)
        silent.listen()
        connections = StoreConnections(path)
        with pytest.raises(ConnectionError, match="it did not answer for 0 s"):
            AgentStore(connections, "g", 1.0).num_keys()
        connections = StoreConnections(path)
        silent.accept()[0].close()
        end, _ = silent.accept()
        with end:
            end.sendall(len(pickle.dumps(print)).to_bytes(8, "big") + pickle.dumps(print))
            with pytest.raises(ConnectionError, match="cannot be reached: UnpicklingError"):
                AgentStore(connections, "g", 1.0).num_keys()


def test_a_silent_head_gives_ranks_more_time(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank waits for its agent longer by the time for which the head may be silent."""
    monkeypatch.setattr(stores, "STORE_ANSWER_TIMEOUT", 0.1)
    agent.store.silent_for = 0.5
    with closing(StoreConnections(agent.path, silence=SOON)) as connections:
        assert AgentStore(connections, "g", 1.0).add("key", 2) == 2


@pytest.mark.world
def test_forked_children_have_no_store(store: AgentStore, connections: StoreConnections) -> None:
    """A forked child cannot use the store, even if it has closed no connection; the rank can."""
    store.set("key", "value")
    for leaves in (True, False):
        if (child := os.fork()) == 0:
            try:
                if leaves:
                    connections.close()
                store.set("key", "the child's")
            except ConnectionError:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert store.get("key") == b"value"


def test_waits_in_a_store_of_torch_can_be_aborted(tmp_path: Path) -> None:
    """A store of torch gets all calls; an abort ends a wait there, and later waits at once."""
    over_file = AbortableStore(Meeting(FileStore(str(tmp_path / "store"), 1)))
    asked: Store = PrefixStore("a", over_file)
    answers_all(asked)
    assert asked.num_keys() >= 2
    assert asked.delete_key("key")
    assert not asked.check(["key"])
    assert repr(over_file) == "<AbortableStore at rest>"
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(asked.get, "key")
        wait_until(lambda: over_file.has_waiting_thread)
        over_file.abort()
        with pytest.raises(ConnectionResetError, match="Connection closed by peer"):
            got.result(SOON)
        with pytest.raises(ConnectionResetError):
            over_file.get("key")
        over_file.start_over()
        got = pool.submit(asked.get, "key")
        wait_until(lambda: over_file.has_waiting_thread)
        over_file.set("a/key", "value")
        assert got.result(SOON) == b"value"


# libuv opens a pipe here for as long as the process lives: before tests count descriptors.
TCPStore("127.0.0.1", 0, is_master=True)


@pytest.fixture
def endpoint() -> str:
    """An address at which nothing listens yet; torch needs a number for the port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_all_ranks_of_a_rendezvous_have_one_store(backend: str, endpoint: str) -> None:
    """All ranks of a generation have one store, also a new rank; a wait there can be aborted."""

    def met(ranks: list[TorchRendezvous], generation: int) -> list[Any]:
        with ThreadPoolExecutor() as pool:
            return [*pool.map(lambda each: each.join(generation, len(ranks)), ranks)]

    where = TorchStore(backend, endpoint, "world")
    ranks = [TorchRendezvous(where, rank) for rank in range(2)]
    one, other = met(ranks, 1)
    assert all(each.compares for each in ranks)
    PrefixStore("a", one).set("key", "value")
    assert PrefixStore("a", other).get("key") == b"value"
    # The store may end with rank 0, which stays; rank 1 is new.
    one, other = met([ranks[0], TorchRendezvous(where, 1)], 2)
    assert not one.check(["a/key"])
    other.set("key", "new")
    abortable = AbortableStore(Meeting(PrefixStore("b", one)))
    assert abortable.multi_get([]) == []
    assert AbortableStore(Meeting(one)).multi_get(["key", "key"]) == [b"new", b"new"]
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(abortable.get, "never")
        while not abortable.has_waiting_thread:
            assert not got.done()
        abortable.abort()
        with pytest.raises(ConnectionResetError):
            got.result(SOON)


def test_torch_knows_all_names_of_rendezvous() -> None:
    """Each name of a rendezvous that the notebook takes is registered in torch itself."""
    from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry as registry

    for name in RDZV_BACKENDS:
        with pytest.raises(ValueError, match="already registered"):
            registry.register(name, lambda _: None)  # type: ignore[arg-type, return-value]


def test_a_failed_rendezvous_names_a_reason(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits for another in vain, or has no store, raises a line with the reason."""
    monkeypatch.setattr(stores, "JOIN_TIMEOUT", 1)
    alone = TorchRendezvous(TorchStore("c10d", endpoint, "world"), 0)
    with pytest.raises(NoStore, match=f"^`--rdzv-backend c10d --rdzv-endpoint {endpoint}`: "):
        alone.join(1, 2)
    for backend, why in (("nowhere", "nowhere"), ("static", "Port is absent"), ("etcd-v2", "etcd")):
        rank = TorchRendezvous(TorchStore(backend, "127.0.0.1", "world"), 0)
        with pytest.raises(NoStore, match=why) as found:
            rank.join(1, 1)
        assert "\n" not in str(found.value)


@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_missing_etcd_raises(backend: str, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing or paused etcd is reported soon: torch's client would ask for minutes."""
    where = TorchStore(backend, endpoint, "world")
    said = f"--rdzv-endpoint {endpoint}`: no etcd answers there \\(%s\\); start it$"
    with pytest.raises(NoStore, match=said % "Connection refused"):
        TorchRendezvous(where, 0).join(1, 1)
    monkeypatch.setattr(stores, "ETCD_TIMEOUT", 0.1)
    host, _, port = endpoint.rpartition(":")
    with socket.create_server((host, int(port))), pytest.raises(NoStore, match=said % "timed out"):
        TorchRendezvous(where, 0).join(1, 1)
