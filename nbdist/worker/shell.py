"""The shell of a rank: IPython's shell, with the changes that a worker needs.

Most changes are to events, `exit`, the results of cells, warnings, tracebacks and the debugger.
`nbdist.worker.kernel` makes the shell, which runs cells on the main thread. The ops that run
scripts and functions use the shell to show exceptions.
"""

from __future__ import annotations

import inspect
import linecache
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any

from ipykernel.displayhook import ZMQShellDisplayHook
from ipykernel.zmqshell import ZMQInteractiveShell
from IPython.core.autocall import IPyAutocall
from IPython.core.events import EventManager
from IPython.core.interactiveshell import ExecutionResult
from traitlets import Type

from nbdist.values.definitions import cell_numbers
from nbdist.wire.places import PACKAGES
from nbdist.words import error_line
from nbdist.worker.compat.ipython import AnnouncesErrors, Debugger
from nbdist.worker.group.default import stale_group_of
from nbdist.worker.group.gloo import connections_after, reword
from nbdist.worker.tracebacks import (
    IN_IPYTHON,
    cell_part,
    classes_of,
    exception_chain,
    format_folded,
    group_traceback,
    interrupted_part,
    message_of,
    remedies,
    sendable,
    short_traceback,
    with_short_message,
    without_nbdist,
    without_recursion,
)


class CellExit(IPyAutocall):
    """The value of `exit` and `quit`; a call ends the cell on this rank, but not the worker."""

    rewrite = False

    def __call__(self, code: object = None) -> None:
        raise SystemExit(code)

    def __repr__(self) -> str:
        return "exit() ends the cell on this rank; `%dist_shutdown` ends all workers."


class CellEvents(EventManager):
    """IPython's events, such as `pre_execute`, whose callbacks run before and after a cell.

    If Stop interrupts a callback, the cell ends. With IPython's own class the cell would go on.
    """

    def trigger(self, event: str, *args: Any, **kwargs: Any) -> None:
        """Call the callbacks of an event; if one raises an `Exception`, show this and go on."""
        for function in [*self.callbacks[event]]:
            try:
                function(*args, **kwargs)
            except Exception:  # noqa: BLE001 (an exception of a callback must not end the cell)
                sys.stdout.write(f"Error in callback {function} (for {event}):\n")
                self.shell.showtraceback()


class NotingHook(ZMQShellDisplayHook):
    """A display hook that keeps the last value of a cell.

    The hook also keeps the value of `x;`, which IPython does not show.
    """

    _last_value: object = None

    def __call__(self, result: Any = None) -> None:
        """Keep and show the value of the last expression of a cell."""
        self._last_value = result
        super().__call__(result)

    def pop_value(self) -> object:
        """Return the last value, or None if there is no value, and drop it."""
        last, self._last_value = self._last_value, None
        return last


class WorkerShell(AnnouncesErrors):
    """IPython's shell on a rank.

    `ready` has the variables that every worker has from its start, such as `rank`; `%reset` binds
    them again.
    """

    ready: Mapping[str, Any] = MappingProxyType({})
    displayhook_class = Type(NotingHook)

    def init_events(self) -> None:
        """Use `CellEvents` instead of IPython's own events; called by IPython at the start."""
        super().init_events()
        callbacks = self.events.callbacks
        self.events = CellEvents(self, callbacks)
        self.events.callbacks = callbacks

    def init_user_ns(self) -> None:
        """Bind the variables of `ready`; called by IPython at the start and by `%reset`."""
        super().init_user_ns()
        self.user_ns.update(self.ready)

    def run_cell(self, *args: Any, **kwargs: Any) -> ExecutionResult:
        """Run a cell, and store its result in `last_execution_result`.

        IPython itself stores no result if Stop comes before the first line of the cell or after its
        last line. If IPython has stored a result with the cell's exception, this result stays. The
        returned result may have another exception, which was raised while the traceback was drawn.
        """
        result: ExecutionResult = super().run_cell(*args, **kwargs)
        if self.last_execution_result is None or self.last_execution_result.success:
            self.last_execution_result = result
        return result

    async def run_code(self, code: Any, result: Any = None, *, async_: bool = False) -> bool:
        """Run code, and return True if it raised an exception.

        If drawing the traceback of that exception raises an error, the error is ignored: IPython
        has already put the exception of the code into `result`.
        """
        try:
            failed: bool = await super().run_code(code, result, async_=async_)
        except Exception:
            if result is None or result.error_in_exec is None:
                raise
            return True
        return failed

    def set_next_input(self, text: str, replace: bool = False) -> None:  # noqa: FBT001, FBT002
        """Print text that code wants to put into a cell of the notebook, which a rank cannot do."""
        where = "replaced this cell" if replace else "become a new cell"
        sys.stdout.write(f"This text would have {where}; ranks cannot write cells:\n{text}\n")

    @property
    def debugger_cls(self) -> type[Debugger]:
        """The class of debugger that `%debug`, `%pdb` and ipdb use."""
        return Debugger

    # --- tracebacks -------------------------------------------------------------------------------

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **options: Any) -> None:
        """Show an exception, as IPython does; publish an exception group as an error message.

        IPython itself prints an exception group as text, from which the notebook could not tell
        that the cell has failed.
        """
        kind, error, tb = exc_tuple or sys.exc_info()
        # Search the contexts for a group, too: IPython prints an exception as text if the exception
        # was raised while a group was handled.
        group = error
        while group is not None and not isinstance(group, BaseExceptionGroup):
            group = group.__context__
        if group is None:
            super().showtraceback(exc_tuple, *args, **options)
            return
        # Debuggers read these attributes of `sys`. IPython's `showtraceback` would set them, but is
        # not called for a group.
        vars(sys).update(last_type=kind, last_value=error, last_exc=error, last_traceback=tb)
        self.publish_error(kind, error, group_traceback(kind, error, tb))

    @contextmanager
    def announcing(self, kind: type[BaseException], error: BaseException) -> Iterator[None]:
        """Within this context, the session adds fields to the Jupyter message about this exception.

        The fields are the exception's classes, the state of the connections to other ranks, and
        remedies.
        """
        session: Any = self.kernel.session
        session.announced_error = (
            error,
            {
                "kinds": classes_of(kind),
                "connections": connections_after(message_of(error)),
                "account": [*map(sendable, remedies(self, int(self.ready.get("rank", 0)), error))],
            },
        )
        try:
            yield
        finally:
            session.announced_error = None, {}

    def shorten_tracebacks(self) -> None:
        """Make IPython draw tracebacks without the calls of nbdist and IPython.

        The tracebacks of Stop and of lost connections have a plain line for each call, because
        drawing source code takes long, and all ranks have these exceptions at once.
        """
        calls_shower: Any = self.InteractiveTB
        syntax_shower: Any = self.SyntaxTB
        draw, draw_syntax = calls_shower.structured_traceback, syntax_shower.structured_traceback

        def structured_traceback(
            kind: Any, error: Any, tb: Any = None, *args: Any, **options: Any
        ) -> Any:
            if isinstance(tb, tuple):  # IPython's mode Plain passes an error's cause as a tuple
                return draw(kind, error, tb, *args, **options)
            if message := stale_group_of(error, tb):
                error.args = (message,)
            for each in exception_chain(error):
                reword(each)
            is_stop = issubclass(kind, KeyboardInterrupt)
            if is_stop or connections_after(message_of(error)) == "ended":
                calls = interrupted_part(error, tb) if is_stop else cell_part(tb)
                return [*short_traceback(calls), error_line(kind.__name__, str(error))]
            # IPython asks `inspect` for the module of each frame's file. For an unknown file
            # `inspect` searches all modules, which takes 4 ms once torch has been imported. So make
            # the cells' files known to `inspect`.
            for file in cell_numbers():
                inspect.modulesbyfile[os.path.normcase(os.path.abspath(file))] = "__main__"
            for each in exception_chain(error.__cause__ or error.__context__):
                each.__traceback__ = without_recursion(without_nbdist(each.__traceback__))
            calls = without_recursion(without_nbdist(tb))
            return [
                format_folded(part)
                for part in draw(*with_short_message(kind, error), calls, *args, **options)
            ]

        def without_ipython(
            kind: Any, error: Any, calls: Any = None, *args: Any, **options: Any
        ) -> Any:
            user_calls = [call for call in calls or () if IN_IPYTHON not in call.filename]
            return draw_syntax(kind, error, user_calls, *args, **options)

        calls_shower.structured_traceback = structured_traceback
        syntax_shower.structured_traceback = without_ipython


# Libraries recognise a notebook by the name of the shell's class. In a notebook plotly sends only
# the figure (7 kB) without plotly's own code (4.9 MB), and sympy writes LaTeX.
WorkerShell.__name__ = WorkerShell.__qualname__ = ZMQInteractiveShell.__name__
WorkerShell.__module__ = ZMQInteractiveShell.__module__


def show(shell: Any, *args: Any, **options: Any) -> None:
    """Show an exception; ignore errors of drawing it, as the task reports the exception anyway."""
    with suppress(Exception):  # user code that draws tracebacks may fail, or memory may be full
        shell.showtraceback(*args, **options)


def show_cell_lines() -> None:
    """Make the text of a warning name the cell and the line that have led to it.

    A warning to which no cell has led gets Python's usual text.
    """
    original = warnings.formatwarning

    def formatwarning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        cells = cell_numbers()
        calls = (
            (frame.f_code.co_filename, number)
            for frame, number in traceback.walk_stack(inspect.currentframe())
        )
        places = (each for each in [(filename, lineno), *calls] if each[0] in cells)
        if (place := next(places, None)) is None:
            return original(message, category, filename, lineno, line)
        code = linecache.getline(*place).strip()
        short_file = PACKAGES.sub("", filename)
        where = "" if place == (filename, lineno) else f"  ({short_file}:{lineno})"
        head = f"Cell In[{cells[place[0]]}], line {place[1]}: {category.__name__}: {message}"
        return f"{head}\n  {code}{where}\n"

    warnings.formatwarning = formatwarning
