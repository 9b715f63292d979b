"""Tests of `nbdist.values.payload`: a name bound to the same object, and the kinds of values."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nbdist.values import payload
from nbdist.values.payload import Identity, is_atomic


class Subclass(int):
    pass


@pytest.mark.parametrize("value", [1, 1.5, 1j, True, "x", b"x", None, ..., 2**4095])
def test_small_plain_values_are_atomic(value: object) -> None:
    """Their text stands for them."""
    assert is_atomic(value)


@pytest.mark.parametrize(
    "value", ["x" * 4097, b"x" * 4097, 2**4096, Subclass(1), [1], (1,), {}, object()]
)
def test_others_are_not(value: object) -> None:
    """Long ones, what has parts, and subclasses, which may have attributes."""
    assert not is_atomic(value)


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
    values = [object(), 2]
    identity = Identity(values)
    values.append(3)
    assert identity.is_still(values)
    assert not identity.is_unchanged(values)
    assert values not in gc.get_referents(identity)


@pytest.mark.parametrize("make", [lambda: float("0.1"), lambda: [1], lambda: [], lambda: {1: "x"}])
def test_what_comes_to_the_place_of_another(make: Callable[[], object]) -> None:
    """It is not taken for that, which is kept where it is light."""
    value = make()
    identity = Identity(value)
    for _ in range(10):
        del value
        value = make()
        assert not identity.is_still(value)


def test_contents_of_what_is_kept() -> None:
    """A change is seen at a glance all the same."""
    values = [1, 2]
    identity = Identity(values)
    assert identity.is_unchanged(values)
    values.append(3)
    assert identity.is_still(values)
    assert not identity.is_unchanged(values)


class Odd:
    __slots__ = ()

    def __len__(self) -> int:
        raise LookupError

    __iter__ = __eq__ = __hash__ = __len__  # type: ignore[assignment]


class OddList(list[Any]):
    __slots__ = ()
    __len__ = Odd.__len__  # type: ignore[assignment]
    __iter__ = __len__  # type: ignore[assignment]


@pytest.mark.parametrize("value", [Odd(), OddList([1]), bytearray(5), range(9), (1,), {1: 2}])
def test_nothing_is_asked_of_an_object(value: object) -> None:
    """Its class may be a user's, and raise anything."""
    assert Identity(value).is_still(value)
    assert Identity(value).is_unchanged(value)
    assert not Identity(value).is_still(Odd())


def test_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules, optimizers, tensors, and all else; without torch there is nothing but that."""
    module = torch.nn.Linear(1, 1)
    values = [[module], torch.ones(1), torch.optim.SGD(module.parameters()), module]
    found = [payload.OTHER, payload.TENSOR, payload.OPTIMIZER, payload.MODULE]
    assert [payload.kind_of(value) for value in values] == found
    monkeypatch.delitem(payload.sys.modules, "torch")
    assert payload.kind_of(module) == payload.OTHER
