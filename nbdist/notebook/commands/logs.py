"""The last lines of the ranks' log files, read from their ends: here, or on other machines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from IPython.core.magic_arguments import argument

from nbdist.errors import UsageError
from nbdist.notebook.command import Line, command
from nbdist.notebook.display import Shown, block
from nbdist.notebook.options import Magic, ranks_option
from nbdist.output.ansi import strip
from nbdist.readers import whole_number
from nbdist.wire.files import GetLogs, LogTail, read_logs
from nbdist.words import format_ranks
from nbdist.world.session import Session
from nbdist.world.spec import default_log_dir
from nbdist.world.states import Machines

TAIL = whole_number("--tail", "a number, such as `--tail 1`")
ATTEMPT = whole_number("--attempt", "a number, such as `--attempt 1`", least=0)

STREAMS = ("stdout", "stderr")

PAGE_LINES = 10_000
"""Lines that are asked for at a time where more are needed."""

Ask = Callable[[GetLogs], tuple[LogTail, ...]]

NO_FILES = (
    "These workers have no log files: NBDIST_LOG_DIR is empty, or they could not be "
    "written. Set it, then `%dist_restart`; `%dist_output` has the last cell's lines."
)


def log_options(magic: Magic) -> Magic:
    """Add what chooses lines of the log files."""
    # fmt: off
    options = (
        argument("--tail", metavar="N", type=TAIL, default=50,
                 help="log: number of lines per rank (50)"),
        argument("--grep", metavar="PATTERN", help="log: only lines that match this pattern"),
        argument("--stdout", action="store_true", help="log: only what went to stdout"),
        argument("--stderr", action="store_true", help="log: only what went to stderr"),
        argument("--attempt", metavar="N", type=ATTEMPT,
                 help="log: of attempt N (0 = first start)"),
    )
    # fmt: on
    for add in reversed(options):
        magic = add(magic)
    return magic


@command(ranks_option, log_options, looks=True, short_for="`%dist_output --log`")
def dist_log(line: Line) -> Shown:
    """Show the last lines of each rank's log, equal lines once, and the files' names.

    All that ranks have written since they were started is there, whatever was shown of it.
    """
    return log_of(line)


def log_of(line: Line) -> Shown:
    """Read the files, here or on other machines, and draw the ends of them."""
    options, world = line.options, line.pool.world
    pattern = _pattern(options.grep)
    streams = tuple(s for s in STREAMS if getattr(options, s)) or STREAMS
    if world is None:
        raise UsageError(
            "There are no workers whose log to show; the files of earlier runs are in "
            f"{default_log_dir() or 'no folder: NBDIST_LOG_DIR is empty'}."
        )
    session = world.session
    if session.is_elsewhere:
        ask = partial(line.look, line.pool)
    else:
        folders = {rank: Path(folder) for rank, folder in world.logs.items() if folder}
        ask = partial(read_logs, {rank: folders.get(rank) for rank in line.ranks})
    get = GetLogs(line.ranks, streams, options.tail, options.attempt)
    found = ask(get)
    files = [*_files(found, get, session)]
    tails = [replace(each, lines=last_lines(each, get, ask, pattern)) for each in found]
    lines = [each for group in grouped(tails) for each in _group(group, session.machines)]
    if not lines:
        lines = ["no lines" + (f" with {options.grep}" if pattern else "")]
    return block("\n".join([*lines, *files]))


def last_lines(
    tail: LogTail, get: GetLogs, ask: Ask, pattern: re.Pattern[str] | None = None
) -> tuple[str, ...]:
    """Return the last lines, or the last that hold the pattern; `tail` is what `get` got."""
    found: list[str] = []
    more = replace(get, ranks=(tail.rank,), streams=(tail.stream,), most=PAGE_LINES)
    while True:
        lines = map(as_seen, tail.lines)
        found = [line for line in lines if pattern is None or pattern.search(line)] + found
        if len(found) >= get.most or not tail.start:
            return tuple(found[-get.most :])
        (tail,) = ask(replace(more, end=tail.start)) or (replace(tail, lines=(), start=0),)


def as_seen(line: str) -> str:
    """Return it without colours; what a progress bar has overwritten was never seen either."""
    return strip(line).rstrip("\r").rpartition("\r")[2]


def grouped(tails: list[LogTail]) -> list[list[LogTail]]:
    """Put tails of one stream with equal lines together; leave out those that have none."""
    found: dict[tuple[str, tuple[str, ...]], list[LogTail]] = {}
    for tail in tails:
        if tail.lines:
            found.setdefault((tail.stream, tail.lines), []).append(tail)
    return [*found.values()]


def _group(group: list[LogTail], machines: Machines) -> list[str]:
    """Write a header with the ranks, and their lines."""
    first = group[0]
    same = " (same)" if len(group) > 1 else ""
    stderr = " · stderr" if first.stream == "stderr" else ""
    return [f"── {machines.who(tail.rank for tail in group)}{same}{stderr} ──", *first.lines]


def _files(found: Sequence[LogTail], get: GetLogs, session: Session) -> Iterator[str]:
    """Name the files, and the ranks of which no agent has told; UsageError where there are none."""
    machines, folders = session.machines, dict[tuple[str, Path], list[int]]()
    there = {number for each in found for number in each.attempts}
    for each in found:
        if each.file:
            host = f"{machines.name(each.rank)}:" if session.is_elsewhere else ""
            folders.setdefault((host, Path(each.file).parent.parent), []).append(each.rank)
    if found and not folders:
        raise UsageError(NO_FILES)
    if folders and get.attempt is not None and get.attempt not in there:
        last = f"there are {format_ranks(there)}, the last is now"
        raise UsageError(f"`--attempt {get.attempt}`: {last}.")
    for (host, folder), on in folders.items():
        yield f"files: {host}{folder}/[{format_ranks(on)}]/[{','.join(get.streams)}].log"
    if lost := {*get.ranks} - {each.rank for each in found}:
        yield f"no answer for {machines.who(lost)}"


def _pattern(text: str | None) -> re.Pattern[str] | None:
    if text is None:
        return None
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(f"`--grep {text}` is not a regular expression: {error}.") from None
