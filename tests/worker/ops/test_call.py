"""Tests of `nbdist.worker.ops.call`: functions of the notebook, called in a rank."""

from __future__ import annotations

from typing import Any

import pytest
from IPython.core.events import EventManager, available_events

from nbdist.values.payload import Payload, pack_frames
from nbdist.values.pickling import pickle
from nbdist.worker.namespace import Context, Namespace, VariableError
from nbdist.worker.ops.call import call, lent_names


class Shell:
    """As much of IPython's as a call needs; it keeps what it is to show."""

    def __init__(self) -> None:
        self.user_ns: dict[str, Any] = {"torch": "their torch", "mine": "theirs"}
        self.events = EventManager(self, available_events)
        self.shown: list[Any] = []
        self.ends = 0
        self.events.register("post_execute", self.end)

    def end(self) -> None:
        self.ends += 1

    def showtraceback(self, exc_tuple: Any = None, **options: Any) -> None:
        self.shown.append((exc_tuple, options))


@pytest.fixture
def context() -> Context:
    shell = Shell()
    return Context(shell, Namespace(shell.user_ns))


def packed(source: str, *args: Any, **names: Any) -> Payload:
    """`f` of this source, its arguments, and names of the caller that it uses."""
    main: dict[str, Any] = {"__name__": "__main__"}
    exec(source, main)
    payload, segment = pack_frames(pickle((main["f"], args, {}, names), main).frames)
    assert segment is None
    return payload


def test_names_are_lent(context: Context) -> None:
    """For as long as the call lasts; what the workers have bound they keep."""
    names = context.names
    lent = {"torch": "our torch", "dist": "our dist", "mine": "ours", "k": 1}
    with lent_names(context, lent):
        assert names == {**lent, "mine": "theirs"}
    assert names == {"torch": "their torch", "mine": "theirs"}


def test_names_that_a_call_has_bound_or_deleted(context: Context) -> None:
    """They stay as it has left them; what may be needed later, until another one comes."""
    names = context.names
    names.clear()
    with lent_names(context, {"bound": 1, "deleted": 2, "torch": 3}):
        names.update(bound=5, torch=6)
        del names["deleted"]
    assert names == {"bound": 5, "torch": 6}
    with lent_names(context, {"deleted": 2, "torch": 3}):
        names.update(torch=7)
        del names["deleted"]
    assert names == {"bound": 5, "torch": 7}
    names.clear()
    with lent_names(context, {"helper": "first", "other": "first"}):
        context.bound.add("x")
    assert names == {"helper": "first", "other": "first"}
    names["other"] = "a cell's"
    with lent_names(context, {"helper": "second", "other": "second"}):
        assert names == {"helper": "second", "other": "a cell's"}
    assert names == {"other": "a cell's"}


def test_a_call(context: Context) -> None:
    """The function is one of the worker's `__main__`; names that it binds by `global` are told."""
    names, shell = context.names, context.shell
    source = "def f(x): return x + k, mine"
    assert call(context, "f", packed(source, 1, k=2, mine="ours")) == (3, "theirs")
    assert (context.title, context.bound, shell.ends, shell.shown) == ("f", set(), 1, [])
    assert "k" in names
    context.at_end.close()
    assert names == {"torch": "their torch", "mine": "theirs"}
    source = "def f():\n    global made\n    made = lambda: k"
    call(context, "f", packed(source, k=2))
    context.at_end.close()
    assert context.bound == {"made"}
    assert names["made"]() == names["k"] == 2


def test_a_call_that_raises(context: Context) -> None:
    """It is shown from the function's first line on, and what it has bound by then is noted."""
    source = "def f():\n    global k\n    try: 1 / k\n    finally: k = 5"
    with pytest.raises(ZeroDivisionError) as raised:
        call(context, "f", packed(source, k=0, other=1))
    context.at_end.close()
    (((kind, value, tb), options),) = context.shell.shown
    assert (kind, value, options) == (ZeroDivisionError, raised.value, {"tb_offset": 0})
    assert tb.tb_frame.f_code.co_name == "f"
    assert (context.bound, context.shell.ends) == ({"k"}, 1)
    assert context.names["k"] == 5


@pytest.mark.parametrize("stop", [SystemExit, KeyboardInterrupt])
def test_a_call_that_is_ended(context: Context, stop: type[BaseException]) -> None:
    """It is shown as a cell's end would be, and raised; where it cannot be rebuilt nothing runs."""
    before = {**context.names}
    with pytest.raises(VariableError):
        call(context, "f", Payload((b"garbage",)))
    assert (context.names, context.title, context.shell.ends) == (before, "f", 0)
    with pytest.raises(stop):
        call(context, "f", packed(f"def f(): raise {stop.__name__}(3)", other=1))
    ((_, options),) = context.shell.shown
    assert ("exception_only" in options) == (stop is SystemExit)
    context.at_end.close()
    assert "other" not in context.names
