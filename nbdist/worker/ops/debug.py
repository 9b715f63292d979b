"""Has somebody look at where the rank's last exception came from, in its debugger."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from nbdist.worker.compat.debugger import post_mortem
from nbdist.worker.tracebacks import message_of

if TYPE_CHECKING:
    from nbdist.worker.namespace import Context


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
