"""What `%dist_log` shows: the end of the ranks' log files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.errors import UsageError, format_ranks, name_ranks
from nbdist.notebook.desk import ranks_of
from nbdist.world.sgr import strip
from nbdist.world.spec import default_log_dir

if TYPE_CHECKING:
    import argparse

    from nbdist.notebook.desk import Desk

BLOCK = 1 << 16
LONGEST = 1 << 14
"""Bytes of a line that are shown; of longer ones the last."""

STREAMS = ("stdout", "stderr")


@dataclass(frozen=True)
class Tail:
    """The last lines of one file that were asked for."""

    rank: int
    stream: str
    lines: tuple[str, ...]


def show_log(desk: Desk, options: argparse.Namespace) -> None:
    """The last lines of each rank, equal ones once, and where the files are."""
    pattern, most = _pattern(options.grep), _count(options.tail)
    attempt, folders = _folders(desk, options.ranks, options.attempt)
    streams = [s for s in STREAMS if getattr(options, s)] or [*STREAMS]
    tails = [
        Tail(rank, stream, tuple(last_lines(folder / f"{stream}.log", most, pattern)))
        for rank, folder in folders.items()
        for stream in streams
    ]
    parts = [line for group in grouped(tails) for line in _block(group)]
    if not parts:
        parts = ["no lines" + (f" with {options.grep}" if pattern else "")]
    which = format_ranks(folders)
    parts.append(f"files: {attempt}/[{which}]/[{','.join(streams)}].log")
    text = "\n".join(parts)
    style = "font-family:monospace;white-space:pre-wrap"
    desk.display().show_table(f'<pre style="{style}">{escape(text)}</pre>', text)


def grouped(tails: list[Tail]) -> list[list[Tail]]:
    """Those of one stream with equal lines together; without those that have none."""
    found: dict[tuple[str, tuple[str, ...]], list[Tail]] = {}
    for tail in tails:
        if tail.lines:
            found.setdefault((tail.stream, tail.lines), []).append(tail)
    return [*found.values()]


def _block(group: list[Tail]) -> list[str]:
    """A header that says whose lines they are, and the lines."""
    first = group[0]
    same = " (same)" if len(group) > 1 else ""
    stderr = " · stderr" if first.stream == "stderr" else ""
    return [f"── {name_ranks(tail.rank for tail in group)}{same}{stderr} ──", *first.lines]


def last_lines(file: Path, most: int, pattern: re.Pattern[str] | None = None) -> list[str]:
    """The last lines of a file, or of those that hold the pattern; none of one that is not there.

    Read from its end, and not further than needed.
    """
    found: list[str] = []
    for line in _backwards(file):
        text = strip(line.decode("utf-8", "replace")).rstrip("\r")
        # What a progress bar has overwritten was never seen either.
        text = text.rpartition("\r")[2]
        if pattern is None or pattern.search(text):
            found.append(text)
            if len(found) == most:
                break
    return found[::-1]


def _backwards(file: Path) -> Iterator[bytes]:
    """Lines from the last to the first, long ones cut at their beginning."""
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


def _folders(desk: Desk, ranks: str | None, attempt: str | None) -> tuple[Path, dict[int, Path]]:
    """The attempt's folder, and in it that of each rank; UsageError where there are no files."""
    if desk.world is None:
        raise UsageError(
            "There are no workers whose log to show; the files of earlier runs are in "
            f"{default_log_dir() or 'no folder: NBDIST_LOG_DIR is empty'}."
        )
    on = ranks_of(ranks, desk.world)
    logs = {rank: Path(desk.world.logs[rank]) for rank in on if desk.world.logs.get(rank)}
    if not logs:
        raise UsageError(
            "These workers have no log files: NBDIST_LOG_DIR is empty, or they could not be "
            "written. Set it, then `%dist_restart`; `%dist_output` has the last cell's lines."
        )
    folder = next(iter(logs.values())).parent
    if attempt is None:
        return folder, logs
    other = folder.parent / f"attempt_{_count(attempt, '--attempt')}"
    if not other.is_dir():
        there = sorted(int(each.name[8:]) for each in folder.parent.glob("attempt_*"))
        raise UsageError(
            f"`--attempt {attempt}`: there are {format_ranks(there)}, the last is now."
        )
    return other, {rank: other / str(rank) for rank in on}


def _pattern(text: str | None) -> re.Pattern[str] | None:
    if text is None:
        return None
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(f"`--grep {text}` is no regular expression: {error}.") from None


def _count(text: str, option: str = "--tail") -> int:
    if not text.isdigit() or (option == "--tail" and not int(text)):
        raise UsageError(f"`{option} {text}`: a number, such as `{option} 1`.")
    return int(text)
