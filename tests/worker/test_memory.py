"""Tests of `nbdist.worker.memory`: figures of this process, and what holds its memory."""

from __future__ import annotations

import resource
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nbdist.system.limits import MemoryLimit
from nbdist.wire.ops import GpuMemory, Held, Memory, Peak
from nbdist.worker.compat import accelerator
from nbdist.worker.memory import (
    Peaks,
    Search,
    account,
    account_lines,
    is_out_of_memory,
    last_errors,
    locals_of,
    measure,
    pss_now,
)

MEGABYTE = 2**20


def shell_with(**names: Any) -> Any:
    """As much of IPython's shell as is looked at."""
    hidden = {"Out": {}, "_oh": names.pop("_oh", {}), "get_ipython": None}
    return SimpleNamespace(
        user_ns={**hidden, **names}, user_ns_hidden=hidden, last_execution_result=None
    )


def test_names_and_what_is_shown():
    """A name of the user's counts as his, what IPython keeps of it as kept by that alone."""
    mine, shown = torch.zeros(1000), torch.zeros(500)
    shell = shell_with(mine=mine, _5=shown, _=shown, _oh={4: mine, 5: shown})
    found = measure(shell, Peaks(), 5.0)
    assert [(each.name, each.size) for each in found.held] == [("mine", 4000)]
    assert [(each.name, each.size) for each in found.kept] == [("Out[5]", 2000)]
    assert (found.tensors, found.kept_size, found.is_whole) == (4000, 2000, True)
    assert found.gpu is None or accelerator.is_in_use()
    assert found.limit is not None
    assert 0 < found.limit.free < found.limit.limit


def test_only_the_largest_are_named():
    """But all are counted."""
    names = {f"x{size}": torch.zeros(size, dtype=torch.uint8) for size in range(1, 31)}
    found = measure(shell_with(**names), Peaks(), 5.0)
    assert [each.name for each in found.held[:2]] == ["x30", "x29"]
    assert len(found.held) < 30
    assert found.tensors == sum(range(1, 31))


def test_the_peak_of_a_cell():
    """Of what was let go again; where it was used before, it is a bound and no more."""
    peaks = Peaks()
    peaks.begin()
    fill = pss_now() + 300 * MEGABYTE
    # More than this process has ever had.
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    gone = torch.ones(max(0, most - pss_now()) + 300 * MEGABYTE, dtype=torch.uint8)
    del gone
    pss = pss_now()
    peak = peaks.memory(pss)
    assert not peak.is_bound
    assert peak.size > fill > pss + 200 * MEGABYTE
    peaks.begin()
    later = peaks.memory(pss_now())
    assert later.is_bound
    assert later.size > fill


GIB = 2**30


def raised_by(source: str) -> BaseException:
    """What running it raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 (this is what is asked)
        exec(source, {"torch": torch})
    return caught.value


@pytest.mark.parametrize(
    ("source", "is_one"),
    [
        ("torch.empty(1 << 50)", True),
        ("bytes(1 << 60)", True),
        ("import numpy; numpy.ones(1 << 50)", True),
        ("raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB')", True),
        ("raise RuntimeError('CUDA error: out of memory')", True),
        ("raise RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling it')", True),
        (
            "try: bytes(1 << 60)\nexcept MemoryError as e: raise OSError('no data') from e",
            True,
        ),
        ("raise ValueError('out of memory')", False),
        ("torch.ones(2) + torch.ones(3)", False),
    ],
)
def test_which_errors_are_meant(source: str, is_one: bool) -> None:  # noqa: FBT001
    """Those of Python, numpy and torch's allocators, and what is raised from them."""
    error = raised_by(source)
    assert is_out_of_memory(error) == is_one
    assert bool(account(shell_with(), 3, error)) == is_one


def test_what_is_said():
    """How much of how much, what by which name, and what could be let go."""
    memory = Memory(
        pss=2 * GIB,
        peak=Peak(0),
        limit=MemoryLimit("ulimit -v", 4 * GIB, GIB),
        gpu=GpuMemory("0", 79 * GIB, 80 * GIB, 61 * GIB, Peak(0)),
        held=tuple(Held(f"x{i}", (9 - i) * GIB, (i, 2), "int8") for i in range(7)),
        tensors=0,
        kept=(Held("y in f(), line 3", 10 * 2**20, (5,), "int8"),),
        kept_size=10 * 2**20,
        is_whole=False,
    )
    assert account_lines(2, memory) == [
        "rank 2: GPU 0 has 79 GiB of 80 GiB in use, 61 GiB of it by this rank's tensors, "
        "ulimit -v has 3 GiB of 4 GiB in use, this rank 2 GiB",
        "  9 GiB  x0 (0, 2) int8",
        "  8 GiB  x1 (1, 2) int8",
        "  7 GiB  x2 (2, 2) int8",
        "  6 GiB  x3 (3, 2) int8",
        "  5 GiB  x4 (4, 2) int8",
        "  …",
        "  … not everything was searched in time: `%dist_memory`",
        "Only this traceback, or `Out`, holds 10 MiB (`%dist_memory --free` frees it):",
        "  10 MiB  y in f(), line 3 (5,) int8",
    ]


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
