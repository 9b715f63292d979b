"""Tests of `nbdist.world.outgoing`: changed objects, questions to ranks, and messages."""

from __future__ import annotations

from typing import Any

import pytest

from nbdist.values.states import HEAD_PART, ObjectState
from nbdist.wire.ops import Inspected
from nbdist.world.outgoing import Outgoing, merged
from nbdist.world.sent_objects import Parcel, SentObjects


class Made:
    """A class whose instances ranks cannot change in place: pickle makes them by a call."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return Made, (self.number,)


class Lab:
    """Two ranks, and the objects that are sent to them."""

    def __init__(self) -> None:
        self.objects = SentObjects()

    def compared(self, *values: Any, forces: bool = False) -> Outgoing:
        """Return an `Outgoing` that has scanned the values and compared the ranks' objects."""
        self.objects.runs += 1
        outgoing = Outgoing(self.objects, {}, frozenset({0, 1}), forces=forces)
        for value in values:
            outgoing.scan_value(value)
        outgoing.compare()
        return outgoing

    def send(self, *values: Any, ranks: tuple[int, ...] = (0, 1), forces: bool = False) -> Outgoing:
        """Send values to ranks that have changed nothing."""
        outgoing = self.compared(*values, forces=forces)
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


def test_changes_are_found_by_rank_and_part(lab: Lab) -> None:
    """An object's parts are compared with what each rank was sent, even if no value leads to it."""
    cfg, rows = {"a": 1, "b": 2}, [1]
    lab.send(cfg)
    lab.send(rows, ranks=(0,))
    assert lab.compared(cfg, rows).changed == {0: {}, 1: {}}
    cfg["a"] = 5
    rows.append(2)
    both = {lab.key(cfg): {"a"}, lab.key(rows): None}
    assert lab.compared(cfg, rows).changed == {0: both, 1: {lab.key(cfg): {"a"}}}
    assert lab.compared("nothing").changed[0] == both
    lab.send(cfg, ranks=(1,))
    assert lab.compared(cfg).changed == {0: both, 1: {}}


def test_ranks_are_asked_about_parts_to_send(lab: Lab) -> None:
    """Ranks are asked about the parts that any rank will get, or about all of a replaced object."""
    cfg, made = {"a": 1, "b": 2}, Made(1)
    lab.send(cfg, made, [3])
    assert lab.compared(cfg, made).objects_to_inspect() == {}
    cfg["a"] = 5
    lab.send(cfg, ranks=(0,))
    cfg["b"] = 6
    made.number = 2
    assert lab.compared(cfg, made).changed[1][lab.key(made)] == {HEAD_PART}
    assert lab.compared(cfg, made).objects_to_inspect() == {
        lab.key(cfg): {"a", "b"},
        lab.key(made): None,
    }


def test_ranks_keep_parts_changed_on_both_sides(lab: Lab) -> None:
    """Ranks keep parts that both sides have changed; `kept` returns each such change once."""
    cfg = {"a": 1, "b": 2}
    lab.send(cfg)
    key = lab.key(cfg)
    cfg.update(a=5, b=6)
    outgoing = lab.compared(cfg)
    outgoing.apply_replies({0: Inspected({key: frozenset({"a", "c"})}), 1: Inspected()})
    assert outgoing.changed == {0: {key: {"b"}}, 1: {key: {"b"}}}
    assert [outgoing.kept() for _ in range(2)] == [{key: {"a"}}, {}]
    cfg["a"] = 7
    assert lab.compared(cfg).kept() == {key: {"a"}}
    forced = lab.compared(cfg, forces=True)
    assert forced.changed[0] == {key: None}


def test_objects_that_ended_on_a_rank_are_sent_whole(lab: Lab) -> None:
    """If a counterpart no longer exists on a rank, the rank gets the whole object again."""
    rows = [1]
    lab.send(rows)
    rows.append(2)
    outgoing = lab.compared(rows)
    outgoing.apply_replies({0: Inspected(gone=(lab.key(rows),))})
    assert outgoing.changed == {0: {}, 1: {lab.key(rows): None}}
    assert outgoing.message({"rows": rows}, 0)[0].keys == {lab.key(rows)}
    assert outgoing.message({"rows": rows}, 1)[0].keys == set()


def test_a_replaced_object_gets_a_new_key(lab: Lab) -> None:
    """An object that ranks cannot change in place gets a new key, and its container is sent too."""
    made = Made(1)
    rows = [made]
    lab.send(rows)
    old = lab.key(made)
    made.number = 2
    outgoing = lab.compared(rows)
    assert outgoing.renew_replaced()
    assert lab.key(made) != old
    outgoing.scan_value(rows)
    outgoing.compare()
    assert outgoing.changed[0] == {lab.key(rows): None}
    assert not outgoing.renew_replaced()


def test_ranks_with_equal_states_share_a_message(lab: Lab) -> None:
    """Ranks share a message if they were sent the same states and lack the same names."""
    rows = [1]
    lab.send(rows, ranks=(0,))
    assert lab.compared(rows).groups({}) == [(0,), (1,)]
    lab.objects.record_copies(0, 1, (lab.key(rows),))
    assert lab.compared(rows).groups({}) == [(0, 1)]
    assert lab.compared(rows).groups({0: ["x"], 1: []}) == [(0,), (1,)]


def test_a_new_rank_gets_all_objects(lab: Lab) -> None:
    """`whole` packs all objects for a new rank; a scan works after a value that has no pickle."""
    rows = [[1], {"a": 1}]
    lab.send(rows)
    outgoing = lab.compared(rows)
    message, states = outgoing.whole({"rows": rows})
    assert message.keys == states.keys() == outgoing.states.keys()
    with pytest.raises(TypeError, match="cannot pickle"):
        outgoing.scan_value([(each for each in rows)])
    outgoing.scan_value(rows)
    outgoing.compare()
    assert outgoing.changed[0] == {}


def test_sent_parts_are_merged_into_the_state() -> None:
    """The recorded state has the parts that were sent now, and all other parts as before."""
    before, now = ObjectState({"a": 1, "b": 2, "c": 3}), ObjectState({"a": 5, "b": 6, "d": 7}, (9,))
    assert merged(now, before, None) is now
    assert merged(now, before, frozenset("abcd")) is now
    state = merged(now, before, frozenset({"a", "c"}))
    assert (state.parts, state.children) == ({"a": 5, "b": 2}, (9,))
    whole = ObjectState(None, (), b"1")
    assert merged(whole, before, frozenset({"a"})) is whole
