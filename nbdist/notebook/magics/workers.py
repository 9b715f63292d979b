"""Starting and ending workers."""

from __future__ import annotations

from IPython.core.magic import line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from nbdist.notebook.magics.pooled import PooledMagics
from nbdist.notebook.options import parse, pool_option, ranks_option, world_options


@magics_class
class WorkerMagics(PooledMagics):
    """Line magics that change which workers there are, or what they do."""

    @magic_arguments()
    @world_options
    @line_magic
    def dist_init(self, line: str) -> None:
        """Start workers now, as the first `%%distributed` cell would."""
        options = parse(self.dist_init, line)
        self.desk(options).init(options)

    @magic_arguments()
    @ranks_option
    @argument("--keep", metavar="NAMES", help="variables to carry over: --keep step,history")
    @world_options
    @line_magic
    def dist_restart(self, line: str) -> None:
        """End all workers and start new ones: out of every situation, with all variables lost.

        The notebook keeps its own.  With `-r 2` only that rank is started anew, and the
        others keep their variables.
        """
        options = parse(self.dist_restart, line)
        self.desk(options).restart(options)

    @magic_arguments()
    @pool_option
    @line_magic
    def dist_interrupt(self, line: str) -> None:
        """Stop what the workers run, as the Stop button does."""
        self.desk(parse(self.dist_interrupt, line)).interrupt()

    @magic_arguments()
    @pool_option
    @line_magic
    def dist_shutdown(self, line: str) -> None:
        """End all workers, or those of one pool, and everything that belongs to them."""
        options = parse(self.dist_shutdown, line)
        desks = [self.desk(options)] if options.pool else self.desks
        were_running = [desk.shutdown() for desk in desks]
        ended = "workers ended" if any(were_running) else "no workers were running"
        self.desks.default.say(ended)
