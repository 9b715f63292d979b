"""Tests of `nbdist.world.sent_objects`: the objects that ranks have, and changes of objects."""

from __future__ import annotations

import pytest

from nbdist.values.links import Links
from nbdist.values.states import ObjectState
from nbdist.world.sent_objects import NOTHING_SENT, Parcel, SentObjects


class Thing:
    """An object that Python can refer to weakly."""


def state(number: int = 0, children: tuple[int, ...] = ()) -> ObjectState:
    """Return a state that differs for each number."""
    return ObjectState({"a": number}, children)


@pytest.fixture
def objects() -> SentObjects:
    """The table of two ranks: rank 0 has the objects 1 and 2, and rank 1 has only the object 1."""
    objects = SentObjects()
    objects.record_finished(0, Parcel(states={1: state(), 2: state(2, (1,))}), ())
    objects.record_finished(1, Parcel(states={1: state()}), ())
    return objects


def test_ranks_have_the_states_that_were_sent(objects: SentObjects) -> None:
    """A rank has objects in the states that it was sent, but no object that has ended there."""
    assert objects.of(0) == {1: state(), 2: state(2)}
    assert (objects.ranks_with(1), objects.ranks_with(2)) == ({0, 1}, {0})
    objects.record_finished(0, Parcel(states={1: state(5)}), (2, 7))
    assert objects.of(0) == {1: state(5)}
    assert objects.of(1) == {1: state()}
    objects.drop(1, (1,))
    assert (objects.of(1), objects.of(2)) == ({}, {})
    assert objects.ranks_with(1) == {0}


def test_a_value_leads_to_objects_as_sent(objects: SentObjects) -> None:
    """`reach` follows a value to objects as they were sent to the rank, even in a circle."""
    assert objects.reach(0, ("t", (..., 2), 5)) == {1, 2}
    assert objects.reach(1, ("t", (..., 2))) == {2}, (
        "rank 1 was not sent object 2, which leads to object 1"
    )
    assert objects.reach(0, 5) == objects.reach(0, "text") == set()
    objects.record_finished(0, Parcel(states={1: state(1, (2,))}), ())
    assert objects.reach(0, (..., 1)) == {1, 2}, "also in a circle"


def test_objects_are_compared_once_after_each_run(objects: SentObjects) -> None:
    """After the notebook has run code, a rank's objects may differ until they are compared."""
    assert objects.may_differ([0])
    objects.record_finished(0, Parcel(compared=objects.runs), ())
    assert [objects.may_differ(ranks) for ranks in ([0], [1], [0, 1], [])] == [
        False,
        True,
        True,
        False,
    ]
    objects.record_finished(0, NOTHING_SENT, ())
    assert not objects.may_differ([0])
    objects.runs += 1
    assert objects.may_differ([0])
    objects.record_finished(0, Parcel(compared=objects.runs), ())
    objects.record_replaced([0])
    assert objects.may_differ([0])


def test_parts_that_ranks_keep_are_not_sent(objects: SentObjects) -> None:
    """Only parts that no rank keeps are sent, until a push overwrites the whole object."""
    parts = frozenset({"a", "b"})
    assert objects.sendable_parts(1, parts) == parts
    assert objects.sendable_parts(1, None) is True
    objects.record_kept(1, frozenset({"a"}))
    assert objects.sendable_parts(1, parts) == {"b"}
    assert objects.sendable_parts(1, frozenset({"a"})) is False
    assert objects.sendable_parts(1, None) is False
    objects.record_kept(1, frozenset({"b"}))
    assert objects.sendable_parts(1, parts | {"c"}) == {"c"}
    objects.record_kept(1, None)
    objects.record_kept(1, frozenset({"a"}))
    assert objects.sendable_parts(1, parts) is False
    assert objects.sendable_parts(2, parts) == parts
    objects.overwrite([1])
    assert objects.sendable_parts(1, parts) == parts


def test_changed_parts_are_added_up(objects: SentObjects) -> None:
    """Changed parts of an object are collected until the object is overwritten."""
    objects.record_changed({1: frozenset({"a"}), 2: None})
    objects.record_changed({1: frozenset({"b"}), 2: frozenset({"a"})})
    assert objects.changed == {1: {"a", "b"}, 2: None}
    objects.overwrite([2, 5])
    assert objects.changed == {1: {"a", "b"}}


def test_a_copy_ignores_later_changes(objects: SentObjects) -> None:
    """A copy of the table ignores later changes of the original, but shares the keys of objects."""
    objects.record_kept(1, None)
    copy = objects.copy()
    objects.record_finished(0, Parcel(states={1: state(9), 3: state()}), (2,))
    objects.overwrite([1])
    objects.record_changed({2: None})
    objects.record_finished(1, Parcel(compared=objects.runs), ())
    assert copy.of(0) == {1: state(), 2: state(2)}
    assert (copy.theirs, copy.changed) == ({1: None}, {})
    assert copy.may_differ([1])
    assert copy.links is objects.links


def test_new_ranks_have_no_objects(objects: SentObjects) -> None:
    """A rank that gets another number keeps its objects, and a new rank has no objects."""
    objects.record_finished(1, Parcel(compared=objects.runs), ())
    objects.record_replaced([0])
    assert (objects.of(0), objects.of(1)) == ({}, {1: state()})
    objects.renumber({0: 1}, 3)
    assert [objects.of(rank) for rank in range(3)] == [{1: state()}, {}, {}]
    assert objects.ranks_with(1) == {0}
    objects.renumber({}, 1)
    assert (objects.known, objects.may_differ([0])) == ({0: {}}, True)


def test_a_copied_object_has_the_source_ranks_state(objects: SentObjects) -> None:
    """A rank that gets an object from another rank gets the state that the other rank was sent."""
    objects.record_copies(0, 1, (2, 7))
    assert objects.of(1) == {1: state(), 2: state(2)}
    objects.record_copies(0, 2, (1,))
    assert objects.of(2) == {1: state()}


def test_each_rank_forgets_an_ended_object_once(objects: SentObjects) -> None:
    """A rank's objects that ended in the notebook are listed once for the rank, however late."""
    links = Links()
    objects.links = links
    thing, row = Thing(), [1]
    keys = links.add(thing, "instance").key, links.add(row, "list").key
    parcel = Parcel(states=dict.fromkeys(keys, state()))
    for rank in (0, 1):
        objects.record_finished(rank, parcel, ())
    objects.record_kept(keys[0], None)
    objects.record_changed({keys[0]: None})
    assert objects.pop_forgotten([0]) == {}
    del thing
    assert objects.pop_forgotten([0]) == {0: (keys[0],)}
    assert (objects.theirs, objects.changed) == ({}, {})
    del row
    assert objects.pop_forgotten([0]) == {}, (
        "a list has no weak references, so nothing has noticed its end"
    )
    links.has_dead = True
    assert objects.pop_forgotten([0]) == {0: (keys[1],)}
    forgotten = objects.pop_forgotten([0, 1])
    assert {*forgotten[1]} == {*keys}
    assert forgotten.keys() == {1}
    assert objects.pop_forgotten([0, 1]) == {}
    assert not objects.of(0).keys() & {*keys}


def test_an_object_that_some_ranks_have_kept_gets_a_new_key(objects: SentObjects) -> None:
    """An argument gets a new key if only some ranks keep it, and no other object of theirs does."""
    links = objects.links
    things = partly, everywhere, nowhere, held = [Thing() for _ in range(4)]
    keys = [links.add(thing, "instance").key for thing in things]
    holder = links.add(Thing(), "instance").key
    states = dict.fromkeys(keys, state())
    objects.record_finished(0, Parcel(states={**states, holder: state(0, (keys[3],))}), (keys[2],))
    objects.record_finished(1, Parcel(states=states), (keys[0], keys[2], keys[3]))
    objects.renew_partly_kept({0: keys, 1: keys})
    assert links.key_of(partly) not in (None, keys[0])
    assert [links.key_of(each) for each in (everywhere, nowhere, held)] == keys[1:]
