"""The end of the ranks' log files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from IPython.core.magic_arguments import argument

from nbdist.config import whole_number
from nbdist.errors import UsageError
from nbdist.notebook.command import Line, command
from nbdist.notebook.options import ranks_option
from nbdist.notebook.tables import Shown, block
from nbdist.output.ansi import strip
from nbdist.wire.log_files import MOVED, earlier_file
from nbdist.words import format_ranks, name_ranks
from nbdist.world.spec import default_log_dir

BLOCK = 1 << 16
LONGEST = 1 << 14
"""Bytes of a line that are shown; of longer ones the last."""

TAIL = whole_number("--tail", "a number, such as `--tail 1`")
ATTEMPT = whole_number("--attempt", "a number, such as `--attempt 1`", least=0)

STREAMS = ("stdout", "stderr")


@dataclass(frozen=True)
class Tail:
    """The last lines of one file."""

    rank: int
    stream: str
    lines: tuple[str, ...]


@command(
    ranks_option,
    argument("--tail", metavar="N", type=TAIL, default=50, help="how many lines of each rank (50)"),
    argument("--grep", metavar="PATTERN", help="only lines that hold this regular expression"),
    argument("--stdout", action="store_true", help="only what went to stdout"),
    argument("--stderr", action="store_true", help="only what went to stderr"),
    argument(
        "--attempt", metavar="N", type=ATTEMPT, help="before the N-th restart: 0 is the first start"
    ),
    looks=True,
)
def dist_log(line: Line) -> Shown:
    """Show the end of the ranks' log files, equal lines once, and name the files.

    All that ranks have written since they were started is there, whatever was shown of it.
    """
    options = line.options
    pattern, most = _pattern(options.grep), options.tail
    attempt, folders = _folders(line)
    streams = [s for s in STREAMS if getattr(options, s)] or [*STREAMS]
    tails = [
        Tail(rank, stream, tuple(last_lines(folder / f"{stream}.log", most, pattern)))
        for rank, folder in folders.items()
        for stream in streams
    ]
    parts = [each for group in grouped(tails) for each in _group(group)]
    if not parts:
        parts = ["no lines" + (f" with {options.grep}" if pattern else "")]
    which = format_ranks(folders)
    parts.append(f"files: {attempt}/[{which}]/[{','.join(streams)}].log")
    return block("\n".join(parts))


def grouped(tails: list[Tail]) -> list[list[Tail]]:
    """Put tails of one stream with equal lines together; leave out those that have none."""
    found: dict[tuple[str, tuple[str, ...]], list[Tail]] = {}
    for tail in tails:
        if tail.lines:
            found.setdefault((tail.stream, tail.lines), []).append(tail)
    return [*found.values()]


def _group(group: list[Tail]) -> list[str]:
    """Write a header with the ranks, and their lines."""
    first = group[0]
    same = " (same)" if len(group) > 1 else ""
    stderr = " · stderr" if first.stream == "stderr" else ""
    return [f"── {name_ranks(tail.rank for tail in group)}{same}{stderr} ──", *first.lines]


def last_lines(file: Path, most: int, pattern: re.Pattern[str] | None = None) -> list[str]:
    """Read the last lines of a file, or the last that hold the pattern; none of a missing file.

    Read from its end, and not further than needed.
    """
    found: list[str] = []
    for line in _through_both(file):
        text = strip(line.decode("utf-8", "replace")).rstrip("\r")
        # What a progress bar has overwritten was never seen either.
        text = text.rpartition("\r")[2]
        if pattern is None or pattern.search(text):
            found.append(text)
            if len(found) == most:
                break
    return found[::-1]


def _through_both(file: Path) -> Iterator[bytes]:
    """Read lines from the last to the first, also of the file with earlier ones."""
    earlier = earlier_file(file)
    goes_on, moved = earlier.exists(), MOVED.encode()
    yield from (line for line in _backwards(file) if not (goes_on and line.startswith(moved)))
    yield from _backwards(earlier)


def _backwards(file: Path) -> Iterator[bytes]:
    """Read lines from the last to the first, long ones cut at their beginning."""
    try:
        opened = file.open("rb")
    except FileNotFoundError:
        return
    with opened:
        position, rest = opened.seek(0, os.SEEK_END), b""
        is_last = True
        while position > 0:
            size = min(BLOCK, position)
            position = opened.seek(position - size)
            first, *lines = (opened.read(size) + rest).split(b"\n")
            if is_last and lines and not lines[-1]:
                lines.pop()  # the file ends with a newline
            is_last = False
            yield from reversed(lines)
            rest = first[-LONGEST:]
        if rest or not is_last:
            yield rest


def _folders(line: Line) -> tuple[Path, dict[int, Path]]:
    """Find the attempt's folder, and in it that of each rank; UsageError where there are none."""
    world, attempt = line.pool.world, line.options.attempt
    if world is None:
        raise UsageError(
            "There are no workers whose log to show; the files of earlier runs are in "
            f"{default_log_dir() or 'no folder: NBDIST_LOG_DIR is empty'}."
        )
    logs = {rank: Path(world.logs[rank]) for rank in line.ranks if world.logs.get(rank)}
    if not logs:
        raise UsageError(
            "These workers have no log files: NBDIST_LOG_DIR is empty, or they could not be "
            "written. Set it, then `%dist_restart`; `%dist_output` has the last cell's lines."
        )
    folder = next(iter(logs.values())).parent
    if attempt is None:
        return folder, logs
    other = folder.parent / f"attempt_{attempt}"
    if not other.is_dir():
        there = sorted(int(each.name[8:]) for each in folder.parent.glob("attempt_*"))
        raise UsageError(
            f"`--attempt {attempt}`: there are {format_ranks(there)}, the last is now."
        )
    return other, {rank: other / str(rank) for rank in line.ranks}


def _pattern(text: str | None) -> re.Pattern[str] | None:
    if text is None:
        return None
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(f"`--grep {text}` is no regular expression: {error}.") from None
