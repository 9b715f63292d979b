"""Tests of `nbdist.world.outgoing`: what has changed, what ranks are asked, and what goes."""

from __future__ import annotations

from typing import Any

import pytest

from nbdist.values.states import HEAD_PART, ObjectState
from nbdist.wire.ops import Inspected
from nbdist.world.outgoing import Outgoing, merged
from nbdist.world.sent_objects import Parcel, SentObjects


class Made:
    """An instance that its arguments make what it is."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return Made, (self.number,)


class Lab:
    """Two ranks, and what they are sent."""

    def __init__(self) -> None:
        self.objects = SentObjects()

    def looked(self, *values: Any, forces: bool = False) -> Outgoing:
        """Look at values, and compare what they lead to."""
        self.objects.runs += 1
        outgoing = Outgoing(self.objects, {}, frozenset({0, 1}), forces=forces)
        for value in values:
            outgoing.scan_value(value)
        outgoing.compare()
        return outgoing

    def send(self, *values: Any, ranks: tuple[int, ...] = (0, 1), forces: bool = False) -> Outgoing:
        """Send values to ranks, which have changed nothing."""
        outgoing = self.looked(*values, forces=forces)
        for rank in ranks:
            _, states = outgoing.message(dict(enumerate(values)), rank)
            self.objects.record_finished(rank, Parcel(states=states), ())
        return outgoing

    def key(self, value: Any) -> int:
        """Return the key of an object."""
        key = self.objects.links.key_of(value)
        assert key is not None
        return key


@pytest.fixture
def lab() -> Lab:
    return Lab()


def test_what_has_changed(lab: Lab) -> None:
    """By rank, object and part, as each rank has been sent it; also what no value leads to."""
    cfg, rows = {"a": 1, "b": 2}, [1]
    lab.send(cfg)
    lab.send(rows, ranks=(0,))
    assert lab.looked(cfg, rows).changed == {0: {}, 1: {}}
    cfg["a"] = 5
    rows.append(2)
    both = {lab.key(cfg): {"a"}, lab.key(rows): None}
    assert lab.looked(cfg, rows).changed == {0: both, 1: {lab.key(cfg): {"a"}}}
    assert lab.looked("nothing").changed[0] == both
    lab.send(cfg, ranks=(1,))
    assert lab.looked(cfg).changed == {0: both, 1: {}}


def test_what_is_asked(lab: Lab) -> None:
    """The parts that any rank is to get; the whole object if another one takes its place."""
    cfg, made = {"a": 1, "b": 2}, Made(1)
    lab.send(cfg, made, [3])
    assert lab.looked(cfg, made).objects_to_inspect() == {}
    cfg["a"] = 5
    lab.send(cfg, ranks=(0,))
    cfg["b"] = 6
    made.number = 2
    assert lab.looked(cfg, made).changed[1][lab.key(made)] == {HEAD_PART}
    assert lab.looked(cfg, made).objects_to_inspect() == {
        lab.key(cfg): {"a", "b"},
        lab.key(made): None,
    }


def test_what_ranks_keep(lab: Lab) -> None:
    """Parts that both have changed; a line is wanted once for each state of the notebook's."""
    cfg = {"a": 1, "b": 2}
    lab.send(cfg)
    key = lab.key(cfg)
    cfg.update(a=5, b=6)
    outgoing = lab.looked(cfg)
    outgoing.apply_replies({0: Inspected({key: frozenset({"a", "c"})}), 1: Inspected()})
    assert outgoing.changed == {0: {key: {"b"}}, 1: {key: {"b"}}}
    assert [outgoing.kept() for _ in range(2)] == [{key: {"a"}}, {}]
    cfg["a"] = 7
    assert lab.looked(cfg).kept() == {key: {"a"}}
    forced = lab.looked(cfg, forces=True)
    assert forced.changed[0] == {key: None}


def test_what_has_ended_on_a_rank(lab: Lab) -> None:
    """It is no counterpart any more: the rank gets the object itself."""
    rows = [1]
    lab.send(rows)
    rows.append(2)
    outgoing = lab.looked(rows)
    outgoing.apply_replies({0: Inspected(gone=(lab.key(rows),))})
    assert outgoing.changed == {0: {}, 1: {lab.key(rows): None}}
    assert outgoing.message({"rows": rows}, 0)[0].keys == {lab.key(rows)}
    assert outgoing.message({"rows": rows}, 1)[0].keys == set()


def test_what_is_replaced(lab: Lab) -> None:
    """It gets another key, and so what refers to it is changed."""
    made = Made(1)
    rows = [made]
    lab.send(rows)
    old = lab.key(made)
    made.number = 2
    outgoing = lab.looked(rows)
    assert outgoing.renew_replaced()
    assert lab.key(made) != old
    outgoing.scan_value(rows)
    outgoing.compare()
    assert outgoing.changed[0] == {lab.key(rows): None}
    assert not outgoing.renew_replaced()


def test_ranks_that_lack_the_same(lab: Lab) -> None:
    """They share a message: those that have been sent the same, and want the same names."""
    rows = [1]
    lab.send(rows, ranks=(0,))
    assert lab.looked(rows).groups({}) == [(0,), (1,)]
    lab.objects.record_copies(0, 1, (lab.key(rows),))
    assert lab.looked(rows).groups({}) == [(0, 1)]
    assert lab.looked(rows).groups({0: ["x"], 1: []}) == [(0,), (1,)]


def test_what_a_new_rank_gets(lab: Lab) -> None:
    """Everything, whatever other ranks have; what cannot be looked at raises, and it goes on."""
    rows = [[1], {"a": 1}]
    lab.send(rows)
    outgoing = lab.looked(rows)
    message, states = outgoing.whole({"rows": rows})
    assert message.keys == states.keys() == outgoing.states.keys()
    with pytest.raises(TypeError, match="cannot pickle"):
        outgoing.scan_value([(each for each in rows)])
    outgoing.scan_value(rows)
    outgoing.compare()
    assert outgoing.changed[0] == {}


def test_the_state_of_a_part() -> None:
    """A counterpart has the parts that it was sent, and was before in others."""
    before, now = ObjectState({"a": 1, "b": 2, "c": 3}), ObjectState({"a": 5, "b": 6, "d": 7}, (9,))
    assert merged(now, before, None) is now
    assert merged(now, before, frozenset("abcd")) is now
    found = merged(now, before, frozenset({"a", "c"}))
    assert (found.parts, found.children) == ({"a": 5, "b": 2}, (9,))
    whole = ObjectState(None, (), b"1")
    assert merged(whole, before, frozenset({"a"})) is whole
