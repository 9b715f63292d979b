"""Calls a function of the notebook, or code of a front end, and debugs what a cell has raised."""

from __future__ import annotations

import sys
from bdb import BdbQuit
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from nbdist.values.payload import Payload
from nbdist.worker.compat.debugger import post_mortem
from nbdist.worker.memory import last_errors
from nbdist.worker.namespace import Context
from nbdist.worker.shell import show
from nbdist.worker.tracebacks import message_of

READY_MODULES = ("torch", "dist")  # ready in every worker, but the caller's take their place
_MISSING = object()
_left: dict[str, Any] = {}  # what earlier calls have left behind


def call(context: Context, title: str, packed: Payload) -> Any:
    """Call a function, with its arguments and the names of the caller's `__main__` that it uses."""
    context.title = title
    function, args, kwargs, names = context.namespace.open(packed)
    context.at_end.enter_context(lent_names(context, names))
    del names
    shell = context.shell
    with context.noting():
        try:
            return function(*args, **kwargs)
        except SystemExit:
            show(shell, exception_only=True)
            raise
        except BdbQuit:
            raise  # all is said of it in one line
        except BaseException as error:  # also Stop: shown as a cell's would be
            tb = error.__traceback__
            show(shell, (type(error), error, (tb and tb.tb_next) or tb), tb_offset=0)
            raise
        finally:
            shell.events.trigger("post_execute")  # matplotlib shows its figures


@contextmanager
def lent_names(context: Context, names: Mapping[str, Any]) -> Iterator[None]:
    """Bind names that a call's functions find in `__main__` meanwhile; those of the workers stay.

    They stay too where the call has bound names itself, by `global`, which may use them.
    """
    namespace, bound = context.names, {*context.bound}
    covered = {n: namespace[n] for n in READY_MODULES if n in names and n in namespace}
    lent = {
        name: value
        for name, value in names.items()
        if name in covered
        or name not in namespace
        # What an earlier call has left is replaced for good.
        or namespace[name] is _left.get(name, _MISSING)
    }
    namespace.update(lent)
    yield
    for name, value in lent.items():
        if namespace.get(name, _MISSING) is not value:
            continue  # the call has bound or deleted it
        if name in covered:
            namespace[name] = covered[name]
        elif context.bound > bound:
            _left[name] = value
        else:
            del namespace[name]


def debug(context: Context) -> bool:
    """Debug the last exception, until the user or Stop leaves; False if there is none any more."""
    error = next(last_errors(context.shell), None)
    if error is None or error.__traceback__ is None:
        return False
    sys.stdout.write(f"{type(error).__name__}: {message_of(error)}\n")
    with suppress(KeyboardInterrupt):
        post_mortem(error)
    return True
