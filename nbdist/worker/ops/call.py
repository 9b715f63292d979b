"""Calls a function of the notebook, or code of a front end, and debugs what a cell has raised."""

from __future__ import annotations

import io
import sys
from bdb import BdbQuit
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from typing import TYPE_CHECKING, Any

from nbdist.values.payload import Payload
from nbdist.worker.compat.debugger import post_mortem
from nbdist.worker.shell import show
from nbdist.worker.tracebacks import message_of

if TYPE_CHECKING:
    from nbdist.worker.namespace import Context

READY_MODULES = ("torch", "dist")
"""Names that are ready in every worker and give way to the caller's."""

_MISSING = object()

_left: dict[str, Any] = {}
"""What earlier calls have left behind."""


def call(context: Context, title: str, packed: Payload) -> Any:
    """Call the function, as no cell: of IPython there is only how errors are shown.

    Packed are the function, its arguments, and the names of the caller's `__main__` that it uses.
    """
    context.title = title
    function, args, kwargs, names = context.open(packed)
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
    """The names that functions of a call find in `__main__`, for as long as it lasts.

    What the workers have bound themselves they keep, and the functions find that.
    """

    def __init__(self, namespace: dict[str, Any], names: Mapping[str, Any]) -> None:
        self._namespace = namespace
        self._lent = {name: value for name, value in names.items() if self._gives_way(name)}
        # What an earlier call has left gives way for good.
        kept = (name for name in self._lent if name in READY_MODULES)
        self._covered = {name: namespace[name] for name in kept if name in namespace}
        namespace.update(self._lent)

    def take_back(self, *, has_bound: bool) -> None:
        """Bind none of them any more.

        But where the call has bound names itself, by `global`, they stay: what it bound may
        use them later.  They give way to those of the next call.
        """
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


def answer(context: Context, source: str) -> str:
    """Run code beside the user's cells, and return what it prints; raises what it raises."""
    shell: Any = context.shell
    said = io.StringIO()
    with redirect_stdout(said):
        exec(compile(shell.transform_cell(source), "<front end>", "exec"), shell.user_ns)
    return said.getvalue()


# --- post mortem ------------------------------------------------------------------------------


def debug(context: Context) -> bool:
    """Debug post mortem until that is left; False where there is no exception any more.

    Stop leaves it too, and the exception stays for the next time.
    """
    error = last_error(context.shell)
    if error is None or error.__traceback__ is None:
        return False
    sys.stdout.write(f"{type(error).__name__}: {message_of(error)}\n")
    with suppress(KeyboardInterrupt):
        post_mortem(error)
    return True


def last_error(shell: Any) -> BaseException | None:
    """Find what ended the last cell that failed, as long as Python or IPython keep it."""
    result = shell.last_execution_result
    ran = None if result is None else result.error_in_exec
    # What IPython has shown; it shows nothing of BdbQuit.
    shown = (getattr(sys, name, None) for name in ("last_exc", "last_value"))
    return next((each for each in (ran, *shown) if each is not None), None)  # any can be falsy
