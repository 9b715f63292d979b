"""What a worker tells of exceptions besides what IPython does, and what it does not.

IPython reads and colours the source of every frame, 50 to 100 ms a rank; where one rank has
failed, all others would do so at once, for what the notebook then shows in one line.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any

from nbdist.wire.cells import cell_numbers
from nbdist.wire.outputs import CONNECTION_LOST
from nbdist.worker import outdated
from nbdist.worker.compat.ipython import around_errors, publish_error


def shorten_lost_connections(shell: Any) -> None:
    """Have the shell format these errors as lines of files only.

    Where torch only says that it does not know a group, it says why.
    """
    whole = shell.InteractiveTB.structured_traceback

    def structured_traceback(
        kind: Any, error: Any, tb: TracebackType | None = None, *args: Any, **options: Any
    ) -> Any:
        if said := outdated.remedy(error, tb):
            error.args = (said,)
        if not CONNECTION_LOST.search(str(error)):
            return whole(kind, error, tb, *args, **options)
        cells = cell_numbers()
        lines = [
            f"Cell In[{cells[frame.f_code.co_filename]}], line {number}"
            if frame.f_code.co_filename in cells
            else f"File {frame.f_code.co_filename}:{number}, in {frame.f_code.co_name}"
            for frame, number in traceback.walk_tb(tb)
        ]
        return [*lines, f"{kind.__name__}: {error}"]

    shell.InteractiveTB.structured_traceback = structured_traceback


def tell_classes(shell: Any, session: Any) -> None:
    """Have the session send an exception's classes along, by which others may catch it."""
    around_errors(shell, partial(telling_classes, session))


@contextmanager
def telling_classes(session: Any, kind: type[BaseException]) -> Iterator[None]:
    """The error message that is sent meanwhile has the classes of such an exception."""
    session.kinds = tuple(f"{base.__module__}:{base.__qualname__}" for base in kind.__mro__)
    try:
        yield
    finally:
        session.kinds = ()


def show_groups(shell: Any) -> None:
    """Have the shell show exception groups as it does all others.

    IPython prints them like text, so that nobody would know that the cell has failed.
    """
    whole = shell.showtraceback

    def showtraceback(exc_tuple: Any = None, *args: Any, **options: Any) -> None:
        kind, error, tb = exc_tuple or sys.exc_info()
        if not _has_group(error):
            whole(exc_tuple, *args, **options)
            return
        # For debuggers, as IPython does.
        vars(sys).update(last_type=kind, last_value=error, last_exc=error, last_traceback=tb)
        while tb is not None and IN_IPYTHON in tb.tb_frame.f_code.co_filename:
            tb = tb.tb_next
        lines = traceback.format_exception(kind, error, tb)
        assert kind is not None  # as the error
        publish_error(shell, kind, error, [line.rstrip("\n") for line in lines])

    shell.showtraceback = showtraceback


IN_IPYTHON = f"{os.sep}IPython{os.sep}"


def _has_group(error: BaseException | None) -> bool:
    """Whether it is a group, or was raised while one was handled."""
    while error is not None and not isinstance(error, BaseExceptionGroup):
        error = error.__context__
    return error is not None
