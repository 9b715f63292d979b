"""Tests of `nbdist.worker.group.stores`: called as C++ calls it, through a PrefixStore."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from nbdist.worker.group.stores import AbortableStore


@pytest.fixture
def store(tmp_path: Path) -> AbortableStore:
    return AbortableStore(FileStore(str(tmp_path / "store"), 1), timeout=30.0)


@contextmanager
def waiting(store: AbortableStore, key: str) -> Iterator[Future[bytes]]:
    """While another thread waits for the key."""
    with ThreadPoolExecutor() as pool:
        got = pool.submit(PrefixStore("a", store).get, key)
        while not store.is_waited_in:
            assert not got.done()
            time.sleep(0.001)
        yield got


def test_all_that_is_asked_of_a_store(store: AbortableStore) -> None:
    """Whatever C++ calls reaches the other store."""
    asked: Store = PrefixStore("a", store)
    asked.set("key", "value")
    assert asked.get("key") == b"value"
    asked.wait(["key"])
    asked.wait(["key"], timedelta(seconds=1))
    assert (asked.check(["key"]), asked.check(["other"])) == (True, False)
    assert [asked.add("count", 2), asked.add("count", 3)] == [2, 5]
    assert asked.compare_set("key", "value", "changed") == b"changed"
    assert asked.multi_get(["key", "count"]) == [b"changed", b"5"]
    assert asked.num_keys() >= 2
    assert asked.delete_key("key")
    assert not asked.check(["key"])
    assert repr(store) == "<AbortableStore at rest>"


def test_aborted(store: AbortableStore) -> None:
    """Each wait ends at once, also one that begins later; then the store can be used again."""
    with waiting(store, "key") as got:
        aborted = time.monotonic()
        store.abort()
        with pytest.raises(ConnectionResetError, match="Connection closed by peer"):
            got.result(timeout=1.0)
        sys.stdout.write(f"{time.monotonic() - aborted:.2f} s\n")
    with pytest.raises(ConnectionResetError):
        store.get("key")
    store.start_over()
    with waiting(store, "key") as got:
        store.set("a/key", "value")
        assert got.result(timeout=1.0) == b"value"
