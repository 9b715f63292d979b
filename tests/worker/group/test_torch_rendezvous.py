"""Tests of `nbdist.worker.group.torch_rendezvous`: real rendezvous of torch's, ranks in threads."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from nbdist.wire.spec import TorchStore
from nbdist.worker.group import torch_rendezvous
from nbdist.worker.group.stores import AbortableStore
from nbdist.worker.group.torch_rendezvous import NoStore, TorchRendezvous
from tests.waiting import SOON

# libuv, which serves it, opens a pipe for as long as the process lives: before they are counted.
TCPStore("127.0.0.1", 0, is_master=True)


@pytest.fixture
def endpoint() -> str:
    """Where nothing listens yet; torch needs a number."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def met(ranks: list[TorchRendezvous], generation: int) -> list[Any]:
    """The store that each gets, all at once."""
    with ThreadPoolExecutor() as pool:
        return [*pool.map(lambda each: each.meet(generation, len(ranks)), ranks)]


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_all_have_one_store(backend: str, endpoint: str) -> None:
    """Also a rank that is new, in a later generation; a wait there can be aborted."""
    where = TorchStore(backend, endpoint, "world")
    ranks = [TorchRendezvous(where, rank) for rank in range(2)]
    one, other = met(ranks, 1)
    assert all(each.compares for each in ranks)
    PrefixStore("a", one).set("key", "value")
    assert PrefixStore("a", other).get("key") == b"value"
    # The one that has no part in the store itself, which ends with its rank.
    one, other = met([ranks[0], TorchRendezvous(where, 1)], 2)
    assert not one.check(["a/key"])
    other.set("key", "new")
    abortable = AbortableStore(PrefixStore("b", one))
    assert abortable.multi_get([]) == []
    assert AbortableStore(one).multi_get(["key", "key"]) == [b"new", b"new"]
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(abortable.get, "never")
        while not abortable.is_waited_in:
            assert not got.done()
        abortable.abort()
        with pytest.raises(ConnectionResetError):
            got.result(SOON)


def test_a_rank_that_does_not_come(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others say so after a while."""
    monkeypatch.setattr(torch_rendezvous, "JOIN_TIMEOUT", 1)
    alone = TorchRendezvous(TorchStore("c10d", endpoint, "world"), 0)
    with pytest.raises(NoStore, match=f"^`--rdzv-backend c10d --rdzv-endpoint {endpoint}`: "):
        alone.meet(1, 2)


@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_an_etcd_that_is_away(backend: str, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said soon, also of one that is paused, and torch's client is not asked."""
    where = TorchStore(backend, endpoint, "world")
    said = f"--rdzv-endpoint {endpoint}`: no etcd answers there \\(%s\\); start it$"
    with pytest.raises(NoStore, match=said % "Connection refused"):
        TorchRendezvous(where, 0).meet(1, 1)
    monkeypatch.setattr(torch_rendezvous, "ANSWER_TIMEOUT", 0.1)
    host, _, port = endpoint.rpartition(":")
    with (
        socket.create_server((host, int(port))),
        pytest.raises(NoStore, match=said % "timed out"),
    ):
        TorchRendezvous(where, 0).meet(1, 1)


@pytest.mark.parametrize(
    ("backend", "why"), [("nowhere", "nowhere"), ("static", "Port is absent"), ("etcd-v2", "etcd")]
)
def test_what_there_is_not(backend: str, why: str) -> None:
    """One line that says which, and why."""
    rank = TorchRendezvous(TorchStore(backend, "127.0.0.1", "world"), 0)
    with pytest.raises(NoStore, match=why) as found:
        rank.meet(1, 1)
    assert "\n" not in str(found.value)
