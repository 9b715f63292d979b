"""How a value looked, and whether it has changed since."""

from __future__ import annotations

from typing import Any

import pytest

from nbdist.notebook.shipping import versions
from nbdist.notebook.shipping.versions import atomic_version, content_version, is_compared_whole
from nbdist.values.pickling import pickle


@pytest.mark.parametrize("value", [1, 1.5, 1j, True, "x", b"x", None, ..., 2**4095])
def test_a_value_has_one_version(value: object) -> None:
    """However often it is asked for."""
    assert atomic_version(value) == atomic_version(value)


def test_equal_values_of_other_types_differ() -> None:
    """`1 == True == 1.0`, and yet `n = True` is to be sent."""
    assert len({atomic_version(value) for value in (1, True, 1.0, 1 + 0j, "1", b"1")}) == 6


def _version(value: Any) -> bytes:
    return content_version(pickle(value, {}))


def test_contents_decide() -> None:
    """Also deep inside, and in buffers."""
    numpy = pytest.importorskip("numpy")
    assert _version([[1], "x" * 99]) == _version([[1], "x" * 99])
    assert _version([[1]]) != _version([[2]])
    big = numpy.zeros(1 << 20, dtype="uint8")
    before = _version(big)
    assert _version(big.copy()) == before
    big[12345] = 1
    assert _version(big) != before


def test_what_is_too_big_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its length, some of its pages, and how often torch has changed it."""
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    monkeypatch.setattr(versions, "WHOLE_LIMIT", 1 << 20)
    big, tensor = numpy.zeros((1 << 20) + 1, dtype="uint8"), torch.zeros(1 << 19)
    assert not is_compared_whole(pickle(big, {}))
    before, of_tensor = _version(big), _version(tensor)
    assert _version(big[:-1]) != before
    big[0] = 1
    assert _version(big) != before
    tensor[-1] = 1
    assert _version(tensor) != of_tensor
