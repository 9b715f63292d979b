"""Tests of `nbdist.worker.op`: how an op is found, and what it works with."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.values.payload import Payload
from nbdist.worker.namespace import Namespace, VariableError
from nbdist.worker.op import Context, find_op


@pytest.fixture
def context() -> Context:
    names: dict[str, Any] = {"kept": 1}
    return Context(SimpleNamespace(user_ns=names), Namespace(names), None)


@pytest.mark.parametrize("name", ["call", "memory", "script", "debug"])
def test_an_op_that_its_module_is_named_after(name: str) -> None:
    """Whose function has its name."""
    found = find_op(name)
    assert (found.__module__, found.__name__) == (f"nbdist.worker.ops.{name}", name)


@pytest.mark.parametrize("name", ["write", "load", "bind", "forget"])
def test_an_op_of_several_functions(name: str) -> None:
    """Each is named after its module."""
    found = find_op(f"snapshot.{name}")
    assert (found.__module__, found.__name__) == ("nbdist.worker.ops.snapshot", name)


@pytest.mark.parametrize("name", ["nowhere", "snapshot", "snapshot.nowhere", ""])
def test_no_op(name: str) -> None:
    """A notebook with another nbdist could ask for it."""
    with pytest.raises((ImportError, AttributeError)):
        find_op(name)


class Stubborn(KeyError):
    """Refuses to have attributes set, as contextlib does it."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)


def test_what_users_code_binds_is_noted(context: Context) -> None:
    """Also where it fails, with whatever exception; what is bound before or after is not."""
    context.names["before"] = 1
    with context.noting():
        context.names["a"] = 1
    with suppress(Stubborn), context.noting():
        context.names.update(b=1, kept=1)
        raise Stubborn
    context.names["after"] = 1
    assert context.bound == {"a", "b"}


def test_what_the_notebook_has_pickled(context: Context) -> None:
    """It is rebuilt in the worker's `__main__`, or a line says why not."""
    with pytest.raises(VariableError, match="could not be rebuilt"):
        context.open(Payload((b"garbage",)))
