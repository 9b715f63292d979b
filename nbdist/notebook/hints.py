"""What is said where a plain cell uses a name of the workers, or a magic is misspelt."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError as IPythonUsageError

import nbdist
from nbdist.config import DEFAULT_POOL
from nbdist.errors import NbdistError, UsageError
from nbdist.notebook.options import hint_on_magic
from nbdist.notebook.shipping.free_names import names_filled_in
from nbdist.words import name_ranks
from nbdist.world.names import WORKERS_MODULES, WORKERS_OWN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nbdist.notebook.command import Command
    from nbdist.notebook.pool import Pool, Pools


OURS = os.path.dirname(nbdist.__file__) + os.sep


class Border:
    """Looks at an error before IPython shows it, and says where the name is, or what was meant."""

    def __init__(self, pools: Pools, commands: Iterable[Command]) -> None:
        self._pools = pools
        self._names = [each.shown_name for each in commands]

    def __repr__(self) -> str:
        return f"<Border of {self._pools}>"

    def show_traceback(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stand around `InteractiveShell.showtraceback`: only what is said of the error changes."""
        told = args[0] if args else kwargs.get("exc_tuple")
        error = told[1] if told else sys.exc_info()[1]
        _leave_out_insides(error)
        if isinstance(error, NbdistError):
            kwargs.pop("exc_tuple", None)
            return original(_as_ours(error), *args[1:], **kwargs)
        if type(error) is NameError and error.name and (hint := self.hint(error.name)):
            error.args = (hint,)
        elif type(error) is IPythonUsageError and (hint := hint_on_magic(str(error), self._names)):
            error.args = (f"{error} {hint}",)
        return original(*args, **kwargs)

    def expand(self, original: Callable[..., str], cmd: str, depth: int = 0, **how: Any) -> str:
        """Stand around `InteractiveShell.var_expand`: what only the ranks can fill in is refused.

        Left as it is, it would be a part of a command: `!cp {name} {name}.bak`.
        """
        # Names are those of the function that calls; two frames stand between.
        expanded = original(cmd, depth + 2, **how)
        left = names_filled_in(expanded)
        for name in names_filled_in(cmd):
            if name in left and (hint := self.hint(name)):
                own = f"; `$${name}` is the shell's own" if f"${name}" in cmd else ""
                raise UsageError(f"{hint}{own}. Nothing has run.")
        return expanded

    def hint(self, name: str) -> str:
        """Say where the name lives and how to come by it; "" where no worker has it."""
        hints = (hint_of(pool, name) for pool in self._pools if pool.has_workers)
        return next(filter(None, hints), "")


def _as_ours(error: NbdistError) -> tuple[type[BaseException], BaseException, Any]:
    """Give it as what IPython asks to show itself, whatever else it is or was raised beside.

    Of a SyntaxError IPython shows all calls, and of what has met an exception group.
    """
    error.__context__ = None
    kind = type(error)
    if isinstance(error, SyntaxError):
        kind = type(kind.__name__, (NbdistError,), {})
    return kind, error, error.__traceback__


def _leave_out_insides(error: BaseException | None) -> None:
    """Cut nbdist's calls off its errors' tracebacks, and off Stop's; others may lead to them."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        tb = error.__traceback__ if isinstance(error, NbdistError | KeyboardInterrupt) else None
        while tb is not None:
            if tb.tb_next and tb.tb_next.tb_frame.f_code.co_filename.startswith(OURS):
                tb.tb_next = None
            tb = tb.tb_next
        error = error.__cause__ or error.__context__


def hint_of(pool: Pool, name: str) -> str:
    """Say which ranks of the pool have it, and what to do; "" where none has."""
    world = pool.world
    if world is None or name in pool.shell.user_ns:
        return ""
    of_pool = "" if pool.name == DEFAULT_POOL else f" --pool {pool.name}"
    begin = f"begin the cell with %%distributed{of_pool}"
    ranks = world.session.names.ranks_with(name)
    if ranks:
        lives = f"`{name}` is on {name_ranks(ranks)}: {begin}"
        if world.session.names.whence(name):
            return f"{lives}, or import it here too"
        return f"{lives}, or `%dist_gather{of_pool} {name}`"
    if name in WORKERS_MODULES:
        of = WORKERS_MODULES[name]
        here = f"import {of}" if of == name else f"import {of} as {name}"
        return f"the workers have `{name}`: {begin}, or `{here}` here"
    return f"`{name}` is each worker's own: {begin}" if name in WORKERS_OWN else ""
