"""The pools of a notebook: worlds side by side, each with a desk of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nbdist.errors import UsageError
from nbdist.notebook.desk import Desk
from nbdist.wire.messages import DEFAULT_POOL

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

    from nbdist.notebook.settings import NbDist


class Desks:
    """A desk for each pool that has been named so far."""

    def __init__(self, shell: InteractiveShell, settings: NbDist) -> None:
        self.shell = shell
        self.settings = settings
        self._desks = {DEFAULT_POOL: Desk(shell, settings, DEFAULT_POOL)}

    def __repr__(self) -> str:
        return f"<Desks {[*self]}>"

    def __iter__(self) -> Iterator[Desk]:
        yield from self._desks.values()

    @property
    def default(self) -> Desk:
        """The one of cells that name no pool."""
        return self._desks[DEFAULT_POOL]

    def at(self, pool: str | None) -> Desk:
        """The desk of a pool, a new one where there is none; UsageError for what is no name."""
        name = pool or DEFAULT_POOL
        if not name.replace("-", "_").isidentifier():
            raise UsageError(f"`--pool {name}`: a pool's name is a word, such as `--pool trainer`.")
        if name not in self._desks:
            self._desks[name] = Desk(self.shell, self.settings, name)
        return self._desks[name]

    def with_workers(self, pool: str | None) -> list[Desk]:
        """The desk of the pool; with none named all that have workers, or else the default one."""
        if pool:
            return [self.at(pool)]
        found = [desk for desk in self if desk.world and desk.world.state.has_workers]
        return found or [self.default]

    def notice_names(self, result: ExecutionResult) -> None:
        """Called by IPython after each cell: what it bound belongs to the notebook."""
        raw_cell = getattr(result.info, "raw_cell", None)
        if raw_cell:
            for desk in self:
                desk.notice_cell(raw_cell)

    def close(self) -> None:
        """The notebook ends: end all that it started, at once."""
        for desk in self:
            desk.close()
