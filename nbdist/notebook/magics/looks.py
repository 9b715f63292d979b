"""Looking at the workers and at what they have said."""

from __future__ import annotations

from IPython.core.magic import line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from nbdist.notebook.magics.pooled import PooledMagics
from nbdist.notebook.options import parse, pool_option, ranks_option
from nbdist.notebook.shows import show_output, show_stacks, show_status, show_why


@magics_class
class LookMagics(PooledMagics):
    """Line magics that change nothing."""

    @magic_arguments()
    @argument("-v", "--verbose", action="store_true", help="also who owns which name")
    @pool_option
    @line_magic
    def dist_status(self, line: str) -> None:
        """Each rank's state, process, device, memory, its line of the cell, its last collective.

        Answers within 0.2 s whatever they do.
        """
        options = parse(self.dist_status, line)
        for desk in self.desks.with_workers(options.pool):
            show_status(desk, with_owners=options.verbose)

    @magic_arguments()
    @ranks_option
    @pool_option
    @line_magic
    def dist_stack(self, line: str) -> None:
        """Where each rank is now, and how it came there; equal stacks once.

        Whatever they do: compute, wait in a collective, or hold the GIL in C code.
        """
        options = parse(self.dist_stack, line)
        show_stacks(self.desk(options), options.ranks)

    @magic_arguments()
    @pool_option
    @line_magic
    def dist_why(self, line: str) -> None:
        """The last failure once more: when, which rank, its traceback or its last words.

        Also after `%dist_restart`.
        """
        show_why(self.desk(parse(self.dist_why, line)))

    @magic_arguments()
    @ranks_option
    @argument("--all", action="store_true", dest="everything", help="all lines, not the last ones")
    @pool_option
    @line_magic
    def dist_output(self, line: str) -> None:
        """Show the output of the last distributed cell again, or all of it of some ranks."""
        options = parse(self.dist_output, line)
        show_output(self.desk(options), options.ranks, everything=options.everything)
