"""How a value looked, and whether it has changed since."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from nbdist.notebook.shipping.versions import (
    DIGEST_LIMIT,
    Identity,
    atomic_version,
    content_version,
    is_atomic,
    size_of,
)
from nbdist.wire.pickling import pickle


class Subclass(int):
    pass


@pytest.mark.parametrize("value", [1, 1.5, 1j, True, "x", b"x", None, ..., 2**4095])
def test_small_plain_values_are_atomic(value: object) -> None:
    """Their text stands for them."""
    assert is_atomic(value)
    assert atomic_version(value) == atomic_version(value)


@pytest.mark.parametrize(
    "value", ["x" * 4097, b"x" * 4097, 2**4096, Subclass(1), [1], (1,), {}, object()]
)
def test_others_are_not(value: object) -> None:
    """Long ones, what has parts, and subclasses, which may have attributes."""
    assert not is_atomic(value)


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


def test_what_is_too_big_is_sampled() -> None:
    """Its length and some of its pages."""
    numpy = pytest.importorskip("numpy")
    big = numpy.zeros(DIGEST_LIMIT + 1, dtype="uint8")
    assert size_of(pickle(big, {}).frames) > DIGEST_LIMIT
    before = _version(big)
    assert _version(big[:-1]) != before
    big[0] = 1
    assert _version(big) != before


def test_identity_of_an_object() -> None:
    """The very same one, also after it has changed; not one that has come to its place."""

    class Model:
        pass

    model = Model()
    identity = Identity(model)
    assert identity.is_still(model)
    assert identity.is_unchanged(model)
    assert not identity.is_still(Model())
    del model
    gc.collect()
    assert not identity.is_still(Model())


def test_identity_keeps_no_value_alive() -> None:
    """Where there are no weak references, an outline tells as much as can be told."""
    values = [1, 2]
    identity = Identity(values)
    values.append(3)
    assert identity.is_still(values)
    assert not identity.is_unchanged(values)
    assert values not in gc.get_referents(identity)


def test_identity_of_plain_values() -> None:
    """By object, as for all; numbers are kept, since they are small."""
    text = "".join(["a", "b"])
    assert Identity(text).is_still(text)
    assert not Identity(text).is_still("".join(["a", "b"]))
