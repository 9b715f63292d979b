"""Tests of `nbdist.worker.ops.memory`: measuring memory, naming its holders, releasing it."""

from __future__ import annotations

import sys
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from nbdist.system.limits import MemoryLimit
from nbdist.wire.ops import GpuMemory, Memory, NameMemory, Peak
from nbdist.worker.compat import accelerator
from nbdist.worker.ops.memory import (
    Search,
    account,
    account_lines,
    is_out_of_memory,
    last_errors,
    locals_of,
    measure,
)
from nbdist.world.world import World

pytestmark = pytest.mark.shared_world(2)

MEGABYTE = 2**20
GIB = 2**30


def shell_with(**names: Any) -> Any:
    """Return a stand-in for IPython's shell, with the attributes that `measure` reads."""
    hidden = {"Out": {}, "_oh": names.pop("_oh", {}), "get_ipython": None}
    return SimpleNamespace(
        user_ns={**hidden, **names}, user_ns_hidden=hidden, last_execution_result=None
    )


def test_variables_and_shown_values_are_measured_apart():
    """Memory of variables counts as held, memory of shown values as kept; the largest is first."""
    mine, shown = torch.zeros(1000), torch.zeros(500)
    shell = shell_with(mine=mine, _5=shown, _=shown, _oh={4: mine, 5: shown})
    found = measure(shell, 5.0)
    assert [(each.name, each.size) for each in found.held] == [("mine", 4000)]
    assert [(each.name, each.size) for each in found.kept] == [("Out[5]", 2000)]
    assert (found.tensors, found.kept_size, found.is_whole) == (4000, 2000, True)
    assert found.gpu is None or accelerator.is_in_use()
    assert found.limit is not None
    assert 0 < found.limit.free < found.limit.limit
    names = {f"x{size}": torch.zeros(size, dtype=torch.uint8) for size in range(1, 31)}
    found = measure(shell_with(**names), 5.0)
    assert [each.name for each in found.held[:2]] == ["x30", "x29"]
    assert len(found.held) < 30
    assert found.tensors == sum(range(1, 31))


MEANT = {
    "torch.empty(1 << 50)": True,
    "bytes(1 << 60)": True,
    "import numpy; numpy.ones(1 << 50)": True,
    "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB')": True,
    "raise RuntimeError('CUDA error: out of memory')": True,
    "raise RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling it')": True,
    "try: bytes(1 << 60)\nexcept MemoryError as e: raise OSError('no data') from e": True,
    "raise ValueError('out of memory')": False,
    "torch.ones(2) + torch.ones(3)": False,
}


def test_which_errors_mean_that_memory_is_full() -> None:
    """Failed allocations of Python, numpy and torch count, and errors raised from such errors."""
    for source, is_one in MEANT.items():
        with pytest.raises(Exception) as raised:  # noqa: PT011 (this is what is asked)
            exec(source, {"torch": torch})
        assert is_out_of_memory(raised.value) == is_one, source
        assert bool(account(shell_with(), 3, raised.value)) == is_one


def test_lines_name_the_use_and_the_holders_of_memory():
    """The lines say how much memory is used, by which variables, and how much can be released."""
    memory = Memory(
        pss=2 * GIB,
        peak=Peak(0),
        limit=MemoryLimit("ulimit -v", 4 * GIB, GIB),
        gpu=GpuMemory("0", 79 * GIB, 80 * GIB, 61 * GIB, Peak(0)),
        held=tuple(NameMemory(f"x{i}", (9 - i) * GIB, (i, 2), "int8") for i in range(7)),
        tensors=0,
        kept=(NameMemory("y in f(), line 3", 10 * 2**20, (5,), "int8"),),
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


def test_small_tensors_are_not_listed_after_an_error():
    """Only tensors of 1 MiB or more are listed; without any the list is empty."""
    small = NameMemory("bias", MEGABYTE - 1, (3,), "int8")
    memory = Memory(
        pss=2 * GIB,
        peak=Peak(0),
        limit=None,
        gpu=None,
        held=(NameMemory("weight", MEGABYTE, (5,), "int8"), small),
        tensors=0,
        kept=(small,),
        kept_size=MEGABYTE - 1,
        is_whole=True,
    )
    head = "rank 0: this rank 2 GiB"
    assert account_lines(0, memory) == [head, "  1 MiB  weight (5,) int8"]
    assert account_lines(0, memory._replace(held=(small,))) == [head]


def held(**names: object) -> dict[str, NameMemory]:
    """Return the memory that a search finds, by name."""
    return {each.name: each for each in Search(5.0).find_new(names)}


def test_a_storage_counts_once():
    """A storage counts once, as a whole, under the nearest name; its gradient counts apart."""
    whole = torch.zeros(1000, requires_grad=True)
    whole.sum().backward()
    found = held(
        deep={"whole": whole}, view=whole.detach()[:10], same=whole, array=whole.detach().numpy()
    )
    assert [*found] == ["view", "same.grad"]
    assert found["view"] == NameMemory("view", 4000, (10,), "float32")
    assert found["view"].kind == "(10,) float32"


def test_modules_are_listed_by_part_and_optimizers_as_one():
    """A module's tensors are listed by their paths, an optimizer's state as a single entry."""
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


def test_nested_values_are_named_by_expressions():
    """Names are expressions such as `d['k'][0].batch`; small arrays in objects are left out."""

    class Loader:
        def __init__(self) -> None:
            self.batch, self.limits, self.image = torch.zeros(7), np.zeros(9), np.zeros(200)

    base = np.zeros((4, 2))
    found = held(
        d={"k": [Loader()], 3: torch.ones(1)}, a=base[1:], short=b"x", raw=bytes(2 * 2**20)
    )
    assert [*found] == ["a", "raw", "d[3]", "d['k'][0].batch", "d['k'][0].image"]
    assert found["a"] == NameMemory("a", 64, (3, 2), "float64")
    assert found["raw"].size == 2 * 2**20


def test_many_tensors_of_a_container_are_one_entry():
    """Many tensors in a list are a single entry, so that a small leak in each step is seen."""
    losses = [torch.zeros(100) for _ in range(500)]
    found = held(losses=losses, few=[torch.zeros(2), torch.zeros(3)])
    assert found["losses"] == NameMemory("losses", 200_000, (100,), "float32", count=500)
    assert found["losses"].kind == "500 tensors (100,) float32"
    assert {"few[0]", "few[1]"} <= {*found}
    assert held(both=losses, again=[*losses])["both"].count == 500
    # The tensors of a long list come after `x`, as the search may not reach all of them.
    assert [*held(losses=losses, x=torch.zeros(3))] == ["x", "losses"]
    search = Search(0.0)
    search.find_new({"losses": losses})
    assert search.results[0].count < 500
    assert not search.is_whole


class Refuses:
    """Raises LookupError for every attribute."""

    def __getattribute__(self, name: str) -> object:
        raise LookupError(name)


class Odd(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_: object, **__: object) -> object:
        raise LookupError


def test_classes_of_the_user_do_no_harm():
    """If a user's class raises, other values are found, and the search is marked as not whole."""
    search = Search(5.0)
    odd = torch.zeros(1).as_subclass(Odd)
    found = search.find_new({"odd": odd, "refuses": Refuses(), "x": torch.zeros(2)})
    assert [each.name for each in found] == ["x"]
    assert not search.is_whole
    cycle: list[object] = []
    cycle.append(cycle)
    search = Search(5.0)
    assert search.find_new({"cycle": cycle, "meta": torch.zeros(5, device="meta")}) == []
    assert search.is_whole


def test_locals_in_a_traceback_are_found(monkeypatch: pytest.MonkeyPatch):
    """Locals of the calls in a traceback are found, but not the names of the cell itself.

    Of all places that keep an exception, `last_errors` returns each exception once.
    """

    def load() -> None:
        big = torch.zeros(10)
        raise KeyError(big.shape)

    with pytest.raises(ZeroDivisionError) as caught:
        exec("y = 1\ntry: load()\nfinally: 1 / 0", {"load": load})
    errors = [*last_errors(SimpleNamespace(last_execution_result=None), caught.value)]
    assert [type(error) for error in errors[:2]] == [ZeroDivisionError, KeyError]
    search, calls = Search(5.0), [call for error in errors for call in locals_of(error)]
    found = [each.name for where, names in calls for each in search.find_new(names, where)]
    assert f"big in load(), line {load.__code__.co_firstlineno + 2}" in found
    assert "y" not in [name for _, names in locals_of(caught.value) for name in names]
    one, two, three = ValueError(), KeyError(), ExceptionGroup("both", [TypeError()])
    for name in ("last_value", "last_exc"):
        monkeypatch.setattr(sys, name, one, raising=False)
    result = SimpleNamespace(error_in_exec=two, error_before_exec=None)
    kept = [*last_errors(SimpleNamespace(last_execution_result=result), three)]
    assert [type(each) for each in kept] == [ExceptionGroup, KeyError, ValueError, TypeError]


ABSURD = "torch.empty(1 << 50)"


def test_a_cells_peak_is_exact_if_it_is_highest(world: World) -> None:
    """The largest variables come first; a cell's peak is exact if it exceeds all earlier peaks."""
    world.execute(
        "model = torch.nn.Linear(512, 256)\n"
        "gone = torch.ones(400 * 2**20, dtype=torch.uint8)\n"
        "del gone\n"
        "mine = torch.ones((rank + 1) * 10 * 2**20, dtype=torch.uint8)"
    )
    for rank, memory in enumerate(world.call("memory")):
        first, second, *_ = memory.held
        assert (first.name, first.size) == ("mine", (rank + 1) * 10 * MEGABYTE)
        assert (second.name, second.shape) == ("model.weight", (256, 512))
        assert not memory.peak.is_bound
        assert memory.peak.size > memory.pss + 350 * MEGABYTE
        assert memory.kept == ()
    world.execute("pass")
    assert [each.peak.is_bound for each in world.call("memory")] == [True, True]


def test_an_error_says_what_the_memory_is_used_for(world: World) -> None:
    """The note on a failed rank names its use of memory, variables, and the traceback's locals."""
    world.execute("weights = torch.ones(1000, 1000)")
    failing = f"def step():\n    batch = torch.ones(500, 1000)\n    {ABSURD}\nif rank == 1: step()"
    with pytest.raises(RuntimeError) as caught:
        world.execute(failing)
    said = caught.value.__notes__[0].splitlines()
    (at,) = (i for i, line in enumerate(said) if line.startswith("rank 1: "))
    assert " in use, this rank " in said[at]
    assert any(line.endswith("  weights (1000, 1000) float32") for line in said[at:])
    assert said[-1].endswith("batch in step(), line 3 (500, 1000) float32")
    assert "`%dist_memory --free` frees it" in said[-2]
    assert [len(each.kept) for each in world.call("memory")] == [0, 1]
    world.clean()
    assert [len(each.kept) for each in world.call("memory")] == [0, 0]
    with pytest.raises(MemoryError) as called:
        world.run(lambda: bytes(1 << 60))
    assert "in use, this rank" in called.value.__notes__[0]


def test_an_error_under_a_memory_limit_is_explained(world: World) -> None:
    """A process that has reached its limit of memory still explains the error, and goes on."""
    limit = (
        "import resource; del mine\n"
        "before = resource.getrlimit(resource.RLIMIT_AS)\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 300 * 2**20, before[1]))\n"
        "many = []\n"
        "while True: many.append(bytes(20 * 2**20))"
    )
    with pytest.raises(MemoryError) as caught:
        world.execute(limit)
    world.execute("resource.setrlimit(resource.RLIMIT_AS, before); del many")
    said = caught.value.__notes__[0]
    assert "ulimit -v has " in said
    assert "  20 MiB  many[0] bytes" in said
    assert world.gather("rank") == [0, 1]


def test_what_a_cell_has_shown_is_no_variable(world: World) -> None:
    """A value that a cell has shown counts as kept, although IPython's `exit` leads to it."""
    world.execute("torch.ones(7, 9)")
    for memory in world.call("memory"):
        assert (7, 9) not in [each.shape for each in memory.held]
        assert (7, 9) in [each.shape for each in memory.kept]
    world.clean()


def test_clean_releases_tracebacks_and_shown_values(world: World) -> None:
    """`clean` releases locals of tracebacks, shown values and garbage cycles; variables stay."""

    def memory_of() -> int:
        return sum(psutil.Process(pid).memory_info().rss for pid in world.pids.values())

    hold = "big = torch.empty(200 * 2**20, dtype=torch.uint8).fill_(1)"
    world.execute("x = [1]\ntry: 1 / 0\nexcept ZeroDivisionError as error: kept = error")
    with pytest.raises(ZeroDivisionError):
        world.execute(f"def f():\n    {hold}\n    1 / 0\nf()")
    world.execute(f"{hold}\nbig")
    world.execute("del big")
    world.execute(f"{hold}\ncycle = [big]; cycle.append(cycle)\ndel big, cycle")
    # The C library keeps free pages between pages in use, unless `trim_memory` is called.
    world.execute("many = [bytes(2000) for _ in range(100_000)]\nlast = many[-1]\ndel many")
    used = memory_of()
    for cleaned in world.clean():
        before, after = cleaned.memory
        assert before - after > 750 * MEGABYTE
        assert (cleaned.on_gpu, cleaned.held_on_gpu) == ((0, 0), (0, 0))
    assert used - memory_of() > 1500 * MEGABYTE
    shown = "(_, __, Out, [n for n in globals() if n[1:].isdigit()])"
    assert world.gather(shown) == [("", "", {}, [])] * 2
    assert world.gather("(x, str(kept))") == [([1], "division by zero")] * 2
    with pytest.raises(ZeroDivisionError) as caught:
        world.execute("1 / 0")
    assert "----> 1 1 / 0" in caught.value.__notes__[0]


FAILS_AND_IS_KEPT = """
import weakref
def f():
    global left
    batch = torch.ones(9)
    left = weakref.ref(batch)
    1 / 0
try: f()
except ZeroDivisionError as error:
    kept = error
    raise
"""


def test_locals_of_a_traceback_are_released(world: World) -> None:
    """`clean` releases the locals of a cell's exception; an exception of `World.run` keeps none."""
    with pytest.raises(ZeroDivisionError):
        world.execute(FAILS_AND_IS_KEPT)
    assert [len(each.kept) for each in world.call("memory")] == [1, 1]
    assert world.gather("left() is None") == [False, False]
    world.clean()
    assert world.gather("left() is None, str(kept)") == [(True, "division by zero")] * 2

    def fails() -> None:
        import __main__

        batch = torch.ones(9)
        __main__.left = weakref.ref(batch)
        raise LookupError

    with pytest.raises(LookupError):
        world.run(fails)
    assert world.gather("left() is None") == [True, True]
