"""Tests of `nbdist.worker.ops.call`: what a called function finds, and what it leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from IPython.core.events import EventManager, available_events

from nbdist.values.payload import Payload, pack_frames
from nbdist.values.pickling import pickle
from nbdist.worker.namespace import Context, Namespace, VariableError
from nbdist.worker.ops.call import LentNames, call


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
def shell() -> Shell:
    return Shell()


@pytest.fixture
def names(shell: Shell) -> dict[str, Any]:
    return shell.user_ns


@pytest.fixture
def context(shell: Shell) -> Context:
    return Context(shell, Namespace(shell.user_ns), None)


def packed(source: str, *args: Any, **names: Any) -> Payload:
    """`f` of this source, its arguments, and names of the caller that it uses."""
    main: dict[str, Any] = {"__name__": "__main__"}
    exec(source, main)
    payload, segment = pack_frames(pickle((main["f"], args, {}, names), main).frames)
    assert segment is None
    return payload


# --- lent names ---------------------------------------------------------------------------


def test_names_are_lent() -> None:
    """For as long as the call lasts; what the workers have bound they keep."""
    names = {"torch": "their torch", "mine": "theirs"}
    lent = LentNames(names, {"torch": "our torch", "dist": "our dist", "mine": "ours", "k": 1})
    assert names == {"torch": "our torch", "dist": "our dist", "mine": "theirs", "k": 1}
    assert repr(lent) == "<LentNames ['dist', 'k', 'torch']>"
    lent.take_back(has_bound=False)
    assert names == {"torch": "their torch", "mine": "theirs"}


def test_names_that_the_call_has_bound_or_deleted() -> None:
    """They are its own: they stay as it has left them."""
    names: dict[str, Any] = {}
    lent = LentNames(names, {"bound": 1, "deleted": 2, "torch": 3})
    names.update(bound=5, torch=6)
    del names["deleted"]
    lent.take_back(has_bound=True)
    assert names == {"bound": 5, "torch": 6}
    lent = LentNames(names, {"deleted": 2, "torch": 3})
    names.update(torch=7)
    del names["deleted"]
    lent.take_back(has_bound=False)
    assert names == {"bound": 5, "torch": 7}


def test_what_may_be_needed_later_stays() -> None:
    """Until the next call brings another one, or a cell has bound the name."""
    names: dict[str, Any] = {}
    LentNames(names, {"helper": "first", "other": "first"}).take_back(has_bound=True)
    assert names == {"helper": "first", "other": "first"}
    names["other"] = "a cell's"
    lent = LentNames(names, {"helper": "second", "other": "second"})
    assert names == {"helper": "second", "other": "a cell's"}
    lent.take_back(has_bound=False)
    assert names == {"other": "a cell's"}


# --- calls --------------------------------------------------------------------------------


def test_a_call(context: Context, shell: Shell, names: dict[str, Any]) -> None:
    """The function is one of the worker's `__main__`; IPython is told of its end alone."""
    source = "def f(x): return x + k, mine"
    assert call(context, "f", packed(source, 1, k=2, mine="ours")) == (3, "theirs")
    assert (context.title, context.bound, shell.ends, shell.shown) == ("f", set(), 1, [])
    assert "k" in names
    context.at_end.close()
    assert names == {"torch": "their torch", "mine": "theirs"}


def test_names_that_a_call_binds(context: Context, names: dict[str, Any]) -> None:
    """By `global`: they are told, and what they may use later stays with them."""
    source = "def f():\n    global made\n    made = lambda: k"
    call(context, "f", packed(source, k=2))
    context.at_end.close()
    assert context.bound == {"made"}
    assert names["made"]() == names["k"] == 2


def end_of(run: Callable[[], Any]) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 (also SystemExit)
        run()
    return caught.value


def test_a_call_that_raises(context: Context, shell: Shell, names: dict[str, Any]) -> None:
    """It is shown from the function's first line on, and what it has bound by then is noted."""
    source = "def f():\n    global k\n    try: 1 / k\n    finally: k = 5"
    error = end_of(lambda: call(context, "f", packed(source, k=0, other=1)))
    context.at_end.close()
    (((kind, value, tb), options),) = shell.shown
    assert (kind, value, options) == (ZeroDivisionError, error, {"tb_offset": 0})
    assert tb.tb_frame.f_code.co_name == "f"
    assert (context.bound, shell.ends) == ({"k"}, 1)
    assert names["k"] == 5


@pytest.mark.parametrize("stop", ["SystemExit(3)", "KeyboardInterrupt"])
def test_a_call_that_is_ended(context: Context, shell: Shell, stop: str) -> None:
    """It is shown as a cell's end would be, and raised."""
    error = end_of(lambda: call(context, "f", packed(f"def f(): raise {stop}", other=1)))
    assert type(error).__name__ == stop.partition("(")[0]
    ((_, options),) = shell.shown
    assert ("exception_only" in options) == ("Exit" in stop)
    context.at_end.close()
    assert "other" not in context.names


def test_a_call_that_cannot_be_rebuilt(context: Context, shell: Shell) -> None:
    """Nothing runs."""
    before = {**context.names}
    with pytest.raises(VariableError):
        call(context, "f", Payload((b"garbage",)))
    assert (context.names, context.title, shell.ends) == (before, "f", 0)
