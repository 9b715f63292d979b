"""Tests of `nbdist.notebook.outcome`: a value is brought once, when it is asked for."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

import pytest

from nbdist.notebook.outcome import LastValues


@pytest.fixture
def asked() -> list[tuple[int, ...]]:
    return []


@pytest.fixture
def values(asked: list[tuple[int, ...]]) -> LastValues:
    def bring(ranks: tuple[int, ...]) -> Mapping[int, int]:
        asked.append(ranks)
        return {rank: 10 * rank for rank in ranks}

    return LastValues({0: None}, dict.fromkeys((1, 3, 4), "<80 KiB>"), bring)


def test_only_what_is_asked_for(values: LastValues, asked: list[tuple[int, ...]]):
    """To show them brings nothing, and what has been brought is not brought again."""
    assert repr(values) == "{0: None, 1: <80 KiB>, 3: <80 KiB>, 4: <80 KiB>}"
    assert (values[3], values[3], values[0]) == (30, 30, None)
    assert (len(values), [*values]) == (4, [0, 1, 3, 4])
    assert asked == [(3,)]
    assert repr(values) == "{0: None, 1: <80 KiB>, 3: 30, 4: <80 KiB>}"


def test_all_at_once(values: LastValues, asked: list[tuple[int, ...]]):
    """Those that are not here yet."""
    assert values[1] == 10
    assert [*values.values()] == [None, 10, 30, 40]
    assert dict(values.items()) == {0: None, 1: 10, 3: 30, 4: 40}
    assert asked == [(1,), (3, 4)]


def test_elsewhere_it_is_a_mapping(values: LastValues):
    """A pickle has all values."""
    assert pickle.loads(pickle.dumps(values)) == {0: None, 1: 10, 3: 30, 4: 40}
