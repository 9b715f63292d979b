"""What the workers' environment is."""

from __future__ import annotations

from IPython.core.magic import line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from nbdist.notebook.environ import show_environ
from nbdist.notebook.magics.pooled import PooledMagics
from nbdist.notebook.options import parse, pool_option, ranks_option


@magics_class
class EnvironMagics(PooledMagics):
    """The line magic of the environment."""

    @magic_arguments()
    @argument("patterns", nargs="*", metavar="PATTERN", help="which variables, such as HF_* or *;"
              " without one those that nbdist, --env and --env-file set")  # fmt: skip
    @ranks_option
    @pool_option
    @line_magic
    def dist_env(self, line: str) -> None:
        """The environment variables that the ranks have, equal values once.

        `{rank}` stands where each has its own number.  Values of what looks like a secret by
        its name are not shown.
        """
        options = parse(self.dist_env, line)
        show_environ(self.desk(options), options.patterns, options.ranks)
