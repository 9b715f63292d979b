"""Snapshots of the workers' variables."""

from __future__ import annotations

from IPython.core.magic import line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from nbdist.notebook.magics.pooled import PooledMagics
from nbdist.notebook.options import parse, pool_option, ranks_option
from nbdist.notebook.snapshots import restore, show_list, snapshot


@magics_class
class SnapshotMagics(PooledMagics):
    """Line magics that write what the workers have, and bring it back."""

    @magic_arguments()
    @argument("name", nargs="?", help="of the snapshot; the 3 newest of a name are kept")
    @argument("variables", nargs="*", help="by default all that cells have bound on the workers")
    @argument("--every", metavar="N", help="also after every N-th distributed cell that succeeds;"
              " 0 ends that")  # fmt: skip
    @pool_option
    @line_magic
    def dist_snapshot(self, line: str) -> None:
        """Write variables of every rank to the disk, with the random states.

        Each rank writes its own: `%dist_snapshot epoch-3 model optimizer step`.  It is there
        when all have, or not at all; `%dist_restore epoch-3` brings it back, also into new
        workers or a new notebook kernel.
        """
        options = parse(self.dist_snapshot, line)
        snapshot(self.desk(options), options)

    @magic_arguments()
    @argument("name", nargs="?", help="by default the newest of all; NAME@STAMP for an older one")
    @argument("variables", nargs="*", help="by default all that it has")
    @argument("--list", action="store_true", dest="lists", help="show what snapshots there are")
    @argument("--from-rank", metavar="RANK", help="give every rank the variables of this one; the"
              " random states stay as they are")  # fmt: skip
    @ranks_option
    @pool_option
    @line_magic
    def dist_restore(self, line: str) -> None:
        """Bind what a snapshot has on every rank, each from its own file, with the random states.

        With `-r` on some ranks only; a DDP module has to come back on all of them.  Nothing
        is bound where a file is damaged.
        """
        options = parse(self.dist_restore, line)
        desk = self.desk(options)
        if options.lists:
            show_list(desk)
        else:
            restore(desk, options)
