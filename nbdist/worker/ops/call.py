"""Calls a function of the notebook, or code of a front end, and debugs what a cell has raised."""

from __future__ import annotations

import sys
from bdb import BdbQuit
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from nbdist.values.payload import Payload
from nbdist.worker.compat.debugger import post_mortem
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
    lent = LentNames(context.names, names)
    before = {*context.bound}
    context.at_end.callback(lambda: lent.take_back(has_bound=context.bound > before))
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


class LentNames:
    """The names that a call's functions find in `__main__` meanwhile; those of the workers stay."""

    def __init__(self, namespace: dict[str, Any], names: Mapping[str, Any]) -> None:
        self._namespace = namespace
        self._lent = {name: value for name, value in names.items() if self._gives_way(name)}
        # What an earlier call has left is replaced for good.
        kept = (name for name in self._lent if name in READY_MODULES)
        self._covered = {name: namespace[name] for name in kept if name in namespace}
        namespace.update(self._lent)

    def take_back(self, *, has_bound: bool) -> None:
        """Unbind them, unless the call has bound names itself, by `global`, which may use them."""
        for name, value in self._lent.items():
            if self._namespace.get(name, _MISSING) is not value:
                continue  # the call has bound or deleted it
            if name in self._covered:
                self._namespace[name] = self._covered[name]
            elif has_bound:
                _left[name] = value
            else:
                del self._namespace[name]

    def _gives_way(self, name: str) -> bool:
        found = self._namespace.get(name, _MISSING)
        if found is _MISSING or name in READY_MODULES:
            return True
        return name in _left and _left[name] is found


def debug(context: Context) -> bool:
    """Debug the last exception, until the user or Stop leaves; False if there is none any more."""
    error = last_error(context.shell)
    if error is None or error.__traceback__ is None:
        return False
    sys.stdout.write(f"{type(error).__name__}: {message_of(error)}\n")
    with suppress(KeyboardInterrupt):
        post_mortem(error)
    return True


def last_error(shell: Any) -> BaseException | None:
    """Return what ended the last cell that failed, if Python or IPython keep it."""
    result = shell.last_execution_result
    ran = None if result is None else result.error_in_exec
    # What IPython has shown; it shows nothing of BdbQuit.
    shown = (getattr(sys, name, None) for name in ("last_exc", "last_value"))
    return next((each for each in (ran, *shown) if each is not None), None)  # any can be falsy
