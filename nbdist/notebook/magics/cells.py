"""Cells on the workers."""

from __future__ import annotations

from IPython.core.magic import cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from nbdist.errors import UsageError
from nbdist.notebook.magics.pooled import PooledMagics
from nbdist.notebook.options import (
    parse,
    pool_option,
    ranks_option,
    restarts_option,
    take_pool,
    world_options,
)
from nbdist.notebook.snapshots import after_cell


@magics_class
class CellMagics(PooledMagics):
    """Cell magics."""

    @magic_arguments()
    @ranks_option
    @argument("--setup", action="store_true", help="run the cell again in every new worker")
    @restarts_option
    @world_options
    @cell_magic
    def distributed(self, line: str, cell: str) -> None:
        """Run the cell on all workers at once; the first such cell starts them.

        The names of the notebook that the cell uses go along with it.
        """
        options = parse(self.distributed, line)
        desk = self.desk(options)
        desk.run_cell(f"%%distributed {line}", cell, options.ranks, options)
        after_cell(desk)

    @magic_arguments()
    @argument("ranks", help="which ranks: 0  0,2-3  1:3  ::2  -1  all")
    @pool_option
    @cell_magic
    def rank(self, line: str, cell: str) -> None:
        """Run the cell on some ranks only: `%%rank 0,2-3` is `%%distributed -r 0,2-3`."""
        if not line.strip():
            raise UsageError("`%%rank` needs ranks: `%%rank 0`, `%%rank 0,2-3`, `%%rank -1`.")
        pool, ranks = take_pool(line)
        desk = self.desks.at(pool)
        desk.run_cell(f"%%rank {line}", cell, "".join(ranks.split()))
        after_cell(desk)
