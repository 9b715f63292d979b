"""Tests of `nbdist.values.unpicklable`: what people read when a value cannot be pickled."""

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
from nbdist.world.remote_call import _names_of_call


@pytest.fixture
def refuse(notebook: Any) -> Callable[[Any], str]:
    """The error for a cell that uses a value, which the notebook calls `it`."""

    def message(value: Any) -> str:
        notebook.names["it"] = value
        with pytest.raises(VariableNotSent) as caught:
            plan("it", NameTable(notebook.names), (0,)).shipment()
        assert caught.value.name == "it"
        return str(caught.value)

    return message


class Holder:
    """Something with attributes."""


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
    """One line: the name, what it is, and what to do instead."""
    make, word, remedy = _kinds()[case]
    value = make()
    try:
        said = refuse(value)
    finally:
        # Not whatever has a `close`: every function of libc is an attribute of a CDLL.
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
    """An error that a user has made."""


class _Raises:
    """Raises this error when it is pickled."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getstate__(self) -> Any:
        raise self.error


class _Unlistable(dict[Any, Any]):
    """Cannot be pickled, and raises when its items are looked at."""

    def __reduce__(self) -> Any:
        raise OwnError("not me")

    def items(self) -> Any:
        raise OwnError("no items")


@pytest.mark.parametrize("error", [OwnError("no way"), StopIteration(), EOFError("x"), KeyError(1)])
def test_an_error_of_a_users_class(error: Exception, refuse: Callable[..., str]) -> None:
    """Whatever a class raises, the error names the path, the type and the error."""
    value = _hold(parts=[1, _Raises(error)])
    said = refuse(value)
    assert said.startswith("`it`: `it.parts[1]` (")
    assert f"({type(error).__name__}" in said
    assert "__reduce__" in said
    with pytest.raises(VariableNotSent) as caught:
        _names_of_call({}, print, (), {"file": value})
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
def test_what_knows_its_process(name: str, refuse: Callable[..., str]) -> None:
    """It would be process 0 of 1 on each rank, and is refused, wherever in a value it is."""
    value = PROCESS_BOUND[name]()
    assert refuse(value).startswith(
        f"`it` ({name}) cannot be sent to the workers: it knows the num"
    )
    said = refuse([1, _hold(it=[value])])
    assert said.startswith(f"`it`: `it[1].it[0]` ({name}) cannot be sent")
    assert said.endswith("Make it inside the cell.")


class Run:
    """An object that has the name of one that knows its process."""


def test_ranks_may_pickle_what_knows_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """On its way home, into a snapshot or to another rank nothing is refused; nor is a class."""
    monkeypatch.setattr(definitions, "_OF_ONE_PROCESS", {f"{__name__}.Run"})
    with pytest.raises(PicklingError):
        pickle([Run()], {})
    assert unpickle(pickle(Run, {}).frames) is Run
    monkeypatch.setattr(definitions, "is_rank", True)
    assert type(unpickle(pickle([Run()], {}).frames)[0]) is Run


def test_a_compiled_function(refuse: Callable[..., str]) -> None:
    """What torch.jit has compiled is refused in one line too."""
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.jit.script(torch.nn.functional.relu)
    assert refuse(_hold(f=compiled)).startswith("`it`: `it.f` (compiled function or C data)")


def test_too_little_memory_is_no_value_to_blame(notebook: Any, monkeypatch: Any) -> None:
    """The error of the machine comes out as it is."""

    def refuse(*_: Any) -> None:
        raise NotEnoughMemory(1, "the machine", 1, 0)

    monkeypatch.setattr("nbdist.values.pickling.require_memory", refuse)
    monkeypatch.setattr("nbdist.values.pickling.ASKED_FROM", 1)
    notebook.names["it"] = [1]
    with pytest.raises(NotEnoughMemory):
        plan("it", NameTable(notebook.names), (0,)).shipment()
    with pytest.raises(NotEnoughMemory):
        _names_of_call({}, print, ([1],), {})


@pytest.mark.world
def test_a_process(refuse: Callable[[Any], str]) -> None:
    """A process is known to its parent only."""
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
    """From the name through attributes, items, closures and defaults, as far as time allows."""
    make, path = PATHS[case]
    assert f"`it`: `{path}` (thread lock)" in refuse(make())
    monkeypatch.setattr("nbdist.values.unpicklable.SEARCH_TIMEOUT", 0.0)
    assert refuse(make()).startswith("`it` (")
