"""Tests of `nbdist.wire.store`: the store does what torch's own stores do, and answers waits.

Operations and answers are read as they were sent, or refused.
"""

from __future__ import annotations

import asyncio
import pickle
import struct

import pytest
from torch._C._distributed_c10d import HashStore, Store

from nbdist.wire.frames import BadFrame, FrameCutter
from nbdist.wire.store import (
    MAX_STORE_WAIT,
    Add,
    Append,
    CompareSet,
    Count,
    Delete,
    Get,
    HostedStore,
    Operation,
    Set,
    StoreRefused,
    StoreReply,
    Wait,
    answer_from,
    operation_from,
    to_frame,
)
from tests.waiting import SOON, until

OPERATIONS = [
    Set({"key": b"value", "": b""}),
    Get(("one", "two"), 1.5),
    Wait(("one",), 0),
    Add("count", -(10**30)),
    CompareSet("key", b"", b"\x00"),
    Append("key", b"more"),
    Delete("key"),
    Count(),
]

ANSWERS = [None, True, 7, b"value", (b"one", b""), StoreRefused("it is so.")]


def test_operations_and_answers_arrive_equal() -> None:
    """Each operation and answer is sent in one frame, and arrives equal."""
    for operation in OPERATIONS:
        (frame,) = FrameCutter().feed(to_frame(operation))
        assert operation_from(frame) == operation
    for answer in ANSWERS:
        (frame,) = FrameCutter().feed(to_frame(answer))
        assert answer_from(frame) == answer


NO_OPERATIONS = [
    Set({"key": "text"}),  # type: ignore[dict-item]
    Set({b"key": b""}),  # type: ignore[dict-item]
    Get(["key"], 1.0),  # type: ignore[arg-type]
    Get((1,), 1.0),  # type: ignore[arg-type]
    *(Wait((), seconds) for seconds in (-1.0, MAX_STORE_WAIT + 1, float("nan"))),
    Add("key", 1.5),  # type: ignore[arg-type]
    StoreRefused("no"),
    "Count()",
    print,
]


def test_wrong_operations_are_refused() -> None:
    """A rank's wrong operations are refused, and both ends refuse garbage."""
    garbage = [b"", b"garbage", struct.pack("!Q", 1 << 60)]
    for frame in (*garbage, *map(pickle.dumps, NO_OPERATIONS)):
        with pytest.raises(BadFrame):
            operation_from(frame)
    for frame in garbage:
        with pytest.raises(BadFrame):
            answer_from(frame)


def in_torch(store: Store, operation: Operation) -> object:
    """Return the answer of a store of torch to an operation."""
    match operation:
        case Set(values):
            for key, value in values.items():
                store.set(key, value.decode())
        case Get(keys):
            return tuple(store.get(key) for key in keys)
        case Wait(keys):
            return store.check([*keys])
        case Add(key, amount):
            return store.add(key, amount)
        case CompareSet(key, expected, desired):
            return store.compare_set(key, expected.decode(), desired.decode())
        case Append(key, value):
            store.append(key, value.decode())
        case Delete(key):
            return store.delete_key(key)
    return None


async def test_the_store_answers_as_a_store_of_torch() -> None:
    """The store answers as a store of torch, for keys that exist and keys that do not."""
    operations: list[Operation] = [
        Wait(("a",)),
        Set({"a": b"1"}),
        Wait(("a",)),
        Wait(("a", "b")),
        Get(("a",), 1.0),
        Add("a", 2),
        Add("new", -5),
        Get(("a", "new"), 1.0),
        CompareSet("a", b"other", b"x"),
        CompareSet("a", b"3", b"x"),
        CompareSet("a", b"", b"y"),
        CompareSet("gone", b"expected", b"x"),
        Wait(("gone",)),
        CompareSet("gone", b"", b"first"),
        CompareSet("gone", b"", b"second"),
        Get(("gone",), 1.0),
        Delete("gone"),
        Wait(("gone",)),
        Delete("gone"),
        Append("a", b"yz"),
        Append("other", b"o"),
        Get(("a", "other"), 1.0),
    ]
    store, mine = HashStore(), HostedStore()
    for number, operation in enumerate(operations):
        answer = await mine.ask(operation)
        assert answer == in_torch(store, operation), f"{number}: {operation}"


async def test_nothing_is_added_to_a_text() -> None:
    """An addition to a text is refused, and the text stays until a new world begins."""
    store = HostedStore()
    await store.ask(Set({"key": b"text"}))
    answer = await store.ask(Add("key", 1))
    assert answer == StoreRefused("key holds b'text', to which no number can be added")
    assert await store.ask(Get(("key",), 0)) == (b"text",)
    assert await store.ask(Count()) == 1
    store.begin_world()
    assert await store.ask(Wait(("key",))) is False


async def waiting(store: HostedStore, operation: Operation) -> asyncio.Task[StoreReply]:
    """Return a task that waits for an answer of the store."""
    before = repr(store)
    asked = asyncio.create_task(store.ask(operation))
    await until(lambda: repr(store) != before)
    return asked


async def test_a_wait_is_answered_when_its_keys_are_there() -> None:
    """A wait is answered when all its keys exist, whichever operation has set the last key."""
    store = HostedStore()
    a, b = await waiting(store, Wait(("1", "2"), SOON)), await waiting(store, Get(("2",), SOON))
    assert await store.ask(Set({"1": b"x"})) is None
    assert repr(store) == "<HostedStore 1 keys, 2 wait>"
    assert await store.ask(Add("2", 3)) == 3
    assert (await a, await b) == (True, (b"3",))
    assert repr(store) == "<HostedStore 2 keys, 0 wait>"
    by: list[Operation] = [CompareSet("c", b"", b"v"), Append("d", b"v"), Set({"e": b"v"})]
    for key, operation in zip("cde", by, strict=True):
        asked = await waiting(store, Get((key,), SOON))
        await store.ask(operation)
        assert await asked == (b"v",)


async def test_a_wait_goes_on_for_a_deleted_key() -> None:
    """A wait goes on if one of its keys is deleted before the others exist."""
    store = HostedStore()
    await store.ask(Set({"1": b""}))
    asked = await waiting(store, Wait(("1", "2"), SOON))
    assert await store.ask(Delete("1")) is True
    await store.ask(Set({"2": b""}))
    assert "1 wait" in repr(store)
    await store.ask(Set({"1": b""}))
    await store.ask(Delete("1"))  # too late: the wait is over
    assert await asked is True


async def test_a_wait_ends_after_its_seconds() -> None:
    """A wait ends after its seconds, at once for 0 seconds, and when its task is cancelled."""
    store = HostedStore()
    assert await store.ask(Wait(("key",), 0.02)) is False
    assert await store.ask(Get(("key",), 0.0)) is None
    gone = await waiting(store, Get(("key",), SOON))
    gone.cancel()
    await asyncio.wait({gone})
    assert repr(store) == "<HostedStore 0 keys, 0 wait>"
