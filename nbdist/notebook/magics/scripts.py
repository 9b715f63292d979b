"""Scripts, modules and executables on the workers."""

from __future__ import annotations

from IPython.core.magic import line_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments

from nbdist.notebook.magics.pooled import PooledMagics
from nbdist.notebook.options import parse, ranks_option, restarts_option, world_options
from nbdist.notebook.programs import run_program, split_line


@magics_class
class ScriptMagics(PooledMagics):
    """What torchrun does, in workers that stay."""

    @no_var_expand
    @magic_arguments()
    @argument("program", nargs="*", help="a script, and its own arguments, as they are")
    @argument("-m", "--module", action="store_true", help="the program is a module: -m pkg.mod")
    @argument("--no-python", action="store_true", help="the program is an executable")
    @argument("--pass-local-rank", action="store_true",
              help="give it --local-rank=N before all other arguments")  # fmt: skip
    @ranks_option
    @restarts_option
    @world_options
    @line_magic
    def dist_run(self, line: str) -> None:
        """Run a script on all workers: `%dist_run -n 4 train.py --lr 0.1`.

        It runs as `__main__` in the workers' own namespace, where cells find what it has
        left.  Options for `%dist_run` stand before the script, all else is the script's.
        """
        ours, program = split_line(self.dist_run, line)
        options = parse(self.dist_run, ours)
        run_program(self.desk(options), f"%dist_run {line}", program, options)
