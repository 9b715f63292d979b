"""Tests of `nbdist.notebook.values`: a value is brought once, when it is asked for."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

import pytest

from nbdist.notebook.values import LastValues


@pytest.fixture
def asked() -> list[tuple[int, ...]]:
    return []


@pytest.fixture
def values(asked: list[tuple[int, ...]]) -> LastValues:
    def bring(ranks: tuple[int, ...]) -> Mapping[int, int]:
        asked.append(ranks)
        return {rank: 10 * rank for rank in ranks}

    return LastValues((0, 1, 3), bring)


def test_only_what_is_asked_for(values: LastValues, asked: list[tuple[int, ...]]):
    """The second time nothing is."""
    assert repr(values) == "<LastValues of ranks 0-1,3, none is here>"
    assert (values[3], values[3], len(values), [*values]) == (30, 30, 3, [0, 1, 3])
    assert asked == [(3,)]
    assert repr(values) == "<LastValues of ranks 0-1,3, those of rank 3 are here>"


def test_all_at_once(values: LastValues, asked: list[tuple[int, ...]]):
    """Those that are not here yet."""
    assert values[1] == 10
    assert [*values.values()] == [0, 10, 30]
    assert dict(values.items()) == {0: 0, 1: 10, 3: 30}
    assert asked == [(1,), (0, 3)]


def test_a_rank_that_did_not_run(values: LastValues, asked: list[tuple[int, ...]]):
    """It is a KeyError, and nobody is asked."""
    with pytest.raises(KeyError):
        values[2]
    assert asked == []


def test_elsewhere_it_is_a_mapping(values: LastValues):
    """A pickle has all values."""
    assert pickle.loads(pickle.dumps(values)) == {0: 0, 1: 10, 3: 30}
