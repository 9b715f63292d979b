"""Tests of `nbdist.values.links`: keys of objects and of memory, as long as these exist."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from nbdist.values import links as module
from nbdist.values.links import Links, MemoryBlock


class Thing:
    """An object that Python can refer to weakly."""


@pytest.fixture
def links() -> Links:
    return Links()


def add(links: Links, value: Any, tool: str = "list") -> int:
    """Give an object a key; `tool` is as in `LinkEntry`. Return the key."""
    return links.add(value, tool).key


def unused(links: Links) -> tuple[int, ...]:
    """Drop unused objects; return the keys of objects that have ended."""
    links.drop_unused()
    return links.pop_dead_keys()


def test_an_object_has_one_key(links: Links) -> None:
    """An object is found by its key, and an equal object has another key or none."""
    x, y, thing = [1], [1], Thing()
    keys = [add(links, each) for each in (x, y, thing)]
    assert len({*keys}) == len(links) == 3
    assert [add(links, each) for each in (x, y, thing)] == keys
    assert [links.key_of(each) for each in (x, y, thing, [1], 5)] == [*keys, None, None]
    assert [links.find(key) is each for key, each in zip(keys, (x, y, thing), strict=True)]
    assert links.find(links.new_key()) is None
    assert {entry.key for entry in links.entries()} == {*keys}
    assert {entry.tool for entry in links.entries()} == {"list"}


def test_keys_of_two_tables_never_meet() -> None:
    """The first keys of 100 tables are more than 1000 apart, and fit into 63 bits."""
    keys = [Links().new_key() for _ in range(100)]
    distances = [b - a for a, b in zip(sorted(keys), sorted(keys)[1:], strict=False)]
    assert min(distances) > 1000
    assert all(0 <= key < 2**63 for key in keys)


def test_the_newest_object_with_a_key_has_it(links: Links) -> None:
    """A key belongs to the object that got it last, and an object has the newest of its keys."""
    first, second = [1], [2]
    links.add(first, "list", 5)
    links.add(first, "list", 6)
    assert (links.find(5), links.key_of(first), len(links)) == (None, 6, 1)
    links.add(second, "list", 6)
    assert (links.find(6) is second, links.key_of(first)) == (True, None)
    assert links.add(second, "list").key == 6
    assert links.pop_dead_keys() == (), "no object has ended"


def test_an_object_with_a_key_can_end(links: Links) -> None:
    """The table keeps no weakly referable object alive, and reports its dead key once."""
    thing, other = Thing(), Thing()
    key, other_key = add(links, thing), add(links, other)
    assert (links.pop_dead_keys(), links.has_dead) == ((), False)
    del thing
    assert links.has_dead
    assert (links.find(key), links.find(other_key)) == (None, other)
    assert [links.pop_dead_keys() for _ in range(2)] == [(key,), ()]


def test_a_new_object_at_an_old_address_has_no_key(links: Links) -> None:
    """A new object does not get the key of an object that has ended at the same address."""
    for _ in range(100):
        thing = Thing()
        number, key = id(thing), add(links, thing)
        del thing
        others = [Thing() for _ in range(10)]
        assert all(links.key_of(each) is None for each in others)
        if number in map(id, others):
            assert links.pop_dead_keys() == (key,)
            return
    pytest.fail("no address was used again")


MAKERS: dict[str, Callable[[], Any]] = {
    "list": lambda: [1],
    "dict": lambda: {"a": 1},
    "bytearray": lambda: bytearray(5),
    "slots": type("Slots", (), {"__slots__": ("a",)}),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_objects_that_only_the_table_holds_are_dropped(kind: str, links: Links) -> None:
    """An object stays in the table as long as a variable or another object refers to it."""
    value = MAKERS[kind]()
    key = add(links, value)
    assert unused(links) == ()
    held, value = [value], None
    assert unused(links) == ()
    assert links.find(key) is held[0]
    held.clear()
    assert (unused(links), links.find(key), len(links)) == ((key,), None, 0)


def test_parts_of_dropped_objects_are_dropped_too(links: Links) -> None:
    """Parts of a dropped object are dropped at any depth, unless a variable refers to them."""
    inner: list[Any] = [1]
    outer: Any = inner
    keys = [add(links, inner)]
    for _ in range(50):
        outer = [outer]
        keys.append(add(links, outer))
    deep = weakref.ref(thing := Thing())
    inner.append(thing)
    del thing, inner
    assert unused(links) == ()
    middle = outer[0][0]
    outer = None
    assert {*unused(links)} == {*keys[-2:]}
    assert deep() is not None
    del middle
    assert {*unused(links)} == {*keys[:-2]}
    assert deep() is None


def test_a_long_chain_of_objects_is_dropped(links: Links) -> None:
    """3000 lists, each of which contains the next, are dropped by a single call."""
    chain: list[Any] = []
    for _ in range(3000):
        chain = [chain]
        add(links, chain)
    del chain
    links.drop_unused()
    assert len(links.pop_dead_keys()) == 3000


def test_a_cycle_of_objects_stays_until_it_is_broken(links: Links) -> None:
    """An object that refers to itself looks used, and stays in the table with its parts."""
    loop: list[Any] = []
    loop.append(loop)
    key = add(links, loop)
    found = weakref.ref(thing := Thing())
    loop.append(thing)
    del thing
    thing_key = add(links, found())
    del loop
    gc.collect()
    assert unused(links) == ()
    links.find(key).clear()
    assert {*unused(links)} == {key, thing_key}
    assert found() is None


def test_an_object_can_get_another_key(links: Links) -> None:
    """The old key is dead for the other process, and the new key leads to the object."""
    x = [1]
    entry = links.add(x, "list")
    old = entry.key
    links.renew(entry)
    assert entry.key != old
    assert (links.find(old), links.find(entry.key), links.key_of(x)) == (None, x, entry.key)
    assert links.pop_dead_keys() == (old,)
    del x, entry
    assert len(unused(links)) == 1


def test_forgotten_keys_are_not_reported_as_dead(links: Links) -> None:
    """Keys that the other process has dropped are dropped here too; unknown keys are no error."""
    x, thing, array = [1], Thing(), np.zeros(9)
    keys = [add(links, x), add(links, thing), block_of(links, array).key]
    links.forget([*keys, 5])
    assert (len(links), [*map(links.find, keys)]) == (0, [None] * 3)
    del thing, array
    assert links.pop_dead_keys() == ()


# --- memory -----------------------------------------------------------------------------


def span(array: Any) -> tuple[int, int]:
    """Return where an array begins and ends."""
    start = array.__array_interface__["data"][0]
    return start, start + array.nbytes


def block_of(links: Links, view: Any, root: Any = None) -> MemoryBlock:
    """Return the block of a view of the array `root`, by default of the view alone."""
    root = view if root is None else root
    return links.blocks.find_or_add(*span(view), span(root), lambda: weakref.ref(root), "cpu")


def test_views_of_one_memory_have_one_block(links: Links) -> None:
    """The block of the first view covers the whole small memory, and serves later views too."""
    array = np.zeros(1000)
    first = block_of(links, array[10:20], array)
    assert (first.start, first.end, first.size) == (*span(array), 8000)
    assert block_of(links, array[500:], array) is block_of(links, array) is first
    assert links.find(first.key) is array
    assert (len(links.blocks), [*links.blocks], links.blocks.get(first.key)) == (1, [first], first)


def test_a_small_view_has_its_own_block(links: Links, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small view has a block of its own, which begins at a multiple of 64 bytes.

    The block of a view of over half of the memory covers all of the memory.
    """
    monkeypatch.setattr(module, "MAX_WHOLE_BYTES", 1000)
    array = np.zeros(1000)
    part = block_of(links, array[101:200], array)
    start, end = span(array[101:200])
    assert (part.start, part.end) == (start - (start - span(array)[0]) % 64, end)
    assert block_of(links, array[150:160], array) is part
    beside = block_of(links, array[150:250], array)
    assert beside is not part
    whole = block_of(links, array[:600], array)
    assert whole.size == 8000
    assert block_of(links, array[300:310], array) is whole
    assert block_of(links, array[900:], array) is whole
    assert len(links) == 3


def test_only_bytes_within_a_block_are_known(links: Links) -> None:
    """A block is found for bytes within its range, of the same memory and the same device."""
    array, other = np.zeros(100), np.zeros(100)
    block = block_of(links, array)
    start, end = span(array)
    find = links.blocks.find_containing
    assert find(start + 8, end, start, "cpu") is block
    assert find(start, end + 1, start, "cpu") is None
    assert find(start - 1, end, start - 1, "cpu") is None
    assert find(start, end, start, "cuda") is None
    assert find(*span(other), span(other)[0], "cpu") is None
    assert find(start + 8, end, start + 8, "cpu") is None, "another allocation begins there"


def test_the_key_of_freed_memory_is_dead(links: Links) -> None:
    """The key of freed memory is dead, and new memory at its address has another key."""
    array = np.zeros(1 << 16)
    block = block_of(links, array)
    bounds = span(array)
    del array
    assert links.blocks.find_containing(*bounds, bounds[0], "cpu") is None
    assert [links.pop_dead_keys() for _ in range(2)] == [(block.key,), ()]
    again = np.zeros(10)
    key = block_of(links, again).key
    del again
    assert links.pop_dead_keys() == (key,)
    assert (len(links.blocks), links.find(key)) == (0, None)
    owner = Thing()
    for _ in range(2):
        old = owner
        found = links.blocks.find_or_add(64, 128, (64, 128), lambda of=old: weakref.ref(of), "cpu")
        assert found.owner() is old
        owner, old = Thing(), None
    assert len(links.pop_dead_keys()) == 2


def test_memory_stays_known_while_a_ranks_tensor_uses_it(links: Links) -> None:
    """The key of memory is not dead until the rank's tensor ends, though the array has ended."""
    array, tensor = np.zeros(9), torch.zeros(9, dtype=torch.float64)
    block = block_of(links, array)
    block.users.append(weakref.ref(tensor))
    del array
    assert links.pop_dead_keys() == ()
    assert links.blocks.get(block.key) is block
    del tensor
    assert links.pop_dead_keys() == (block.key,)


def test_copied_elements_have_one_block(links: Links) -> None:
    """A block of copied elements is found by their description, and covers no memory."""
    owner, blocks = Thing(), links.blocks
    what = (64, 1 << 30, "float32", (2,), (1000,))
    assert blocks.get_copied(what) is None
    ref = weakref.ref(owner)
    block = blocks.add_copied(what, lambda: ref, "cpu")
    assert blocks.add_copied(what, lambda: ref, "cpu") is block
    assert (blocks.get_copied(what), block.size, block.copied) == (block, 0, what)
    assert blocks.find_containing(64, 128, 64, "cpu") is None
    other = Thing()  # another object that keeps the same memory alive
    other_ref = weakref.ref(other)
    assert blocks.add_copied(what, lambda: other_ref, "cpu") is block
    del owner
    assert links.pop_dead_keys() == ()
    del other
    assert links.pop_dead_keys() == (block.key,)
    assert blocks.get_copied(what) is None
