"""Tests of `nbdist.worker.store`: called as C++ calls it, through a PrefixStore."""

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
from torch.distributed import DistStoreError

from nbdist.worker.store import FreeableStore


@pytest.fixture
def store(tmp_path: Path) -> FreeableStore:
    return FreeableStore(FileStore(str(tmp_path / "store"), 1), timeout=30.0)


@contextmanager
def waiting(store: FreeableStore, key: str) -> Iterator[Future[bytes]]:
    """While another thread waits for the key."""
    with ThreadPoolExecutor() as pool:
        got = pool.submit(PrefixStore("a", store).get, key)
        while not store.is_waited_in:
            assert not got.done()
            time.sleep(0.001)
        yield got


def test_all_that_is_asked_of_a_store(store: FreeableStore) -> None:
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
    assert repr(store) == "<FreeableStore at rest>"


def test_what_comes_later_is_waited_for(store: FreeableStore) -> None:
    """Whoever waits has it as soon as it is there."""
    with waiting(store, "key") as got:
        assert repr(store) == "<FreeableStore waits for ['a/key']>"
        store.set("a/key", "value")
        assert not store.is_waited_in
        assert got.result(timeout=1.0) == b"value"


def test_what_never_comes(store: FreeableStore) -> None:
    """A wait ends as FileStore's does, after its own time or the store's."""
    with pytest.raises(DistStoreError, match="wait timeout: a/key"):
        PrefixStore("a", store).wait(["key"], timedelta(seconds=0.05))
    store.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(DistStoreError, match="wait timeout: a/key"):
        PrefixStore("a", store).get("key")


def test_freed(store: FreeableStore) -> None:
    """Whoever waits is out at once, and who is going to; then it can be used again."""
    with waiting(store, "key") as got:
        freed = time.monotonic()
        store.free()
        with pytest.raises(ConnectionResetError, match="Connection closed by peer"):
            got.result(timeout=1.0)
        sys.stdout.write(f"{time.monotonic() - freed:.2f} s\n")
    with pytest.raises(ConnectionResetError):
        store.get("key")
    store.start_over()
    with waiting(store, "key") as got:
        store.set("a/key", "value")
        assert got.result(timeout=1.0) == b"value"
