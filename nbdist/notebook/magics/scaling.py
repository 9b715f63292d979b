"""More workers or fewer, and what the new ones get."""

from __future__ import annotations

from IPython.core.magic import line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from nbdist.notebook.magics.pooled import PooledMagics
from nbdist.notebook.options import parse, pool_option, ranks_option
from nbdist.notebook.scaling import scale, sync


@magics_class
class ScalingMagics(PooledMagics):
    """Line magics for a world that changes its size."""

    @magic_arguments()
    @argument("size", help="how many workers: 4; or how many more or fewer: +2, -1")
    @pool_option
    @line_magic
    def dist_scale(self, line: str) -> None:
        """Have more workers, or fewer, while the others keep their variables and ranks.

        DDP models go on with as many ranks as there are then; FSDP2 models, meshes and
        subgroups have to be made anew.  New ranks run the `--setup` cells.
        """
        options = parse(self.dist_scale, line)
        scale(self.desk(options), options.size)

    @magic_arguments()
    @argument("names", nargs="+", help="names on the workers, which arrive together")
    @argument("--from", dest="source", metavar="RANK", default="0", help="copy from (0)")
    @ranks_option
    @pool_option
    @line_magic
    def dist_sync(self, line: str) -> None:
        """Copy names from one rank to those that lack them: `%dist_sync model opt --from 0`.

        With `-r` to these ranks, whatever they have.
        """
        options = parse(self.dist_sync, line)
        sync(self.desk(options), options.names, options.source, options.ranks)
