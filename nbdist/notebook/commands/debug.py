"""A rank's exception in its own debugger; IPython's `%debug` and `%pdb` lead there."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from nbdist.config import DEFAULT_POOL
from nbdist.errors import Interrupted, NbdistError, UsageError
from nbdist.notebook.cells import check_end, follow
from nbdist.notebook.command import Line, command
from nbdist.notebook.options import ranks_option
from nbdist.output.events import Died
from nbdist.wire.work import Call
from nbdist.words import name_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.notebook.pool import Pool, Pools


@command(ranks_option)
def dist_debug(line: Line) -> None:
    """Debug the last exception of a rank, in its own frames.

    By default on the rank that failed first.  `p x`, `up`, `where` and all else that pdb
    knows is typed into the input box; `q` leaves it, and nothing has changed.
    """
    world = line.world
    ranks = line.ranks if line.options.ranks is not None else (failed_rank(line.pool),)
    task = world.task(Call("debug"), ranks=ranks)
    running = line.pool.last = world.submit(task)
    follow(line.pool, world, running, line.display)
    check_end(line.pool, world, running)
    found = zip(ranks, running.result(), strict=True)
    if none := [rank for rank, was_there in found if not was_there]:
        verb = "has" if len(none) == 1 else "have"
        raise UsageError(
            f"`%dist_debug`: {name_ranks(none)} {verb} no exception: none was raised, or"
            " `%dist_memory --free` or a restart released it. `%dist_output --failed` may still "
            "show it."
        )


def failed_rank(pool: Pool) -> int:
    """Choose the rank that failed first in the last cell that did; UsageError for none."""
    if pool.failed is None:
        raise UsageError("`%dist_debug`: no rank has failed yet. `-r 2` says which to look at.")
    rank, error = pool.failed
    if isinstance(error, Died):
        raise UsageError(
            f"`%dist_debug`: rank {rank} {error.end}, so its exception is lost. "
            "`%dist_output --failed` shows its last output."
        )
    return rank


class RanksDebugger:
    """Leads to the rank that failed: in the notebook there are only nbdist's own calls."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    def __repr__(self) -> str:
        return f"<RanksDebugger of {self._pools}>"

    def debug(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stand around `InteractiveShell.debugger`, which IPython calls for both magics."""
        shell = self._pools.shell
        is_wanted = bool(args or kwargs) or shell.call_pdb
        error = _last_error()
        if not is_wanted or not isinstance(error, NbdistError | Interrupted):
            return original(*args, **kwargs)
        if isinstance(error, UsageError) and shell.call_pdb:
            return None  # nothing has run that could be looked at
        failed = [pool for pool in self._pools if pool.failed is not None]
        name = max(failed, key=lambda pool: pool.failed_at).name if failed else DEFAULT_POOL
        return shell.run_line_magic("dist_debug", "" if name == DEFAULT_POOL else f"--pool {name}")


def _last_error() -> BaseException | None:
    found: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return found
