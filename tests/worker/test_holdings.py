"""Tests of `nbdist.worker.memory`: what holds memory, and by which name it can be reached."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nbdist.wire.ops import Held
from nbdist.worker.memory import Search, last_errors, locals_of


def held(**names: object) -> dict[str, Held]:
    """What is found, by name."""
    return {each.name: each for each in Search(5.0).take(names)}


def test_a_storage_counts_once():
    """Under the name that is nearest, with all that a view is of, gradients beside it."""
    whole = torch.zeros(1000, requires_grad=True)
    whole.sum().backward()
    found = held(
        deep={"whole": whole}, view=whole.detach()[:10], same=whole, array=whole.detach().numpy()
    )
    assert [*found] == ["view", "same.grad"]
    assert found["view"] == Held("view", 4000, (10,), "float32")
    assert found["view"].kind == "(10,) float32"


def test_modules_and_optimizers():
    """Parameters by their paths, buffers, plain attributes; an optimizer's state as one."""
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 3, bias=False), torch.nn.BatchNorm1d(3, affine=False)
    )
    model[1].seen = torch.zeros(5)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    found = held(optimizer=optimizer, model=model)
    weight = found["model.0.weight"]
    assert (weight.shape, weight.size) == ((3, 4), 48)
    assert {"model.0.weight.grad", "model.1.running_mean", "model.1.seen"} < {*found}
    state = found["optimizer.state"]
    assert (state.size, state.count, state.kind) == (100, 3, "3 tensors float32")


def test_nested_values():
    """Entries, attributes and items are written as people reach them; arrays count too."""

    class Loader:
        def __init__(self) -> None:
            self.batch = torch.zeros(7)

    base = np.zeros((4, 2))
    found = held(
        d={"k": [Loader()], 3: torch.ones(1)}, a=base[1:], short=b"x", raw=bytes(2 * 2**20)
    )
    assert [*found] == ["a", "raw", "d[3]", "d['k'][0].batch"]
    assert found["a"] == Held("a", 64, (3, 2), "float64")
    assert found["raw"].size == 2 * 2**20


def test_insides_of_libraries():
    """Small arrays inside of an object are not named, which may be matplotlib's."""

    class Axes:
        def __init__(self) -> None:
            self.limits, self.image = np.zeros(9), np.zeros(200)

    assert [*held(axes=Axes(), small=np.zeros(2))] == ["small", "axes.image"]


def test_many_in_one_container_are_one():
    """What leaks a little at each step is seen as what it is together."""
    losses = [torch.zeros(100) for _ in range(500)]
    found = held(losses=losses, few=[torch.zeros(2), torch.zeros(3)])
    assert found["losses"] == Held("losses", 200_000, (100,), "float32", count=500)
    assert found["losses"].kind == "500 tensors (100,) float32"
    assert {"few[0]", "few[1]"} <= {*found}
    assert held(both=losses, again=[*losses])["both"].count == 500
    # What is as near comes first, as there may be too many of them.
    assert [*held(losses=losses, x=torch.zeros(3))] == ["x", "losses"]
    search = Search(0.0)
    search.take({"losses": losses})
    assert search.held[0].count < 500
    assert not search.is_whole


class Refuses:
    """Raises whatever is asked of it."""

    def __getattribute__(self, name: str) -> object:
        raise LookupError(name)


class Odd(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_: object, **__: object) -> object:
        raise LookupError


def test_classes_of_the_user_do_no_harm():
    """What they raise is met, the others are found, and it is known that some was not seen."""
    search = Search(5.0)
    odd = torch.zeros(1).as_subclass(Odd)
    found = search.take({"odd": odd, "refuses": Refuses(), "x": torch.zeros(2)})
    assert [each.name for each in found] == ["x"]
    assert not search.is_whole
    cycle: list[object] = []
    cycle.append(cycle)
    search = Search(5.0)
    assert search.take({"cycle": cycle, "meta": torch.zeros(5, device="meta")}) == []
    assert search.is_whole


def test_what_a_traceback_holds():
    """Locals of the calls that have ended, with their lines; not those of the cell itself."""

    def load() -> None:
        big = torch.zeros(10)
        raise KeyError(big.shape)

    def step() -> None:
        try:
            load()
        except KeyError as error:
            raise RuntimeError("no data") from error

    with pytest.raises(RuntimeError) as caught:
        step()
    shell = SimpleNamespace(last_execution_result=None)
    errors = [*last_errors(shell, caught.value)]
    assert [type(error) for error in errors[:2]] == [RuntimeError, KeyError]
    line = load.__code__.co_firstlineno + 2
    search = Search(5.0)
    found = [
        each
        for error in errors
        for where, names in locals_of(error)
        for each in search.take(names, where)
    ]
    assert f"big in load(), line {line}" in [each.name for each in found]
    with pytest.raises(ZeroDivisionError) as of_cell:
        exec("y = 1\n1 / 0", {})
    assert "y" not in [name for _, names in locals_of(of_cell.value) for name in names]


def test_what_ipython_and_python_keep(monkeypatch: pytest.MonkeyPatch):
    """Each exception once, from wherever it is kept."""
    one, two, three = ValueError(), KeyError(), ExceptionGroup("both", [TypeError()])
    monkeypatch.setattr(sys, "last_value", one, raising=False)
    monkeypatch.setattr(sys, "last_exc", one, raising=False)
    result = SimpleNamespace(error_in_exec=two, error_before_exec=None)
    kept = [*last_errors(SimpleNamespace(last_execution_result=result), three)]
    assert [type(each) for each in kept] == [ExceptionGroup, ValueError, KeyError, TypeError]
