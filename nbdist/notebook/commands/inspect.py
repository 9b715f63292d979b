"""The magics that show workers: states, stacks, output, the last failure, the ends of log files.

They run in the notebook's process when a user calls them, some of them also while a cell runs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from html import escape
from pathlib import Path

from IPython.core.magic_arguments import argument

from nbdist.config import number_of_seconds, whole_number
from nbdist.errors import UsageError
from nbdist.notebook.cell_text import request_of
from nbdist.notebook.command import MagicCall, command
from nbdist.notebook.display import CommandOutput, below, block, table
from nbdist.notebook.options import ranks_option
from nbdist.notebook.pool import Pool
from nbdist.notebook.rich_output import Below
from nbdist.output.html_parts import (
    AMBER,
    BLUE,
    GREEN,
    RED,
    barred,
    bold,
    details,
    dim,
    line,
    panel,
    text_html,
)
from nbdist.output.text import whole_text
from nbdist.output.wording import lines_text
from nbdist.system.folders import current_folder
from nbdist.system.processes import MODULE_OPTIONS, safe_environ, without_debugger
from nbdist.topology import parse_ranks
from nbdist.wire.log_files import GetLogs, LogTail, read_logs
from nbdist.wire.messages import GetRefused, GetStacks, GetStatus
from nbdist.wire.places import Stack
from nbdist.words import count, format_ranks, in_pool, name_ranks
from nbdist.world.hangs import Who, group_stacks, stacks_text
from nbdist.world.rank_table import RankTable
from nbdist.world.recovery import record_changes
from nbdist.world.result import log_lines, logs_text, rows
from nbdist.world.spec import default_log_dir

# --- the last lines of the ranks' log files, read from their ends ---------------------------------

TAIL = whole_number("--tail", "a number, such as `--tail 1`")
ATTEMPT_OPTION = whole_number("--attempt", "a number, such as `--attempt 1`", minimum=0)

STREAM_CHOICES = ("stdout", "stderr")

PAGE_LINES = 10_000  # lines in each further request, if the first one brought too few

ReadLogs = Callable[[GetLogs], tuple[LogTail, ...]]

NO_FILES = (
    "These workers have no log files: NBDIST_LOG_DIR is empty, or they could not be "
    "written. Set it, then `%dist_restart`; `%dist_output` has the last cell's lines."
)


log_options = (
    argument("--tail", metavar="N", type=TAIL, default=50,
             help="log: number of lines per rank (50)"),
    argument("--grep", metavar="PATTERN", help="log: only lines that match this pattern"),
    argument("--stdout", action="store_true", help="log: only what went to stdout"),
    argument("--stderr", action="store_true", help="log: only what went to stderr"),
    argument("--attempt", metavar="N", type=ATTEMPT_OPTION,
             help="log: of attempt N (0 = first start)"),
)  # fmt: skip


def log_of(line: MagicCall) -> CommandOutput:
    """Return the last lines of the ranks' log files.

    If all ranks are on this machine, the files are read here.  Otherwise agents read the files of
    their machines.  `line` has the options, such as `--tail` and `--grep`.
    """
    options, world = line.options, line.pool.world
    try:
        pattern = None if options.grep is None else re.compile(options.grep)
    except re.error as error:
        problem = f"`--grep {options.grep}` is not a regular expression: {error}."
        raise UsageError(problem) from None
    streams = tuple(s for s in STREAM_CHOICES if getattr(options, s)) or STREAM_CHOICES
    if world is None:
        raise UsageError(
            "There are no workers whose log to show; the files of earlier runs are in "
            f"{default_log_dir() or 'no folder: NBDIST_LOG_DIR is empty'}."
        )
    table = world.engine.rank_table
    if table.is_elsewhere:
        ask = partial(line.query_agent, line.pool)
    else:
        folders = {rank: Path(folder) for rank, folder in world.logs.items() if folder}
        ask = partial(read_logs, {rank: folders.get(rank) for rank in line.ranks})
    get = GetLogs(line.ranks, streams, options.tail, options.attempt)
    answers = ask(get)
    files = [*_files(answers, get, table)]
    tails = [each._replace(lines=last_lines(each, get, ask, pattern)) for each in answers]
    none = "no lines" + (f" with {options.grep}" if pattern else "")
    return block("\n".join([*(logs_text(tails, table.machines.who) or [none]), *files]))


def last_lines(
    tail: LogTail, get: GetLogs, ask: ReadLogs, pattern: re.Pattern[str] | None = None
) -> tuple[str, ...]:
    """Return the last lines of a log, at most `get.most`; with `pattern`, only lines that match.

    `tail` has the lines that the request `get` has brought.  If too few of them match, `ask` brings
    earlier lines of the log.
    """
    lines: list[str] = []
    more = get._replace(ranks=(tail.rank,), streams=(tail.stream,), most=PAGE_LINES)
    while True:
        lines = log_lines(tail, pattern) + lines
        if len(lines) >= get.most or not tail.start:
            return tuple(lines[-get.most :])
        (tail,) = ask(more._replace(end=tail.start)) or (tail._replace(lines=(), start=0),)


def _files(tails: Sequence[LogTail], get: GetLogs, table: RankTable) -> Iterator[str]:
    """Yield the lines below the logs: where the log files are, and whose output is missing.

    A rank's output is missing if its log file could not be written, or if no answer about the rank
    has come.  Raises UsageError if none of the `tails` has a log file, or if the option `--attempt`
    (`get.attempt`) names a start of the workers that has no logs.
    """
    machines, folders = table.machines, dict[tuple[str, Path], list[int]]()
    attempts = {number for each in tails for number in each.attempts}
    for each in tails:
        if each.file:
            host = f"{machines.name(each.rank)}:" if table.is_elsewhere else ""
            folders.setdefault((host, Path(each.file).parent.parent), []).append(each.rank)
    if tails and not folders:
        raise UsageError(NO_FILES)
    if folders and get.attempt is not None and get.attempt not in attempts:
        last = f"there are {format_ranks(attempts)}, the last is now"
        raise UsageError(f"`--attempt {get.attempt}`: {last}.")
    for (host, folder), on in folders.items():
        yield f"files: {host}{folder}/[{format_ranks(on)}]/[{','.join(get.streams)}].log"
    if cut := sorted({each.rank for each in tails if each.is_cut}):
        yield f"{machines.who(cut)} wrote more than is there: the files could not be written"
    if lost := {*get.ranks} - {each.rank for each in tails}:
        yield f"no answer for {machines.who(lost)}"


# --- states, stacks, the last cell's output and the last failure ------------------------------

SHORTEST = 0.5  # least seconds between refreshes by `--follow`, as each takes some time

DOCTOR_TIMEOUT = 180.0
"""Seconds for `nbdist doctor`, which itself allows 120 s for the import of torch."""

STATE_COLOURS = {"idle": "#2aa44f", "busy": "#1f77e0", "dead": "#d03030", "starting": "#b8860b"}


@command(
    argument("-v", "--verbose", action="store_true",
             help="also show who owns each variable and refused connections"),
    argument("-f", "--follow", metavar="SECONDS", type=number_of_seconds("--follow"),
             help="refresh every SECONDS, until Ctrl-C or Stop"),
    argument("--stack", action="store_true", help="show the Python stack of each rank instead"),
    argument("--doctor", action="store_true",
             help="show what will not work on this machine instead, and what to do"),
    ranks_option,
    looks=("",),
)  # fmt: skip
def dist_status(line: MagicCall) -> None:
    """Show each rank's state, process, device, memory, line of the cell, last collective.

    Answers in about 0.2 s, also while a cell runs.  `--stack` shows where ranks are and how they
    came there, while they compute, wait in a collective or hold the GIL in C code.
    """
    if line.options.doctor:
        doctor_report().show_on(line.display)
        return
    pools = [pool for pool in line.pools if pool.has_workers] or [line.pool]
    every = line.options.follow
    if every is None:
        for pool in pools:
            _pool_status(line, pool).show_on(pool.display())
        return
    clear = "\x1b[H\x1b[2J" if sys.stdout.isatty() and not line.display.can_change else ""
    with suppress(KeyboardInterrupt):
        while True:
            shown = below(_pool_status(line, pool) for pool in pools)
            sys.stdout.write(clear)
            shown.show_on(line.display)
            time.sleep(max(every, SHORTEST))


def doctor_report() -> CommandOutput:
    """Run `nbdist doctor` in a new process, and return its output.

    Raises UsageError if the process has not ended after DOCTOR_TIMEOUT seconds.
    """
    try:
        with without_debugger():
            done = subprocess.run(
                [sys.executable, *MODULE_OPTIONS, "nbdist.terminal", "doctor"],
                env=safe_environ(os.environ, current_folder()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=DOCTOR_TIMEOUT,
            )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"`nbdist doctor` has not ended after {DOCTOR_TIMEOUT:g} s; run it in a terminal, "
            "where each line appears as soon as it is known."
        ) from None
    return block(done.stdout.rstrip())


def _pool_status(line: MagicCall, pool: Pool) -> CommandOutput:
    if line.options.stack:
        if pool.world is None:
            return shown_stacks(_headline(pool), ())
        ranks = parse_ranks(line.options.ranks or "all", pool.world.size)
        stacks = line.query_agent(pool, GetStacks(ranks))
        # Read the headline only now: the request for stacks has shown whether the agent is lost.
        return shown_stacks(_headline(pool), stacks, pool.world.engine.rank_table.machines.who)
    workers = line.query_agent(pool, GetStatus())
    if line.options.ranks is not None:
        ranks = parse_ranks(line.options.ranks, len(workers))
        workers = tuple(each for each in workers if each.rank in ranks)
    shown = table(_headline(pool), rows(workers), STATE_COLOURS)
    if not line.options.verbose:
        return shown
    owners: Mapping[str, tuple[str, frozenset[int]]] = {}
    changed: list[str] = []
    if pool.world is not None:
        engine = pool.world.engine
        if engine.task_table.is_idle:
            record_changes(engine, engine.rank_table.everyone)
        owners, changed = engine.names.owners(), engine.names.changed_names()
    lines = []
    for owner, words in (("workers", "made on the workers"), ("notebook", "sent by the notebook")):
        names = sorted(name for name, (whose, _) in owners.items() if whose == owner)
        if owner == "notebook":
            names = [name for name in names if name not in changed]
            if changed:
                lines.append(f"sent, and changed on the workers: {', '.join(sorted(changed))}")
        lines.append(f"{words}: {', '.join(names) or 'none'}")
    if pool.world is not None and pool.world.engine.rank_table.is_elsewhere:
        refused = line.query_agent(pool, GetRefused()) or "none"
        lines.append(f"refused connections without this world's keys: {refused}")
    return below([shown, block("\n".join(lines))])


def _headline(pool: Pool) -> str:
    """Return a line such as `4 workers on node01 · gloo · ready`, or how to start workers.

    The line ends with the `--name` of the world if it has one, and has `8 workers as 2x4` if there
    are several nodes.
    """
    world = pool.world
    if world is None or not world.state.has_workers:
        return "no workers are running · `%%distributed -n 4` or `%dist_init -n 4` starts them"
    table, workers = world.engine.rank_table, count(world.size, "worker")
    shape = "" if table.layout.startswith("1x") else f" as {table.layout}"
    parts = [f"{pool.title}{workers}{shape} on {table.machines}", table.backend]
    return " · ".join(filter(None, [*parts, world.state.value, world.engine.config.name]))


OPEN_LINES = 60


def shown_stacks(head: str, stacks: Iterable[Stack], who: Who = name_ranks) -> CommandOutput:
    """Return the stacks of ranks as an output; equal stacks are shown once, with their ranks.

    Stacks that differ only in memory addresses or process ids count as equal.  On a page, a click
    opens or closes a stack.  The first stack is open, and so is a further stack if it and all
    stacks above it together have at most `OPEN_LINES` lines.
    """
    groups, parts, drawn = group_stacks(stacks), [line(bold(head))], 0
    for each in groups:
        drawn += len(each.lines)
        shown, colour = f"{bold(each.named(who))} {dim(each.doing)}", _colour(each.first)
        if not each.lines:
            parts.append(barred(shown, colour))
            continue
        body = escape("\n".join(each.lines), quote=False)
        box = text_html(body, ";max-height:546px;overflow:auto")
        is_open = len(parts) == 1 or drawn <= OPEN_LINES
        parts.append(details(shown, box, colour, is_open=is_open))
    return CommandOutput(panel(*parts), "\n".join([head, *stacks_text(groups, who)]))


def _colour(stack: Stack) -> str:
    if stack.state == "dead" or stack.place.is_stopped:
        return RED
    if stack.place.operation or stack.place.holds_gil:
        return AMBER
    return BLUE if stack.state == "busy" else GREEN


LINES_AGAIN = 1000  # lines that `%dist_output -r 3` shows at most without `--all`


@command(
    argument("cell", nargs="?", metavar="-N", type=int, default=-1,
             help="-2: the cell before the last, and so on"),
    ranks_option,
    argument("--all", action="store_true", dest="everything",
             help="all lines, not only the last ones"),
    argument("--failed", action="store_true", help="the last failure, also after a restart"),
    argument("--log", action="store_true", help="the last lines of the ranks' log files"),
    *log_options,
    looks=("log", "failed"),
)  # fmt: skip
def dist_output(line: MagicCall) -> CommandOutput | str | None:
    """Show the output of the last distributed cell again.

    `--failed` shows when and where the last failure was, with its traceback or last output;
    `--log` shows the last lines that ranks have written since they were started.
    """
    if line.options.failed:
        failure = line.pool.failures.last
        return failure.shown if failure else "nothing has failed yet"
    if line.options.log:
        return log_of(line)
    pool, world, everything = line.pool, line.pool.world, line.options.everything
    if pool.last is None or world is None:
        raise UsageError("No distributed cell has run yet, so there is no output to show.")
    # This page gets the output now, so the next cell need not tell it about missed output.
    pool.request = request_of(pool.shell)
    pool.jobs.show_output()
    past, number = pool.late.cells.past(pool.last.transcript), line.options.cell
    if not -len(past) <= number < 0:
        raise UsageError(
            f"`%dist_output {number}`: the output of {count(len(past), 'cell')} is kept; "
            f"`%dist_output -1` is the last one{f', -{len(past)} the first' if past[1:] else ''}."
        )
    transcript = past[number]
    if line.options.ranks is None and not everything:
        line.display.show_again(transcript, world.engine.rank_table.log_files)
        return None
    ranks = [rank for rank in line.ranks if rank in transcript.ranks]
    if not ranks:
        raise UsageError(f"The cell ran on {name_ranks(transcript.ranks)} only.")
    lines = whole_text(transcript, ranks, world.engine.rank_table.log_files).splitlines()
    if not everything and (more := len(lines) - LINES_AGAIN) > 0:
        again = in_pool(f"%dist_output -r {format_ranks(ranks)} --all", pool.own_name)
        lines[:more] = [f"… {lines_text(more)} more: {again}"]
    block("\n".join(lines)).show_on(line.display)
    if line.display.can_change:
        Below(pool.own_name).add(transcript, ranks)
    return None


dist_stack = dist_status.short("dist_stack", "--stack")
dist_log = dist_output.short("dist_log", "--log")
dist_why = dist_output.short("dist_why", "--failed")
