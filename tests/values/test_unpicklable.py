"""Tests of `nbdist.values.unpicklable`: the error about a value that cannot be pickled."""

from __future__ import annotations

import ctypes
import functools
import io
import socket
import subprocess
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from pickle import PicklingError
from typing import Any

import pytest

from nbdist.errors import NotEnoughMemory, VariableNotSent
from nbdist.notebook.shipping import plan
from nbdist.values import definitions
from nbdist.values.pickling import pickle, unpickle
from nbdist.world.name_table import NameTable
from nbdist.world.remote_call import names_of_call


@pytest.fixture
def refuse(notebook: Any) -> Callable[[Any], str]:
    """Returns the error of a cell that uses a value, which the notebook calls `it`."""

    def message(value: Any) -> str:
        notebook.names["it"] = value
        with pytest.raises(VariableNotSent) as caught:
            plan("it", NameTable(notebook.names), (0,)).shipment()
        assert caught.value.name == "it"
        return str(caught.value)

    return message


class Holder:
    """An object with attributes."""


def _hold(**parts: Any) -> Any:
    holder = Holder()
    vars(holder).update(parts)
    return holder


def _kinds() -> dict[str, tuple[Callable[[], Any], str, str]]:
    return {
        "generator": (lambda: (x for x in ()), "generator", "list(...)"),
        "lock": (threading.Lock, "thread lock", "inside the cell"),
        "socket": (socket.socket, "socket", "Connect inside"),
        "file": (lambda: open(__file__), "open file", "Keep its path"),
        "module": (lambda: types.ModuleType("by_hand"), "module", ".py file"),
        "library": (lambda: ctypes.CDLL(None), "compiled function or C data", "Load or compile"),
        "weak reference": (
            lambda: weakref.ref(Holder, print),
            "weak reference",
            "the object itself",
        ),
        "frame": (sys._getframe, "frame", "its text"),
        "thread": (threading.Thread, "process or thread", "Start it inside"),
        "ipython": (_PartOfIPython, "part of this notebook", "outside `%%distributed`"),
    }


class _Refuses:
    def __reduce__(self) -> Any:
        raise TypeError("not me.\nReally not.")


class _PartOfIPython(_Refuses):
    __module__ = "IPython.core.history"


@pytest.mark.parametrize("case", _kinds())
def test_each_kind_has_its_word_and_its_remedy(case: str, refuse: Callable[[Any], str]) -> None:
    """The error is a line with the variable, its kind, and a remedy."""
    make, word, remedy = _kinds()[case]
    value = make()
    try:
        said = refuse(value)
    finally:
        # A CDLL has a `close` too, since every function of libc is its attribute.
        if isinstance(value, socket.socket | io.IOBase):
            value.close()
    assert said.startswith(f"`it` ({word}"), said
    assert remedy in said
    assert "nothing has run" in said
    assert "\n" not in said
    said = refuse(_Refuses())
    assert "_Refuses) cannot be sent to the workers: it cannot be pickled (not me)" in said
    assert "`__reduce__`" in said


class OwnError(Exception):
    """A user's class of errors."""


class _Raises:
    """An object that raises `error` if Python pickles it."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getstate__(self) -> Any:
        raise self.error


class _Unlistable(dict[Any, Any]):
    """A dict that cannot be pickled, and that raises if its items are read."""

    def __reduce__(self) -> Any:
        raise OwnError("not me")

    def items(self) -> Any:
        raise OwnError("no items")


@pytest.mark.parametrize("error", [OwnError("no way"), StopIteration(), EOFError("x"), KeyError(1)])
def test_an_error_of_a_users_class_is_named(error: Exception, refuse: Callable[..., str]) -> None:
    """Whatever a class raises, the message names the path, the type and the error."""
    value = _hold(parts=[1, _Raises(error)])
    said = refuse(value)
    assert said.startswith("`it`: `it.parts[1]` (")
    assert f"({type(error).__name__}" in said
    assert "__reduce__" in said
    with pytest.raises(VariableNotSent) as caught:
        names_of_call({}, print, (), {"file": value})
    assert "`file.parts[1]`" in str(caught.value)
    assert "(OwnError: not me)" in refuse(_Unlistable())


def _made(name: str, *bases: type, **parts: Any) -> Any:
    module, _, name = name.rpartition(".")
    made = type(name, bases, {"__module__": module})()
    vars(made).update(parts)
    return made


PROCESS_BOUND = {
    "Accelerator": lambda: _made("accelerate.accelerator.Accelerator"),
    "Mine": lambda: _made("other.Mine", type(_made("accelerate.accelerator.Accelerator"))),
    "Trainer": lambda: _made("pytorch_lightning.trainer.trainer.Trainer"),
    "SparkSession": lambda: _made("pyspark.sql.session.SparkSession"),
    "Run": lambda: _made("wandb.sdk.wandb_run.Run"),
}


@pytest.mark.parametrize("name", PROCESS_BOUND)
def test_objects_that_know_their_process_are_refused(name: str, refuse: Callable[..., str]) -> None:
    """An object that would be process 0 of 1 on each rank is refused anywhere in a value."""
    value = PROCESS_BOUND[name]()
    assert refuse(value).startswith(
        f"`it` ({name}) cannot be sent to the workers: it knows the num"
    )
    said = refuse([1, _hold(it=[value])])
    assert said.startswith(f"`it`: `it[1].it[0]` ({name}) cannot be sent")
    assert said.endswith("Make it inside the cell.")


class Run:
    """A class that a test adds to the classes whose objects know their process."""


def test_ranks_may_pickle_what_knows_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may pickle an object that knows its process; its class is never refused."""
    monkeypatch.setattr(definitions, "_OF_ONE_PROCESS", {f"{__name__}.Run"})
    with pytest.raises(PicklingError):
        pickle([Run()], {})
    assert unpickle(pickle(Run, {}).frames) is Run
    monkeypatch.setattr(definitions, "is_rank", True)
    assert type(unpickle(pickle([Run()], {}).frames)[0]) is Run


def test_a_compiled_function_is_refused(refuse: Callable[..., str]) -> None:
    """A function that torch.jit has compiled is refused with its path and its kind."""
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.jit.script(torch.nn.functional.relu)
    assert refuse(_hold(f=compiled)).startswith("`it`: `it.f` (compiled function or C data)")


def test_too_little_memory_is_blamed_on_no_value(notebook: Any, monkeypatch: Any) -> None:
    """NotEnoughMemory reaches the user as it is, and does not become VariableNotSent."""

    def refuse(*_: Any) -> None:
        raise NotEnoughMemory(1, "the machine", 1, 0)

    monkeypatch.setattr("nbdist.values.pickling.require_memory", refuse)
    monkeypatch.setattr("nbdist.values.pickling.ASKED_FROM", 1)
    notebook.names["it"] = [1]
    with pytest.raises(NotEnoughMemory):
        plan("it", NameTable(notebook.names), (0,)).shipment()
    with pytest.raises(NotEnoughMemory):
        names_of_call({}, print, ([1],), {})


@pytest.mark.world
def test_a_process_is_refused(refuse: Callable[[Any], str]) -> None:
    """A `Popen` object is refused, since only the parent can use the process."""
    with subprocess.Popen(["true"]) as process:
        assert refuse(process).startswith("`it` (process or thread)")


LOCK = threading.Lock()


def _closure() -> Callable[[], Any]:
    lock = LOCK
    return lambda: lock


PATHS = {
    "attribute": (lambda: _hold(a=1, lock=LOCK), "it.lock"),
    "item": (lambda: {"a": [1, {"b": LOCK}]}, "it['a'][1]['b']"),
    "deep": (lambda: _hold(x=_hold(y=[_hold(lock=LOCK)])), "it.x.y[0].lock"),
    "closure": (_closure, "it.<closure>.lock"),
    "default": (lambda: eval("lambda x, y=lock: y", {"lock": LOCK}), "it.<default>.y"),
    "partial": (lambda: functools.partial(print, LOCK), "it.args[0]"),
    "bound method": (lambda: types.MethodType(print, _hold(lock=LOCK)), "it.lock"),
    "slot": (lambda: _Slotted(LOCK), "it.lock"),
    "cycle": (lambda: _cycle(), "it.outer.inner.lock"),
    "streams in memory beside it": (lambda: [io.StringIO("a"), io.BytesIO(b"b"), LOCK], "it[2]"),
    "class": (lambda: type("Made", (), {"lock": LOCK}), "it.lock"),
}


class _Slotted:
    __slots__ = ("lock",)

    def __init__(self, lock: Any) -> None:
        self.lock = lock


def _cycle() -> Any:
    inner = _hold()
    outer = _hold(inner=inner)
    vars(inner).update(outer=outer, lock=LOCK)
    return _hold(outer=outer)


@pytest.mark.parametrize("case", PATHS)
def test_the_path_leads_to_the_culprit(
    case: str, refuse: Callable[[Any], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error shows attributes, items, closures and defaults on the way, if time allows."""
    make, path = PATHS[case]
    assert f"`it`: `{path}` (thread lock)" in refuse(make())
    monkeypatch.setattr("nbdist.values.unpicklable.SEARCH_TIMEOUT", 0.0)
    assert refuse(make()).startswith("`it` (")
