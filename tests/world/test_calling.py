"""Tests of `nbdist.world.calling`: what goes along with a call, what comes back, what is left."""

from __future__ import annotations

import functools
import os
import socket
import sys
import threading
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from IPython.core.getipython import get_ipython

from nbdist.errors import VariableNotSent, WorkerError
from nbdist.world.calling import title_of
from nbdist.world.world import World
from tests.waiting import wait_until

pytestmark = pytest.mark.shared_world(2)

MEGABYTE = 2**20


@pytest.fixture
def main(world: World, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The `__main__` of a script, for `exec`."""
    module = types.ModuleType("__main__")
    module.__file__ = "/somewhere/script.py"
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.setattr(world.session, "namespace", vars(module))
    return vars(module)


def my_rank(*args: Any, plus: int = 0) -> int:
    return int(os.environ["RANK"]) + sum(args) + plus


class Adder:
    def __init__(self, amount: int) -> None:
        self.amount = amount

    def add(self, more: int) -> int:
        return my_rank(self.amount, more)

    __call__ = add


def closure(amount: int) -> Callable[[int], int]:
    return lambda more: my_rank(amount, more)


# --- results ----------------------------------------------------------------------------


def test_calls_and_gathered_values_are_no_cells(world: World) -> None:
    """IPython counts, keeps and announces none of them; what a call plots is shown all the same."""
    world.execute(
        "cells, shown, events = [], [], get_ipython().events\n"
        "events.register('pre_run_cell', lambda info: cells.append(info.raw_cell))\n"
        "events.register('post_execute', lambda: shown.append(1))\n"
        "inputs = len(In)"
    )
    world.run(my_rank)
    assert world.gather("len(cells), len(In) - inputs") == [(0, 0)] * 2
    assert world.gather("len(shown)") == [2] * 2  # the first cell's own end, and the call's


def test_results(world: World) -> None:
    """What each rank returned, by rank, by machine and local rank, and in rank order."""
    results = world.run(my_rank, 10, plus=5)
    assert (results.rank(0), results.rank(1)) == (15, 16)
    assert results.index(hostname="localhost", local_rank=1) == 16
    assert results.index(socket.gethostname(), 0) == 15
    assert (list(results), len(results), results.errors) == ([15, 16], 2, {})


def fails_unseen(tensor: torch.Tensor) -> None:
    """Where the user's own way to draw tracebacks fails too; once."""
    shell = get_ipython()
    before = shell.showtraceback

    def draw(*args: object, **options: object) -> None:
        shell.showtraceback = before
        raise ZeroDivisionError

    shell.showtraceback = draw
    sys.seen = sys._getframe()  # type: ignore[attr-defined]
    raise ValueError(f"of {len(tensor)}")


@pytest.mark.parametrize(
    "function",
    [
        functools.partial(my_rank, 3),
        Adder(3).add,
        Adder(3),
        closure(3),
        lambda more: my_rank(3, more),
    ],
    ids=["partial", "method", "object", "closure", "lambda"],
)
def test_kinds_of_functions(world: World, function: Callable[[int], int]) -> None:
    """Whatever can be called can be called on the ranks."""
    assert list(world.run(function, 4)) == [7, 8]


def test_what_people_call_them() -> None:
    """Without where they were defined, or what was bound to them."""
    found = map(title_of, (functools.partial(my_rank, 3), Adder(3).add, Adder(3)))
    assert [*found] == ["my_rank", "Adder.add", "Adder"]


def test_models_and_tensors(world: World) -> None:
    """Models and big tensors go there and come back, on the CPU, equal to what they were."""
    model, weight = torch.nn.Linear(3, 2), torch.randn(1000, 1000)
    back = world.run(lambda m, w: (m, w * my_rank(1)), model, weight)
    assert torch.equal(back.rank(1)[0].weight, model.weight)
    assert torch.equal(back.rank(1)[1], weight * 2)


# --- the names of __main__ --------------------------------------------------------------

SCRIPT = """
import os
from pathlib import Path
K = 7
class Base:
    size = K
class Model(Base):
    def forward(self, x): return helper(x) + self.size
def helper(x): return x + K
def main(x): return Model().forward(x), Path(__file__).name
"""


def names_of(world: World) -> list[str]:
    """What is in the workers' `__main__`."""
    first, second = world.gather("sorted(globals())")
    assert first == second
    return list(first)


def test_names_of_main(world: World, main: dict[str, Any]) -> None:
    """A function finds what it uses of the script's `__main__`; afterwards nothing is left."""
    exec(SCRIPT, main)
    before = names_of(world)
    assert list(world.run(main["main"], 1)) == [(15, "script.py")] * 2
    assert names_of(world) == before
    main["K"] = 8  # the classes have been made
    assert world.run(main["main"], 1).rank(0) == (16, "script.py")


def test_names_that_workers_bound(world: World, main: dict[str, Any]) -> None:
    """What the workers have bound themselves functions find as it is there."""
    world.execute("counter = 10 + rank")
    exec("counter = rank = 99\ndef f(): return counter, rank", main)
    assert list(world.run(main["f"])) == [(10, 0), (11, 1)]
    assert world.gather("counter") == [10, 11]
    exec("def g():\n    global counter\n    counter += 1", main)
    world.run(main["g"])
    assert world.gather("counter") == [11, 12]
    world.execute("del counter")


def test_names_bound_by_a_function(world: World, main: dict[str, Any]) -> None:
    """What it binds by `global` stays, and works later; it finds what the next call brings."""
    before = names_of(world)
    exec(SCRIPT, main)
    exec("def set_up():\n    global model\n    model = Model()", main)
    exec("def step(): return model.forward(1)", main)
    world.run(main["set_up"])
    assert list(world.run(main["step"])) == [15, 15]
    exec("def helper(x): return 100\ndef again(): return helper and model.forward(1)", main)
    assert list(world.run(main["again"])) == [107, 107]
    world.execute("del model")
    names = {*names_of(world)} - {*before}
    world.execute(f"del {', '.join(names)}")


def test_torch_by_another_name(world: World, main: dict[str, Any]) -> None:
    """`dist` of the script is the script's, for the time of the call."""
    exec("dist = [1.5]\ndef f(): return dist", main)
    assert list(world.run(main["f"])) == [[1.5]] * 2
    world.execute("dist.barrier()")


# --- what is not kept -------------------------------------------------------------------


def maps_of_segments(world: World) -> list[str]:
    """Shared memory that workers have mapped, or hold open."""
    found = []
    for pid in world.pids.values():
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        found += [line for line in lines if "memfd:nbdist" in line]
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                found += [str(fd)] if "memfd:nbdist" in os.readlink(fd) else []
    return found


def fails_with(tensor: torch.Tensor) -> None:
    try:
        raise KeyError("first")
    except KeyError:
        raise ValueError(f"of {len(tensor)}") from None


def fails_watched(tensor: torch.Tensor) -> None:
    """As if another thread looked at the frames just then, which keeps them, and their locals."""
    sys.seen = sys._getframe()  # type: ignore[attr-defined]
    assert sys.seen.f_locals["tensor"] is tensor  # type: ignore[attr-defined]
    raise ValueError(f"of {len(tensor)}")


@pytest.mark.parametrize(
    "function", [lambda tensor: tensor + 1, fails_with, fails_watched, fails_unseen]
)
def test_nothing_is_kept(world: World, function: Callable[[torch.Tensor], Any]) -> None:
    """Neither arguments nor results stay in the workers, also where the function fails."""
    tensor = torch.ones(MEGABYTE)
    try:
        results = world.run(function, tensor)
    except ValueError:
        results = None
    wait_until(lambda: not maps_of_segments(world), "no shared memory is held")
    if results is not None:
        assert torch.equal(results.rank(1), tensor + 1)


def allocate(size: int) -> int:
    return int(torch.empty(size, dtype=torch.uint8).fill_(1)[-1])


def memory_of(world: World) -> int:
    return sum(psutil.Process(pid).memory_info().rss for pid in world.pids.values())


def test_many_stages(world: World) -> None:
    """Calls that take 200 MB on each rank leave memory where it was."""
    world.run(allocate, 200 * MEGABYTE)
    before = memory_of(world)
    for _ in range(6):
        world.run(allocate, 200 * MEGABYTE)
    assert memory_of(world) - before < 20 * MEGABYTE


# --- errors -----------------------------------------------------------------------------


def test_what_cannot_be_sent(world: World) -> None:
    """It is named before anything runs."""
    running, lock = world.session.running, threading.Lock()

    def train(model: Any, steps: int = 1) -> None: ...

    for call, said in (
        (lambda: world.run(train, lock), "`model` (thread lock)"),
        (lambda: world.run(train, 1, steps={"a": lock}), "`steps`: `steps['a']` (thread lock)"),
        (lambda: world.run(lambda: lock), ".<closure>.lock` (thread lock)"),
        (lambda: world.run(print, lock), "`args`: `args[0]` (thread lock)"),
    ):
        with pytest.raises(VariableNotSent) as caught:
            call()
        message = str(caught.value)
        assert said in message
        assert "nothing has run. Make it inside the function, or" in message
        assert "\n" not in message
    assert world.session.running is running


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (threading.Lock, "what lock returned (thread lock) cannot be sent back: a lock works"),
        (
            lambda: {"a": [1, (i for i in ())]},
            "what <lambda> returned: `result['a'][1]` (generator) cannot be sent back: how far",
        ),
    ],
)
def test_results_that_cannot_be_sent(world: World, function: Callable[[], Any], said: str) -> None:
    """One line says which part it is, and why."""
    with pytest.raises(WorkerError) as caught:
        world.run(function)
    assert said.replace("what lock", f"what {threading.Lock.__qualname__}") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_class_of_main(world: World, main: dict[str, Any]) -> None:
    """An exception that the script defines is caught by its class, by cells' and calls' errors."""
    exec("class Own(Exception):\n    def __init__(self, a, b): super().__init__(a)", main)
    exec("def f(): raise Own(1, 2)", main)
    with pytest.raises(main["Own"]):
        world.run(main["f"])
    with pytest.raises(main["Own"]):
        world.execute("f()", names={"f": main["f"], "Own": main["Own"]})


def test_group_of_exceptions(world: World) -> None:
    """An exception group ends a cell like any other exception."""
    with pytest.raises(WorkerError, match="ExceptionGroup: two") as caught:
        world.execute("raise ExceptionGroup('two', [ValueError(1), KeyError(2)])")
    assert "| KeyError: 2" in caught.value.__notes__[0]


def test_collective_that_cannot_end(world: World) -> None:
    """Ranks that wait for one that raised are freed; it is told where in the function they were."""

    def meet() -> None:
        if my_rank() == 1:
            raise ValueError("bad")
        torch.distributed.barrier()

    line = meet.__code__.co_firstlineno + 3
    with pytest.raises(
        ValueError, match=rf"bad. Rank 0 was waiting in barrier \(line {line}\) and was released"
    ):
        world.run(meet)
    assert list(world.run(my_rank)) == [0, 1]
