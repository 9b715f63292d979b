"""Tests of `nbdist.values.links`: keys of objects, and of memory, as long as these are there."""

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
    """Give an object a key."""
    return links.add(value, tool).key


def unused(links: Links) -> tuple[int, ...]:
    """Return the keys of the objects that are dropped now."""
    links.drop_unused()
    return links.pop_dead_keys()


def test_an_object_has_one_key(links: Links) -> None:
    """The object is found by its key, and an equal one has another key, or none."""
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
    """Not even those of many objects, and no table starts where another one has started."""
    keys = [Links().new_key() for _ in range(100)]
    distances = [b - a for a, b in zip(sorted(keys), sorted(keys)[1:], strict=False)]
    assert min(distances) > 1000
    assert all(0 <= key < 2**63 for key in keys)


def test_a_given_key(links: Links) -> None:
    """The newest object with a key has it, and an object has the newest of its keys."""
    first, second = [1], [2]
    links.add(first, "list", 5)
    links.add(first, "list", 6)
    assert (links.find(5), links.key_of(first), len(links)) == (None, 6, 1)
    links.add(second, "list", 6)
    assert (links.find(6) is second, links.key_of(first)) == (True, None)
    assert links.add(second, "list").key == 6
    assert links.pop_dead_keys() == (), "no object has ended"


def test_an_object_that_ends(links: Links) -> None:
    """The table does not keep it alive if it can be referred to weakly; its key is dead, once."""
    thing, other = Thing(), Thing()
    key, other_key = add(links, thing), add(links, other)
    assert (links.pop_dead_keys(), links.has_dead) == ((), False)
    del thing
    assert links.has_dead
    assert (links.find(key), links.find(other_key)) == (None, other)
    assert [links.pop_dead_keys() for _ in range(2)] == [(key,), ()]


def test_the_address_of_an_object_that_ended(links: Links) -> None:
    """Another object at the same address has no key."""
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
def test_what_only_the_table_holds(kind: str, links: Links) -> None:
    """It is dropped; what a variable, another object or a frame holds is not."""
    value = MAKERS[kind]()
    key = add(links, value)
    assert unused(links) == ()
    held, value = [value], None
    assert unused(links) == ()
    assert links.find(key) is held[0]
    held.clear()
    assert (unused(links), links.find(key), len(links)) == ((key,), None, 0)


def test_what_is_inside_of_what_is_dropped(links: Links) -> None:
    """It is dropped too, however deep it is, unless it is held otherwise."""
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


def test_many_objects_in_a_row(links: Links) -> None:
    """They are dropped in time, also if each one holds the next."""
    chain: list[Any] = []
    for _ in range(3000):
        chain = [chain]
        add(links, chain)
    del chain
    links.drop_unused()
    assert len(links.pop_dead_keys()) == 3000


def test_what_refers_to_itself(links: Links) -> None:
    """Python cannot see that nothing else holds it: it stays until the cycle is broken."""
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


def test_another_key_for_an_object(links: Links) -> None:
    """The old one is dead for the other process, and the object is found by the new one."""
    x = [1]
    entry = links.add(x, "list")
    old = entry.key
    links.renew(entry)
    assert entry.key != old
    assert (links.find(old), links.find(entry.key), links.key_of(x)) == (None, x, entry.key)
    assert links.pop_dead_keys() == (old,)
    del x, entry
    assert len(unused(links)) == 1


def test_what_ends_in_the_other_process(links: Links) -> None:
    """Its key is dropped here, and not reported as dead; unknown keys are no error."""
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
    """Return the block of a view of an array."""
    root = view if root is None else root
    return links.blocks.find_or_add(*span(view), span(root), lambda: weakref.ref(root), "cpu")


def test_views_of_one_memory_have_one_block(links: Links) -> None:
    """The first view brings all of it, unless it is big: then as much as the view shows."""
    array = np.zeros(1000)
    first = block_of(links, array[10:20], array)
    assert (first.start, first.end, first.size) == (*span(array), 8000)
    assert block_of(links, array[500:], array) is block_of(links, array) is first
    assert links.find(first.key) is array
    assert (len(links.blocks), [*links.blocks], links.blocks.get(first.key)) == (1, [first], first)


def test_a_part_of_big_memory(links: Links, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a block of its own, from a whole number of elements on; more than half brings all."""
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


def test_known_memory(links: Links) -> None:
    """Only bytes that are within a block, of the same memory and device, are known."""
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


def test_memory_that_is_free(links: Links) -> None:
    """Its key is dead, and new memory at the same address has another key."""
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


def test_memory_that_a_tensor_of_a_rank_uses(links: Links) -> None:
    """It is not free until the tensor ends, though what it came in has ended."""
    array, tensor = np.zeros(9), torch.zeros(9, dtype=torch.float64)
    block = block_of(links, array)
    block.users.append(weakref.ref(tensor))
    del array
    assert links.pop_dead_keys() == ()
    assert links.blocks.get(block.key) is block
    del tensor
    assert links.pop_dead_keys() == (block.key,)


def test_elements_that_are_copied_together(links: Links) -> None:
    """They are known by what they are, and cover no memory."""
    owner, blocks = Thing(), links.blocks
    what = (64, 1 << 30, "float32", (2,), (1000,))
    assert blocks.get_copied(what) is None
    ref = weakref.ref(owner)
    block = blocks.add_copied(what, lambda: ref, "cpu")
    assert blocks.add_copied(what, lambda: ref, "cpu") is block
    assert (blocks.get_copied(what), block.size, block.copied) == (block, 0, what)
    assert blocks.find_containing(64, 128, 64, "cpu") is None
    other = Thing()  # it keeps the same memory alive
    other_ref = weakref.ref(other)
    assert blocks.add_copied(what, lambda: other_ref, "cpu") is block
    del owner
    assert links.pop_dead_keys() == ()
    del other
    assert links.pop_dead_keys() == (block.key,)
    assert blocks.get_copied(what) is None
