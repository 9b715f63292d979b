"""`nbdist.current_world`, which returns the workers of a notebook as a `World`.

Runs in the notebook's process.  Cells use the returned world on IPython's main thread, and so do
functions of libraries that cells call.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from IPython.core.getipython import get_ipython

from nbdist.errors import UsageError, WorldNotStarted
from nbdist.notebook.display import CellDisplay
from nbdist.notebook.extension import pools_of
from nbdist.notebook.idle import is_main_thread
from nbdist.notebook.pool import Pool
from nbdist.system.processes import WORKER_PID
from nbdist.topology import RankSelection
from nbdist.words import in_pool
from nbdist.world.engine import Engine
from nbdist.world.states import WorldState
from nbdist.world.world import World

log = logging.getLogger("nbdist.notebook")

CALL = "`nbdist.current_world()`"

NO_OPTIONS = argparse.Namespace(on_failure=None, detach=None)
"""The options of a `%%distributed` cell without options, with which `Pool.ensure` is called."""


class PoolWorld(World):
    """The workers of a pool as a `World`; after a restart it has the new workers.

    A call first waits for jobs on the ranks that it needs, and replaces dead workers, as magics do.
    `restart` and `shutdown` do what the magics of these names do.  The end of a `with` statement
    does not end the workers, since they belong to the notebook.
    """

    def __init__(self, pool: Pool, engine: Engine) -> None:
        self._pool = pool
        self._last_engine = engine

    @property
    def engine(self) -> Engine:  # type: ignore[override]
        """The engine of the pool's world; without a world, the engine of the last world."""
        if self._pool.world is not None:
            self._last_engine = self._pool.world.engine
        return self._last_engine

    @property
    def _ready(self) -> Engine:
        self._wait_until_free(None)
        return self.engine

    def _select(self, ranks: RankSelection | None, rank: int | None) -> tuple[int, ...]:
        on = super()._select(ranks, rank)
        self._wait_until_free(on)
        return on

    def _wait_until_free(self, ranks: Collection[int] | None) -> None:
        _check_thread()
        with _display_of(self._pool) as display:
            self._pool.healer.make_ready(display, ranks)

    def start(self) -> None:
        """Start the workers again if `shutdown` or `%dist_shutdown` has ended them."""
        _start(self._pool)

    def restart(self, n: int | str | None = None, keep: Sequence[str] = (), **changes: Any) -> None:
        """End all workers and start new ones, as `%dist_restart` does; see `World.restart`."""
        _check_thread()
        changes = changes if n is None else {"n": n, **changes}
        with _display_of(self._pool) as display:
            self._pool.restart(changes, keep, display)
            display.answer(self._pool.ready_text)

    def shutdown(self) -> None:
        """End all workers, as `%dist_shutdown` does.

        Logs a warning if processes may be left on other machines.
        """
        _check_thread()
        if (text := self._pool.shutdown()) not in ("", "workers ended"):
            log.warning("%s", text)

    def scale(self, n: int | str | None = None, *, ranks: RankSelection | None = None) -> None:
        """Change the number of workers; see `World.scale`."""
        super().scale(n, ranks=ranks)
        self._pool.healer.shown_size = self.size

    def __exit__(self, *_: object) -> None:
        pass


def current_world(pool: str = "") -> World:
    """Return the notebook's own workers, which run its `%%distributed` cells, as a `World`.

        world = nbdist.current_world()
        losses = world.gather("loss")
        world.run(evaluate, model, rank=0)

    Call it in a cell of the notebook, or in a function that a cell calls.  If the notebook has no
    workers, they start now, as with a `%%distributed` cell without options.  `pool` is the name
    after `--pool`, and the workers of such a pool must have been started.

    Cells and the returned world share variables, ranks and process group.  Calls wait for a cell
    of `--no-wait` on the same ranks.  The world can be kept: after `%dist_restart` it has the new
    workers, and a `with` statement does not end them.

    Raises:
        UsageError: this process is no notebook that has loaded nbdist, or it is a rank.
        WorldNotStarted: no workers of the pool `pool` are running.
    """
    if WORKER_PID in os.environ:
        raise UsageError(
            f"{CALL} belongs to the notebook, and this is a rank: call it in a plain cell. "
            "On a rank `torch.distributed` reaches the other ranks."
        )
    shell = get_ipython()
    pools = None if shell is None else pools_of(shell)
    if pools is None:
        raise UsageError(
            f"{CALL} needs a notebook with nbdist: `%load_ext nbdist`. "
            "In a script `nbdist.World(n=4)` starts workers."
        )
    pools.check_process(CALL)
    chosen = pools.find(pool)
    if chosen is None or (chosen.own_name and not _has_world(chosen)):
        error = WorldNotStarted(f"`nbdist.current_world({pool!r})`")
        error.args = (in_pool(str(error), pool),)
        raise error
    if not _has_world(chosen):
        _start(chosen)
    assert chosen.world is not None
    return PoolWorld(chosen, chosen.world.engine)


def _has_world(pool: Pool) -> bool:
    """Return True if the pool has workers, or had workers whose agent was lost."""
    return pool.has_workers or (pool.world is not None and pool.world.state is WorldState.LOST)


def _start(pool: Pool) -> None:
    """Start a pool's workers, as a `%%distributed` cell without options does."""
    _check_thread()
    with _display_of(pool) as display:
        pool.ensure(NO_OPTIONS, display)
        display.answer(pool.ready_text)


def _check_thread() -> None:
    if not is_main_thread():
        raise UsageError(
            f"{CALL}: the notebook's workers can only be used on the notebook's main thread. "
            "A `%%distributed --no-wait` cell runs beside other cells."
        )


@contextmanager
def _display_of(pool: Pool) -> Iterator[CellDisplay]:
    """Yield a display below the present cell, and close it at the end of the context."""
    display = pool.display()
    try:
        yield display
    finally:
        display.close()
