"""The workers' memory."""

from __future__ import annotations

from IPython.core.magic import line_magic, magics_class
from IPython.core.magic_arguments import magic_arguments

from nbdist.notebook.cleaning import clean_workers
from nbdist.notebook.magics.pooled import PooledMagics
from nbdist.notebook.options import parse, pool_option, ranks_option


@magics_class
class MemoryMagics(PooledMagics):
    """Line magics that give memory back."""

    @magic_arguments()
    @ranks_option
    @pool_option
    @line_magic
    def dist_clean(self, line: str) -> None:
        """Have the workers let go of memory that nobody needs, and say how much it was.

        Of the last traceback and what its frames hold, of `Out` and `_`, of cycles, of the GPU
        memory that torch keeps for the next tensors.  Variables stay.
        """
        options = parse(self.dist_clean, line)
        clean_workers(self.desk(options), options.ranks)
