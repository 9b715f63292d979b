"""The magics: they parse their line, and the world does the work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from nbdist.errors import UsageError
from nbdist.notebook.desk import Desk
from nbdist.notebook.options import parse, ranks_option, world_options
from nbdist.notebook.shows import show_output, show_stacks, show_status, show_why

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

    from nbdist.notebook.settings import NbDist


@magics_class
class DistributedMagics(Magics):
    """All of nbdist's magics; they share one `Desk`."""

    def __init__(self, shell: InteractiveShell, settings: NbDist) -> None:
        super().__init__(shell)
        self.desk = Desk(shell, settings)

    # --- cells ----------------------------------------------------------------------------

    @magic_arguments()
    @ranks_option
    @argument("--setup", action="store_true", help="run the cell again in every new worker")
    @world_options
    @cell_magic
    def distributed(self, line: str, cell: str) -> None:
        """Run the cell on all workers at once; the first such cell starts them.

        The names of the notebook that the cell uses go along with it.
        """
        options = parse(self.distributed, line)
        self.desk.run_cell(f"%%distributed {line}", cell, options.ranks, options)

    @magic_arguments()
    @argument("ranks", help="which ranks: 0  0,2-3  1:3  ::2  -1  all")
    @cell_magic
    def rank(self, line: str, cell: str) -> None:
        """Run the cell on some ranks only: `%%rank 0,2-3` is `%%distributed -r 0,2-3`."""
        if not line.strip():
            raise UsageError("`%%rank` needs ranks: `%%rank 0`, `%%rank 0,2-3`, `%%rank -1`.")
        self.desk.run_cell(f"%%rank {line}", cell, "".join(line.split()))

    # --- workers --------------------------------------------------------------------------

    @magic_arguments()
    @world_options
    @line_magic
    def dist_init(self, line: str) -> None:
        """Start workers now, as the first `%%distributed` cell would."""
        self.desk.init(parse(self.dist_init, line))

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
        self.desk.restart(parse(self.dist_restart, line))

    @magic_arguments()
    @line_magic
    def dist_interrupt(self, line: str) -> None:
        """Stop what the workers run, as the Stop button does."""
        parse(self.dist_interrupt, line)
        self.desk.interrupt()

    @magic_arguments()
    @line_magic
    def dist_shutdown(self, line: str) -> None:
        """End all workers and everything that belongs to them."""
        parse(self.dist_shutdown, line)
        was_running = self.desk.shutdown()
        self.desk.say("workers ended" if was_running else "no workers were running")

    @magic_arguments()
    @argument("-v", "--verbose", action="store_true", help="also who owns which name")
    @line_magic
    def dist_status(self, line: str) -> None:
        """Each rank's state, process, device, memory, its line of the cell, its last collective.

        Answers within 0.2 s whatever they do.
        """
        options = parse(self.dist_status, line)
        show_status(self.desk, with_owners=options.verbose)

    @magic_arguments()
    @ranks_option
    @line_magic
    def dist_stack(self, line: str) -> None:
        """Where each rank is now, and how it came there; equal stacks once.

        Whatever they do: compute, wait in a collective, or hold the GIL in C code.
        """
        show_stacks(self.desk, parse(self.dist_stack, line).ranks)

    @magic_arguments()
    @line_magic
    def dist_why(self, line: str) -> None:
        """The last failure once more: when, which rank, its traceback or its last words.

        Also after `%dist_restart`.
        """
        parse(self.dist_why, line)
        show_why(self.desk)

    # --- values ---------------------------------------------------------------------------

    @magic_arguments()
    @argument("name", help="a name on the workers, or an expression such as loss.item()")
    @ranks_option
    @argument("--as", dest="target", metavar="NAME", help="what to call the list here")
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
        self.desk.gather(options.name, options.ranks, target)

    @magic_arguments()
    @argument("names", nargs="+", help="names of the notebook")
    @ranks_option
    @line_magic
    def dist_push(self, line: str) -> None:
        """Bind names of the notebook on the workers, whoever owns them there."""
        options = parse(self.dist_push, line)
        self.desk.push(options.names, options.ranks)

    # --- output ---------------------------------------------------------------------------

    @magic_arguments()
    @ranks_option
    @argument("--all", action="store_true", dest="everything", help="all lines, not the last ones")
    @line_magic
    def dist_output(self, line: str) -> None:
        """Show the output of the last distributed cell again, or all of it of some ranks."""
        options = parse(self.dist_output, line)
        show_output(self.desk, options.ranks, everything=options.everything)

    # --- IPython's events -------------------------------------------------------------------

    def notice_names(self, result: ExecutionResult) -> None:
        """Called by IPython after each cell: what it bound belongs to the notebook."""
        raw_cell = getattr(result.info, "raw_cell", None)
        if raw_cell:
            self.desk.notice_cell(raw_cell)
