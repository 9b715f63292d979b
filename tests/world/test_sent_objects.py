"""Tests of `nbdist.world.sent_objects`: which objects ranks have, and what they have changed."""

from __future__ import annotations

import pytest

from nbdist.values.links import Links
from nbdist.values.states import ObjectState
from nbdist.world.sent_objects import NOTHING_SENT, Parcel, SentObjects


class Thing:
    """An object that Python can refer to weakly."""


def state(number: int = 0, children: tuple[int, ...] = ()) -> ObjectState:
    """Return a state that is another one for each number."""
    return ObjectState({"a": number}, children)


@pytest.fixture
def objects() -> SentObjects:
    """Two ranks, of which the first has two objects and the other one."""
    objects = SentObjects()
    objects.record_finished(0, Parcel(states={1: state(), 2: state(2, (1,))}), ())
    objects.record_finished(1, Parcel(states={1: state()}), ())
    return objects


def test_what_ranks_have(objects: SentObjects) -> None:
    """The states in which they were sent; not what has ended there."""
    assert objects.of(0) == {1: state(), 2: state(2)}
    assert (objects.ranks_with(1), objects.ranks_with(2)) == ({0, 1}, {0})
    objects.record_finished(0, Parcel(states={1: state(5)}), (2, 7))
    assert objects.of(0) == {1: state(5)}
    assert objects.of(1) == {1: state()}
    objects.drop(1, (1,))
    assert (objects.of(1), objects.of(2)) == ({}, {})
    assert objects.ranks_with(1) == {0}


def test_what_a_value_leads_to(objects: SentObjects) -> None:
    """As it was sent to a rank, whatever it leads to now."""
    assert objects.reach(0, ("t", (..., 2), 5)) == {1, 2}
    assert objects.reach(1, ("t", (..., 2))) == {2}, "this rank has been sent nothing of it"
    assert objects.reach(0, 5) == objects.reach(0, "text") == set()
    objects.record_finished(0, Parcel(states={1: state(1, (2,))}), ())
    assert objects.reach(0, (..., 1)) == {1, 2}, "also in a circle"


def test_whether_to_compare(objects: SentObjects) -> None:
    """Once after each run of the notebook's code, for each rank; a push compares for none."""
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


def test_what_both_have_changed(objects: SentObjects) -> None:
    """The ranks' parts are not sent; other parts are, until a push overwrites all."""
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


def test_what_ranks_have_changed(objects: SentObjects) -> None:
    """Whether the notebook has changed it or not, part by part."""
    objects.record_changed({1: frozenset({"a"}), 2: None})
    objects.record_changed({1: frozenset({"b"}), 2: frozenset({"a"})})
    assert objects.changed == {1: {"a", "b"}, 2: None}
    objects.overwrite([2, 5])
    assert objects.changed == {1: {"a", "b"}}


def test_a_copy(objects: SentObjects) -> None:
    """It stays as it is; keys are the same in both."""
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


def test_ranks_that_are_new(objects: SentObjects) -> None:
    """They have nothing; those that get other numbers keep what they have."""
    objects.record_finished(1, Parcel(compared=objects.runs), ())
    objects.record_replaced([0])
    assert (objects.of(0), objects.of(1)) == ({}, {1: state()})
    objects.renumber({0: 1}, 3)
    assert [objects.of(rank) for rank in range(3)] == [{1: state()}, {}, {}]
    assert objects.ranks_with(1) == {0}
    objects.renumber({}, 1)
    assert (objects.known, objects.may_differ([0])) == ({0: {}}, True)


def test_what_one_rank_gets_from_another(objects: SentObjects) -> None:
    """It has the states that were sent to the other one."""
    objects.record_copies(0, 1, (2, 7))
    assert objects.of(1) == {1: state(), 2: state(2)}
    objects.record_copies(0, 2, (1,))
    assert objects.of(2) == {1: state()}


def test_what_has_ended_in_the_notebook(objects: SentObjects) -> None:
    """Each rank that has it is told once; also a rank that gets no task until later."""
    links = Links()
    objects.links = links
    thing, row = Thing(), [1]
    keys = links.add(thing, "instance").key, links.add(row, "list").key
    both = Parcel(states=dict.fromkeys(keys, state()))
    for rank in (0, 1):
        objects.record_finished(rank, both, ())
    objects.record_kept(keys[0], None)
    objects.record_changed({keys[0]: None})
    assert objects.pop_forgotten([0]) == {}
    del thing
    assert objects.pop_forgotten([0]) == {0: (keys[0],)}
    assert (objects.theirs, objects.changed) == ({}, {})
    del row
    assert objects.pop_forgotten([0]) == {}, "nobody has noticed that a list has ended"
    links.has_dead = True
    assert objects.pop_forgotten([0]) == {0: (keys[1],)}
    found = objects.pop_forgotten([0, 1])
    assert {*found[1]} == {*keys}
    assert found.keys() == {1}
    assert objects.pop_forgotten([0, 1]) == {}
    assert not objects.of(0).keys() & {*keys}
