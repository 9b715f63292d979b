"""The ranks' log files."""

from __future__ import annotations

from IPython.core.magic import line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from nbdist.notebook.logs import show_log
from nbdist.notebook.magics.pooled import PooledMagics
from nbdist.notebook.options import parse, pool_option, ranks_option


@magics_class
class LogMagics(PooledMagics):
    """A line magic that reads log files."""

    @magic_arguments()
    @ranks_option
    @argument("--tail", metavar="N", default="50", help="how many lines of each rank (50)")
    @argument("--grep", metavar="PATTERN", help="only lines that hold this regular expression")
    @argument("--stdout", action="store_true", help="only what went to stdout")
    @argument("--stderr", action="store_true", help="only what went to stderr")
    @argument("--attempt", metavar="N", help="before the N-th restart: 0 is the first start")
    @pool_option
    @line_magic
    def dist_log(self, line: str) -> None:
        """Show the end of the ranks' log files, equal lines once, and name the files.

        All that ranks have written since they were started is there, whatever was shown of it.
        """
        options = parse(self.dist_log, line)
        show_log(self.desk(options), options)
