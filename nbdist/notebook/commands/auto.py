"""Which cells run on the workers, and which here."""

from __future__ import annotations

from IPython.core.magic_arguments import argument

from nbdist.errors import UsageError
from nbdist.notebook.command import Line, command

ON = (
    "auto mode is on: cells run on the workers, also `%time` and the like; `!` commands and magics "
    "of the notebook (`%cd`, `%pip`, `%dist_...`) run here, once; "
    "`%%local` on its first line runs a cell here, `%dist_auto off` ends it"
)
OFF = "auto mode is off: cells run here, those with `%%distributed` on the workers"


@command(argument("state", nargs="?", help="on or off; without an argument it shows which"))
def dist_auto(line: Line) -> str:
    """Run cells on the workers from now on, as if each began with `%%distributed`.

    Lines with `!`, and magics of the notebook such as `%cd` and `%pip`, run here, once, unless
    they fill in a variable of the ranks; `%matplotlib` and `%load_ext` run here and there.  A
    cell that has the tag `distributed` in JupyterLab goes there also while this is off.
    """
    mode, state = line.auto, line.options.state
    if state not in (None, "on", "off"):
        raise UsageError(f"`%dist_auto {state}`: `%dist_auto on` or `%dist_auto off`.")
    if state is not None:
        mode.pool = line.pool.name if state == "on" else None
    return ON if mode.is_on else OFF


@command(kind="cell")
def local(line: Line) -> None:
    """Run the cell in the notebook while `%dist_auto` is on."""
    # In a notebook `transform_first_lines` has made such a cell a plain one before.
    shell = line.pool.shell
    result = shell.run_cell(line.cell)
    if hasattr(shell, "kernel"):  # in a terminal the error has been shown, and fails nothing else
        result.raise_error()
