"""How a cell is sent: waited for or not, run here as well, and its result given a name.

Called by the commands that run cells and scripts, on IPython's own thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core.magic_arguments import argument

from nbdist.errors import LocalCellError, NbdistError, UsageError
from nbdist.notebook.cells import result_of, through
from nbdist.notebook.job import CellPlace, Job
from nbdist.readers import number_of_seconds
from nbdist.words import count

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbdist.notebook.command import Line
    from nbdist.notebook.job import Steps
    from nbdist.notebook.options import Magic
    from nbdist.world.running import RunningTask


def sending_options(magic: Magic) -> Magic:
    """Add `--no-wait`, `-o` and `--timeout`."""
    # fmt: off
    options = (
        argument("--no-wait", action="store_true", help="return at once and keep showing the "
            "output while the notebook does other things; -o gives a Job to wait for"),
        argument("-o", "--out", metavar="NAME", help="store the result as NAME, a mapping from"
                 " rank to the last value; with --no-wait a Job: NAME.wait(), .done(), .result(),"
                 " .interrupt()"),
        argument("--timeout", metavar="SECONDS", type=number_of_seconds("--timeout"),
                 help="stop the cell after SECONDS, as Stop does"),
    )
    # fmt: on
    for add in reversed(options):
        magic = add(magic)
    return magic


def send(line: Line, steps: Steps) -> None:
    """Send a cell as the line's options say: its first step does, the others follow it."""
    options, pool = line.options, line.pool
    name, here = options.out or "", getattr(options, "here_too", False)
    if name and not name.isidentifier():
        raise UsageError(f"`-o {name}`: give a name for the result, such as `-o result`.")
    if here and _awaits(pool.shell, line.cell):
        raise UsageError(
            "`--here-too`: the cell uses `await`, but the notebook's event loop is busy with this "
            "cell; nothing has run. Run it in the notebook in a separate cell."
        )
    running = next(steps)
    if options.no_wait:
        told = f"`{name}.wait()` waits for it, " if name else ""
        ranks = count(len(running.task.ranks), "rank")
        line.display.wait_for(
            f"running on {ranks} in the background · {told}`%dist_interrupt` stops it"
        )
        job = Job(steps, running, name, CellPlace(pool.shell))
        pool.background.begin(job)
        _bind(line, name, job)
    raised = _run_here(line, running) if here else None
    if not options.no_wait:
        try:
            _bind(line, name, through(steps))
        except NbdistError:
            if pool.last and pool.world:
                _bind(line, name, result_of(pool, pool.world, pool.last))
            raise
    if raised is not None:
        raise LocalCellError(raised, len(running.task.ranks))


def _awaits(shell: InteractiveShell, cell: str) -> bool:
    """Say whether the cell has a top-level `await`; False for what is no Python."""
    try:
        transformed = shell.transform_cell(cell)
    except SyntaxError:
        return False
    return bool(shell.should_run_async(cell, transformed_cell=transformed))


def _run_here(line: Line, running: RunningTask) -> BaseException | None:
    """Run the cell in the notebook too; return what it raised, which has been shown."""
    ran: Any = line.pool.shell.run_cell(line.cell)
    _keep_owners(line, running)
    error: BaseException | None = ran.error_before_exec
    if error is None:  # either can be falsy
        error = ran.error_in_exec
    if isinstance(error, KeyboardInterrupt):  # Stop is for all of the cell
        running.stops += 1
        return None
    return error


def _keep_owners(line: Line, running: RunningTask) -> None:
    """Leave the names to the ranks that have bound them already, as to those that will."""
    if line.pool.world is None:
        return
    names = line.pool.world.session.names
    for track in running.transcript:
        for name in track.done.bound if track.done else ():
            names.gathered(name, (track.rank,))


def _bind(line: Line, name: str, value: object) -> None:
    """Bind it in the notebook, whose name it is from now on."""
    if name:
        line.pool.shell.user_ns[name] = value
        if line.pool.world:
            line.pool.world.session.names.bound_in_notebook([name])
