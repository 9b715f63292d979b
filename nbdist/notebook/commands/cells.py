"""The magics that run cells on workers, that set auto mode, and that list magics (`%dist_help`).

They run in the notebook's process when a user calls them.
"""

from __future__ import annotations

import re
from argparse import SUPPRESS
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from difflib import get_close_matches
from typing import Any

from IPython.core.error import StdinNotImplementedError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic_arguments import argument

from nbdist.config import number_of_seconds
from nbdist.errors import LocalCellError, NbdistError, UsageError
from nbdist.notebook.cell_text import as_magic, has_code, split_off_magics
from nbdist.notebook.cells import result_of, run_steps, source_steps
from nbdist.notebook.command import Command, MagicCall, cell_options, command, find_commands
from nbdist.notebook.commands.values import save_due_snapshot
from nbdist.notebook.display import CommandOutput, below, block, table
from nbdist.notebook.jobs import CellPlace, CellSteps, Job
from nbdist.notebook.options import (
    POOL,
    RANKS_FORMS,
    Magic,
    parse,
    ranks_option,
    restarts_option,
    world_options,
)
from nbdist.topology import parse_ranks
from nbdist.words import count
from nbdist.world.task_run import TaskRun

sending_options = (
    argument("--no-wait", action="store_true", help="return at once and keep showing the "
        "output while the notebook does other things; -o gives a Job to wait for"),
    argument("-o", "--out", metavar="NAME", help="store the result as NAME, a mapping from"
             " rank to the last value; with --no-wait a Job: NAME.wait(), .done(), .result(),"
             " .interrupt()"),
    argument("--timeout", metavar="SECONDS", type=number_of_seconds("--timeout"),
             help="stop the cell after SECONDS, as Stop does"),
    argument("--quiet", action="store_true", help="show the output only if the cell fails or is"
             " stopped; %%dist_output shows it in any case"),
)  # fmt: skip


def send(line: MagicCall, steps: CellSteps) -> None:
    """Run a cell on ranks: the first of `steps` sends the cell, the others follow it to its end.

    With `--no-wait` the cell becomes a `Job`, which has its result or error later.  Otherwise this
    function waits for the cell, and raises the cell's error.  With `--here-too` the cell also runs
    in the notebook, while the ranks run it; if it fails there, and the ranks' error is not raised,
    raises LocalCellError.
    """
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
        wait_hint = f"`{name}.wait()` waits for it, " if name else ""
        ranks = count(len(running.task.ranks), "rank")
        line.display.show_status(
            f"running on {ranks} in the background · {wait_hint}`%dist_interrupt` stops it",
            in_background=True,
        )
        job = Job(steps, running, name, CellPlace(pool.shell))
        pool.jobs.begin(job)
        _bind(line, name, job)
    raised = None
    if here:
        raised = _run_here(line, running)
        _give_names_to_ranks(line, running)
    if not options.no_wait:
        # Remember the last attempt here, since `pool.last` may be another cell, which the callback
        # of a job has sent.
        attempts = deque([running], maxlen=1)
        try:
            _bind(line, name, run_steps(steps, attempts.append))
        except NbdistError:
            if pool.world:
                _bind(line, name, result_of(pool, pool.world, attempts[0]))
            raise
    if raised is not None:
        raise LocalCellError(raised, len(running.task.ranks))


def _awaits(shell: InteractiveShell, cell: str) -> bool:
    """Return True if the cell awaits something outside of functions; False if it is not Python."""
    try:
        transformed = shell.transform_cell(cell)
    except SyntaxError:
        return False
    return bool(shell.should_run_async(cell, transformed_cell=transformed))


def _run_here(line: MagicCall, running: TaskRun) -> BaseException | None:
    """Run the cell in the notebook too; return its error, or None if it has succeeded.

    IPython has shown the error already.  If Stop has ended the cell, interrupts the ranks too and
    returns None.
    """
    ran: Any = line.pool.shell.run_cell(line.cell)
    error: BaseException | None = ran.error_before_exec
    if error is None:  # `or` would be wrong: a user's exception can be false as a truth value
        error = ran.error_in_exec
    if isinstance(error, KeyboardInterrupt):
        running.stop.presses += 1
        return None
    return error


def _give_names_to_ranks(line: MagicCall, running: TaskRun) -> None:
    """Record that names which a `--here-too` cell has bound on both sides belong to the ranks.

    Otherwise later cells would send the notebook's values to the ranks.  Names that ranks bind in
    this cell after this call will belong to the ranks, too.
    """
    if (world := line.pool.world) is None:
        return
    names = world.engine.names
    for track in running.transcript:
        for name in track.done.bound if track.done else ():
            names.record_gathered(name, (track.rank,))
    running.sent_at = names.take_time()


def _bind(line: MagicCall, name: str, value: object) -> None:
    if name:
        line.pool.shell.user_ns[name] = value
        if line.pool.world:
            line.pool.world.engine.names.record_assigned([name])


ASKED = (
    "The variables of the notebook and of the ranks will be deleted and cannot be recovered. "
    "Proceed (y/[n])? "
)

NO_CODE_NOTE = (
    "the cell has no code, so nothing has run; `%dist_init -n 4` starts workers without one"
)

CELL_OPTIONS = cell_options()

_RESET = re.compile(r"\s*%reset\b([^\n]*)")
_RANK_SEPARATOR = re.compile(r"(?<=\d)\s+(?=[\d-])")  # blanks between ranks that no comma divides


@command(
    ranks_option,
    argument("--auto", action="store_true", help=SUPPRESS),
    argument("--setup", action="store_true",
             help="run the cell again in every worker that is restarted"),
    restarts_option,
    *sending_options,
    *(each.add for each in CELL_OPTIONS),
    argument("--here-too", action="store_true",
             help="run the cell in the notebook too, at the same time"),
    world_options,
    kind="cell",
    in_a_line=True,
)  # fmt: skip
def distributed(line: MagicCall) -> None:
    """Run the cell on all workers at once; the first such cell starts them.

        %%distributed -n 4
        model = DistributedDataParallel(Net().to(device))

        %%distributed -r 0,2-3
        print(rank, loss.item())

    Variables of the notebook that the cell uses are sent with it.  `%distributed x = 1` runs one
    line; magics of the notebook at the end of the cell (`%dist_gather loss`) run after it.
    """
    if line.options.auto and not _reset_here(line):
        return
    line.cell, last = split_off_magics(line.cell)
    if has_code(line.cell):
        send(line, _steps(line))
    elif not last:
        line.display.show_text(NO_CODE_NOTE)
    shell = line.pool.shell
    for name, text, target in last:
        value = shell.run_line_magic(name, text)
        if target:
            shell.user_ns[target] = value


def _reset_here(line: MagicCall) -> bool:
    """If a cell in auto mode begins with `%reset`, run that line in the notebook too.

    Without `-f` in the line the user is asked first.  Returns False if the user says no, so that
    the ranks do not run the cell either, and True otherwise.  The ranks' `%reset` gets `-f`, so
    that no rank asks again.
    """
    shell: Any = line.pool.shell
    cell = as_magic(shell, line.cell, line.pool.world)
    match = _RESET.match(cell)
    if match is None:
        return True
    if "-f" not in match[1].split():
        try:
            is_meant = shell.ask_yes_no(ASKED, default="n")
        except StdinNotImplementedError:  # nobody can answer: delete, as IPython's `%reset` does
            is_meant = True
        if not is_meant:
            line.display.show_text("nothing was deleted")
            return False
    shell.run_line_magic("reset", f"-f {match[1]}")
    line.cell = f"%reset -f {match[1]}{cell[match.end() :]}"
    return True


def _steps(line: MagicCall) -> CellSteps:
    options = line.options
    pool = line.pool
    first_line = "" if options.auto else line.text
    with ExitStack() as stack:
        for each in CELL_OPTIONS:
            stack.enter_context(each.around(line))
        result = yield from source_steps(pool, first_line, line.cell, line.display, options)
    if not isinstance(result, BaseException):
        save_due_snapshot(pool)
    return result


def _split_ranks(_: Magic, text: str) -> tuple[str, list[str]]:
    """Return a line for argparse in which all text except `--pool NAME` is one argument, the ranks.

    Argparse by itself would take `-1` for an option, and `0, 2` for two arguments.  The second
    value, further words, is always [].  Raises UsageError if the text names no ranks.
    """
    ranks = "".join(_RANK_SEPARATOR.sub(",", POOL.sub(" ", text)).split())
    if not ranks:
        raise UsageError("`%%rank` needs ranks: `%%rank 0`, `%%rank 0,2-3`, `%%rank -1`.")
    pool = POOL.search(text)
    return f"{pool[0] if pool else ''} -- {ranks}", []


@command(
    argument("ranks", help=f"which ranks: {RANKS_FORMS}"),
    kind="cell",
    split=_split_ranks,
)
def rank(line: MagicCall) -> None:
    """Run the cell on some ranks only: `%%rank 0,2-3` is `%%distributed -r 0,2-3`."""
    # `busy_world` raises WorldNotStarted if there is no world: `%%rank` must not start workers.
    parse_ranks(line.options.ranks, line.busy_world.size)
    line.options = parse(distributed.run, line.command.shown_name, f"-r={line.options.ranks}")
    distributed.run(line)


ON = (
    "auto mode is on: cells run on the workers, also `%time` and the like; `!` commands and magics "
    "of the notebook (`%cd`, `%pip`, `%dist_...`) run here, once; "
    "`%%local` on its first line runs a cell here, `%dist_auto off` ends it"
)
OFF = "auto mode is off: cells run here, those with `%%distributed` on the workers"


@command(argument("state", nargs="?", help="on or off; without an argument it shows which"))
def dist_auto(line: MagicCall) -> str:
    """Run cells on the workers from now on, as if each began with `%%distributed`.

    Magics of the notebook such as `%cd` and `%pip` run here, once, and so do lines with `!`,
    unless they fill in a variable of the ranks; `%matplotlib` and `%load_ext` run here and on the
    workers.  A cell with the tag `distributed` in JupyterLab runs on the workers also while auto
    mode is off.
    """
    mode, state = line.auto, line.options.state
    if state not in (None, "on", "off"):
        raise UsageError(f"`%dist_auto {state}`: `%dist_auto on` or `%dist_auto off`.")
    if state is not None:
        mode.pool = line.pool.name if state == "on" else None
    return ON if mode.pool else OFF


@command(kind="cell")
def local(line: MagicCall) -> None:
    """Run the cell in the notebook while `%dist_auto` is on."""
    # In a notebook this runs only if code calls the magic, because `transform_first_lines` turns a
    # cell that begins with `%%local` into a plain cell.
    shell = line.pool.shell
    result = shell.run_cell(line.cell)
    # Raise the error in a kernel, so that it aborts the queued cells.  A terminal queues no cells,
    # and IPython has shown the error already.
    if hasattr(shell, "kernel"):
        result.raise_error()


EVERYDAY = "everyday"
_GROUPS = {
    EVERYDAY: "distributed dist_gather dist_status dist_output dist_run dist_restart dist_help",
    "values": "dist_push dist_scatter dist_sync dist_diff dist_snapshot dist_restore dist_export",
    "looking": "dist_memory dist_plot dist_timeline dist_debug",
    "lifecycle": "dist_init dist_scale dist_interrupt dist_shutdown dist_auto rank local",
    "many machines": "dist_attach",
}
COMMAND_GROUPS = {title: names.split() for title, names in _GROUPS.items()}
"""The magics by purpose; the manual and the package's docstring have the same order."""

MACHINES = (
    ("%dist_init --hosts a,b", "Start workers on machines reached by ssh"),
    ("%dist_init --launcher join", "Wait for machines that run `nbdist join`"),
)
"""Calls of `%dist_init` for many machines, which `%dist_help` lists beside the magics."""


@command(
    argument("magic", nargs="?", help="the magic whose help is shown: gather, or %%dist_gather"),
    argument("--all", action="store_true", dest="everything",
             help="a line for each magic, also for short forms"),
    looks=("",),
)  # fmt: skip
def dist_help(line: MagicCall) -> CommandOutput:
    """List the magics, or show the help of a magic.

        %dist_help
        %dist_help gather

    `%dist_gather -h` and `%dist_gather?` show the same help.
    """
    commands = {each.name: each for each in find_commands()}
    if line.options.magic is not None:
        return block(_find_magic(line.options.magic, commands).help_text)
    tables = _tables_of_magics(commands)
    if line.options.everything:
        short = [each for each in commands.values() if each.short_for]
        rows = [(each.shown_name, each.short_for.strip("`")) for each in short]
        tables["short forms"] = [("magic", "what it is"), *rows]
    else:
        names = {
            title: "  ".join(dict.fromkeys(name.split()[0] for name, _ in rows))
            for title, (_, *rows) in tables.items()
        }
        del names[EVERYDAY]
        tables = {EVERYDAY: tables[EVERYDAY], "others": [("for", "magics"), *names.items()]}
    width = max(len(name) for rows in tables.values() for name, _ in rows)
    hint = "`%dist_help gather` shows options and examples of a magic"
    more = "" if line.options.everything else ", `%dist_help --all` a line for each magic"
    head = table(f"{hint}{more}", [])
    return below([head, *(table(t, rows, first_width=width) for t, rows in tables.items())])


def _find_magic(typed: str, commands: Mapping[str, Command]) -> Command:
    """Return the magic that a user names with or without `%` and `dist_`, or raise UsageError."""
    name = typed.lstrip("%")
    for full_name in (name, f"dist_{name}"):
        if full_name in commands:
            return commands[full_name]
    similar = get_close_matches(name, [each.removeprefix("dist_") for each in commands], 1)
    hint = f" Did you mean `%dist_help {similar[0]}`?" if similar else ""
    raise UsageError(
        f"`%dist_help {typed}`: there is no such magic.{hint} `%dist_help --all` lists all."
    )


def _tables_of_magics(commands: Mapping[str, Command]) -> dict[str, list[tuple[str, str]]]:
    """Return by title a table for each group of magics: a row of headings, then rows of magics.

    Short forms of magics are left out.
    """
    groups = {
        title: [commands[name] for name in names if name in commands]
        for title, names in COMMAND_GROUPS.items()
    }
    grouped = {name for names in COMMAND_GROUPS.values() for name in names}
    others = [each for each in commands.values() if each.name not in grouped and not each.short_for]
    tables = {
        title: [("magic", "what it does"), *((each.shown_name, summary(each)) for each in group)]
        for title, group in {**groups, "other packages": others}.items()
        if group
    }
    tables["many machines"] += MACHINES
    return tables


def summary(command: Command) -> str:
    """Return the first sentence of the command's help."""
    return command.summary.partition(". ")[0].rstrip(".")
