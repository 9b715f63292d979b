"""Values between the notebook and the workers."""

from __future__ import annotations

from IPython.core.magic import line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from nbdist.errors import UsageError
from nbdist.notebook.magics.pooled import PooledMagics
from nbdist.notebook.options import parse, pool_option, ranks_option


@magics_class
class ValueMagics(PooledMagics):
    """Line magics that send and bring names."""

    @magic_arguments()
    @argument("name", help="a name on the workers, or an expression such as loss.item()")
    @ranks_option
    @argument("--as", dest="target", metavar="NAME", help="what to call the list here")
    @pool_option
    @line_magic
    def dist_gather(self, line: str) -> None:
        """Bring a name home: a list with the value of each rank, tensors on the CPU.

        It is bound in the notebook, under its own name or the one after `--as`.  On the
        workers the name keeps its meaning.
        """
        options = parse(self.dist_gather, line)
        target = options.target or options.name
        if not target.isidentifier():
            raise UsageError(
                f"`%dist_gather {options.name}`: the list needs a name here, "
                f"such as `%dist_gather {options.name} --as values`."
            )
        self.desk(options).gather(options.name, options.ranks, target)

    @magic_arguments()
    @argument("names", nargs="+", help="names of the notebook")
    @ranks_option
    @pool_option
    @line_magic
    def dist_push(self, line: str) -> None:
        """Bind names of the notebook on the workers, whoever owns them there."""
        options = parse(self.dist_push, line)
        self.desk(options).push(options.names, options.ranks)
