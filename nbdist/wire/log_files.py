"""Reads the last lines of ranks' log files, and makes the lines that nbdist itself writes there.

Agents write the files.  A notebook reads files on its own machine without an agent, since the files
outlive the agent.  It asks agents for the files on other machines.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import accumulate, chain, product
from pathlib import Path
from typing import NamedTuple

MOVED_NOTE, ATTEMPT_PREFIX = "[nbdist: what stood before this line was moved to ", "attempt_"
"""The beginning of a line in a log file, and the beginning of a folder's name.

MOVED_NOTE begins the first line of a log file whose earlier lines were moved to another file.
ATTEMPT_PREFIX begins the name of a folder, such as attempt_1, which has the log files of the
workers of one start."""

BLOCK, PAGE, LONGEST = 1 << 16, 1 << 20, 1 << 14
"""Numbers of bytes.

A log is read from its end, in blocks of BLOCK bytes, until the lines have more than PAGE bytes.  A
long line may begin in an earlier block than it ends.  If its part in the later blocks has more than
LONGEST bytes, only the last LONGEST bytes of the line are read."""


class GetLogs(NamedTuple):
    """Read the last `most` lines of these ranks' logs; answered by a tuple of `LogTail`.

    Each rank has a log for each of its streams, such as "stdout".  Fewer lines of a log are read if
    they have more than `PAGE` bytes together.  `attempt` is the number of a start of the workers,
    or None for the present start.  If `end` is the `start` of an earlier `LogTail`, the lines
    before that `LogTail` are read.
    """

    ranks: tuple[int, ...]
    streams: tuple[str, ...]
    most: int
    attempt: int | None = None
    end: int | None = None


class LogTail(NamedTuple):
    """Lines of a rank's log; `file` is "" if the rank has no log files.

    `start` is the place of the first line, in bytes from the beginning of the log.  A log begins in
    the file to which earlier lines were moved (`earlier_file`), if there is such a file.  Each
    start of the workers has a number and makes a folder for its logs; `attempts` has the numbers
    whose folders exist.  `is_cut` is True if output is missing, because a log file could not be
    opened or written.
    """

    rank: int
    stream: str
    file: str = ""
    lines: tuple[str, ...] = ()
    start: int = 0
    attempts: tuple[int, ...] = ()
    is_cut: bool = False


CUT_MARK = "cut"
"""The name of an empty file beside a log that could not be opened or written to."""


def read_logs(folders_of: Mapping[int, Path | None], get: GetLogs) -> tuple[LogTail, ...]:
    """Return the last lines of the requested logs, except logs of ranks that `folders_of` lacks.

    `folders_of` has the log folder of each rank, None for a rank without log files.
    """
    tails = []
    for rank, stream in product([rank for rank in get.ranks if rank in folders_of], get.streams):
        if (folder := folders_of[rank]) is None:
            tails.append(LogTail(rank, stream))
            continue
        run = folder.parent.parent  # the folder that has a folder for each attempt
        numbers = (
            each.name.removeprefix(ATTEMPT_PREFIX) for each in run.glob(f"{ATTEMPT_PREFIX}*")
        )
        # Users may add folders, such as a copy `attempt_1_old`.
        attempts = tuple(sorted(int(each) for each in numbers if each.isdecimal()))
        if get.attempt is not None:
            folder = run / f"{ATTEMPT_PREFIX}{get.attempt}" / folder.name
        file = folder / f"{stream}.log"
        lines, start = last_lines(file, get.most, get.end)
        is_cut = (folder / CUT_MARK).exists()
        tails.append(LogTail(rank, stream, str(file), tuple(lines), start, attempts, is_cut))
    return tuple(tails)


def last_lines(file: Path, limit: int, end: int | None = None) -> tuple[list[str], int]:
    """Return at most `limit` last lines of a log before `end`, and where the first line begins.

    Fewer lines are returned if they have more than `PAGE` bytes.  The log consists of the earlier
    file (`earlier_file`), if there is one, and of `file`.  `end` and the returned place are numbers
    of bytes from the beginning of the log.
    """
    earlier = earlier_file(file)
    moved = earlier.stat().st_size if earlier.exists() else 0
    current = _backwards(file, None if end is None else end - moved)
    lines: list[str] = []
    start = size = 0
    for at, line in chain(((moved + at, line) for at, line in current), _backwards(earlier, end)):
        start = at
        if moved and at >= moved and line.startswith(MOVED_NOTE.encode()):
            continue
        lines.append(line.decode("utf-8", "replace"))
        size += len(line)
        if len(lines) == limit or size > PAGE:
            break
    return lines[::-1], start


def _backwards(file: Path, end: int | None) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and bytes of each line before `end`, from the last to the first.

    The file is read in blocks, from the last to the first.  If a line begins before a block, only
    the last `LONGEST` bytes that were read of the line are kept, so that a file without newlines
    does not fill the memory.
    """
    with suppress(FileNotFoundError), file.open("rb") as opened:
        position = opened.seek(0, os.SEEK_END)
        position = position if end is None else max(0, min(position, end))
        carried, is_cut, is_last = b"", False, True
        while position > 0:
            size = min(BLOCK, position)
            position -= size
            opened.seek(position)
            lines = (opened.read(size) + carried).split(b"\n")
            starts = accumulate((len(each) + 1 for each in lines), initial=position)
            if is_cut:  # only the end of the line was kept, so drop its beginning, too
                lines[-1] = carried
            pairs = [*zip(starts, lines, strict=False)]
            if is_last and len(pairs) > 1 and not lines[-1]:
                pairs.pop()  # the file ends with a newline
            is_last = False
            yield from reversed(pairs[1:])
            is_cut = len(lines[0]) > LONGEST or (is_cut and len(lines) == 1)
            carried = lines[0][-LONGEST:]
        if carried or not is_last:
            yield 0, carried


def moved_line(earlier: Path, limit: int) -> str:
    """Return the first line of a new log file; it says that older lines were moved to `earlier`.

    `limit` is the number of bytes at which a log file counts as full.
    """
    allowed = f"NBDIST_LOG_LIMIT allows {limit >> 20} MiB"
    return f"{MOVED_NOTE}{earlier.name}, in the place of what had been moved there: {allowed}]\n"


def renumbered_line(earlier: Path, rank: int) -> str:
    """Return the first line of the log file that a worker gets when its rank changes.

    The line says that until then the worker had this `rank`, and its log file was `earlier`.
    """
    return f"[nbdist: this was rank {rank} until now, and wrote to {earlier}]\n"


def earlier_file(file: Path) -> Path:
    """Return the path to which a log file is moved when it is full."""
    return file.with_name(f"{file.name}.1")
