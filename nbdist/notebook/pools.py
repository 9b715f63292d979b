"""All pools of a notebook: the default one, and those that were named."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from nbdist.config import DEFAULT_POOL
from nbdist.errors import ForkedProcess, UsageError
from nbdist.notebook.auto_mode import AutoMode
from nbdist.notebook.idle import at_next_prompt
from nbdist.notebook.pool import Pool
from nbdist.notebook.shipping.free_names import names_bound
from nbdist.notebook.shipping.gathered import Gathered, assigned_in
from nbdist.notebook.stops import IdleStop

if TYPE_CHECKING:
    from collections.abc import Iterator

    from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

    from nbdist.notebook.settings import NbDist


class Pools:
    """Those that have been named so far, and the default one."""

    def __init__(self, shell: InteractiveShell, settings: NbDist) -> None:
        self._pid = os.getpid()
        self.shell = shell
        self.settings = settings
        self.auto = AutoMode()
        self._stop = IdleStop()
        self.gathered = Gathered(shell.user_ns)
        self._pools = {DEFAULT_POOL: self._new(DEFAULT_POOL)}

    def __repr__(self) -> str:
        return f"<Pools {[*self]}>"

    def __iter__(self) -> Iterator[Pool]:
        yield from self._pools.values()

    @property
    def default(self) -> Pool:
        """The one of cells that name no pool."""
        return self._pools[DEFAULT_POOL]

    def at(self, name: str | None) -> Pool:
        """Give the pool of this name, which may be new; UsageError for what is no name."""
        if os.getpid() != self._pid:
            raise ForkedProcess("`%%distributed` and nbdist's other magics")
        name = name or DEFAULT_POOL
        if not name.replace("-", "_").isidentifier():
            raise UsageError(f"`--pool {name}`: a pool's name is a word, such as `--pool trainer`.")
        if name not in self._pools:
            self._pools[name] = self._new(name)
        return self._pools[name]

    def known(self, name: str | None) -> Pool | None:
        """Give the pool of this name if there is one; from any thread, for who only looks."""
        return self._pools.get(name or DEFAULT_POOL)

    def notice_names(self, result: ExecutionResult) -> None:
        """Count what a cell has bound as the notebook's; called by IPython after each."""
        for pool in self:
            pool.show_background()
            at_next_prompt(self.shell, pool.watch_prompt)
        cell = getattr(result.info, "raw_cell", None) or ""
        bound = self._bound_by(cell)
        if bound and result.success:
            self.gathered.add(assigned_in(self.shell.transform_cell(cell)))
        self.gathered.bound_in_notebook(bound)
        for pool in self:
            pool.notice_bound(bound)

    def leave(self) -> None:
        """Have cells that run be left: the kernel is about to end; called in any thread."""
        for pool in self:
            if pool.world is not None:
                pool.world.session.leaving.set()

    def close(self) -> None:
        """End at once all that the notebook has started; called when it ends."""
        for pool in self:
            pool.close()

    def _new(self, name: str) -> Pool:
        return Pool(self.shell, self.settings, name, self.auto, self._stop, self.gathered)

    def _bound_by(self, raw_cell: str) -> frozenset[str]:
        """Find the names that a cell may have bound in the notebook."""
        has_worlds = any(pool.world is not None for pool in self)
        is_theirs = raw_cell.lstrip().startswith(("%%distributed", "%%rank"))
        if is_theirs or not (has_worlds or self.gathered.has_any):
            return frozenset()
        try:
            return names_bound(self.shell.transform_cell(raw_cell))
        except SyntaxError:
            return frozenset()  # it bound nothing
