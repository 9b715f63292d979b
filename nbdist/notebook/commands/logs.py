"""The last lines of the ranks' log files, read from their ends: here, or on other machines."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from IPython.core.magic_arguments import argument

from nbdist.errors import UsageError
from nbdist.notebook.command import Line, command
from nbdist.notebook.display import Shown, block
from nbdist.notebook.options import Magic, ranks_option
from nbdist.output.ansi import strip
from nbdist.readers import whole_number
from nbdist.wire.messages import GetLogs
from nbdist.wire.views import MOVED, LogPiece, attempts_beside, earlier_file, file_of
from nbdist.words import format_ranks
from nbdist.world.spec import default_log_dir
from nbdist.world.states import Machines

TAIL = whole_number("--tail", "a number, such as `--tail 1`")
ATTEMPT = whole_number("--attempt", "a number, such as `--attempt 1`", least=0)

STREAMS = ("stdout", "stderr")

LINE_BYTES = 256
"""Of each line that is asked for, at first, where another machine has the file."""

NO_FILES = (
    "These workers have no log files: NBDIST_LOG_DIR is empty, or they could not be "
    "written. Set it, then `%dist_restart`; `%dist_output` has the last cell's lines."
)


@dataclass(frozen=True)
class Tail:
    """The last lines of one file."""

    rank: int
    stream: str
    lines: tuple[str, ...]


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
    machines = world.session.machines
    if world.session.is_elsewhere:
        tails, files = _there(line, machines, streams, pattern)
    else:
        tails, files = _here(line, world.logs, streams, pattern)
    parts = [each for group in grouped(tails) for each in _group(group, machines)]
    if not parts:
        parts = ["no lines" + (f" with {options.grep}" if pattern else "")]
    return block("\n".join([*parts, *files]))


def grouped(tails: list[Tail]) -> list[list[Tail]]:
    """Put tails of one stream with equal lines together; leave out those that have none."""
    found: dict[tuple[str, tuple[str, ...]], list[Tail]] = {}
    for tail in tails:
        if tail.lines:
            found.setdefault((tail.stream, tail.lines), []).append(tail)
    return [*found.values()]


def _group(group: list[Tail], machines: Machines) -> list[str]:
    """Write a header with the ranks, and their lines."""
    first = group[0]
    same = " (same)" if len(group) > 1 else ""
    stderr = " · stderr" if first.stream == "stderr" else ""
    return [f"── {machines.who(tail.rank for tail in group)}{same}{stderr} ──", *first.lines]


# --- files on this machine ------------------------------------------------------------------


def _here(
    line: Line, logs: Mapping[int, str], streams: Sequence[str], pattern: re.Pattern[str] | None
) -> tuple[list[Tail], list[str]]:
    """Read the files of this machine, also of ranks that have ended; and name them."""
    attempt, most = line.options.attempt, line.options.tail
    folders = {rank: Path(logs[rank]) for rank in line.ranks if logs.get(rank)}
    if not folders:
        raise UsageError(NO_FILES)
    first = file_of(next(iter(folders.values())), streams[0], attempt).parent.parent
    if not first.is_dir():
        raise _no_attempt(attempt, attempts_beside(next(iter(folders.values()))))
    tails = [
        Tail(rank, stream, tuple(last_lines(file_of(folder, stream, attempt), most, pattern)))
        for rank, folder in folders.items()
        for stream in streams
    ]
    return tails, [_files_text(first, folders, streams)]


# --- files on other machines ------------------------------------------------------------------


def _there(
    line: Line, machines: Machines, streams: tuple[str, ...], pattern: re.Pattern[str] | None
) -> tuple[list[Tail], list[str]]:
    """Have the agents of all machines read theirs; and name them."""
    attempt, most = line.options.attempt, line.options.tail

    def ask(get: GetLogs) -> tuple[LogPiece, ...]:
        found: tuple[LogPiece, ...] = line.look(line.pool, get)
        return found

    first = GetLogs(line.ranks, streams, min(FAR_BLOCK, most * LINE_BYTES), attempt=attempt)
    found = ask(first)
    pieces = [piece for piece in found if piece.file]
    if found and not pieces:
        raise UsageError(NO_FILES)
    if attempt is not None and pieces and all(attempt not in each.attempts for each in pieces):
        raise _no_attempt(attempt, {number for each in pieces for number in each.attempts})
    tails = [
        Tail(each.rank, each.stream, tuple(last_lines_there(each, first, ask, most, pattern)))
        for each in pieces
    ]
    folders: dict[tuple[str, Path], list[int]] = {}
    for each in pieces:
        place = machines.name(each.rank), Path(each.file).parent.parent
        folders.setdefault(place, []).append(each.rank)
    files = [
        _files_text(folder, ranks, streams, f"{host}:") for (host, folder), ranks in folders.items()
    ]
    if lost := set(line.ranks) - {each.rank for each in found}:
        files.append(f"no answer for {machines.who(lost)}")
    return tails, files


# --- what both say ----------------------------------------------------------------------------


def _files_text(attempt: Path, ranks: Iterable[int], streams: Sequence[str], host: str = "") -> str:
    return f"files: {host}{attempt}/[{format_ranks(ranks)}]/[{','.join(streams)}].log"


def _no_attempt(asked: int, there: Collection[int]) -> UsageError:
    are = f"there are {format_ranks(there)}, the last is now"
    return UsageError(f"`--attempt {asked}`: {are}.")


def _pattern(text: str | None) -> re.Pattern[str] | None:
    if text is None:
        return None
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(f"`--grep {text}` is not a regular expression: {error}.") from None


BLOCK = 1 << 16
FAR_BLOCK = 1 << 20
"""Bytes that are read at once, here and of another machine's files."""

LONGEST = 1 << 14
"""Bytes of a line that are shown; of longer ones the last."""

Read = Callable[[int, int], bytes]
"""Reads bytes from a position on."""
Ask = Callable[[GetLogs], tuple[LogPiece, ...]]


def last_lines(file: Path, most: int, pattern: re.Pattern[str] | None = None) -> list[str]:
    """Read the last lines of a file, or the last that hold the pattern; none of a missing file."""
    return _last(_through_both(file), most, pattern)


def last_lines_there(
    piece: LogPiece, get: GetLogs, ask: Ask, most: int, pattern: re.Pattern[str] | None = None
) -> list[str]:
    """Do the same where another machine has the file; `piece` is its end, which `get` got."""
    one = replace(get, ranks=(piece.rank,), streams=(piece.stream,), most=FAR_BLOCK)
    return _last(_through_both_there(piece, one, ask), most, pattern)


def _last(lines: Iterator[bytes], most: int, pattern: re.Pattern[str] | None) -> list[str]:
    found: list[str] = []
    for line in lines:
        text = strip(line.decode("utf-8", "replace")).rstrip("\r")
        # What a progress bar has overwritten was never seen either.
        text = text.rpartition("\r")[2]
        if pattern is None or pattern.search(text):
            found.append(text)
            if len(found) == most:
                break
    return found[::-1]


# --- lines from the last to the first, also of the file with earlier ones --------------------


def _through_both(file: Path) -> Iterator[bytes]:
    earlier = earlier_file(file)
    yield from _own_lines(_lines_of(file), goes_on=earlier.exists())
    yield from _lines_of(earlier)


def _through_both_there(piece: LogPiece, get: GetLogs, ask: Ask) -> Iterator[bytes]:
    far = _FarFile(piece, get, ask)
    yield from _own_lines(_backwards(far.size, far.read, far.here), goes_on=piece.has_earlier)
    if piece.has_earlier and (pieces := ask(replace(get, earlier=True, end=None))):
        far = _FarFile(pieces[0], replace(get, earlier=True), ask)
        yield from _backwards(far.size, far.read, far.here)


def _own_lines(lines: Iterator[bytes], *, goes_on: bool) -> Iterator[bytes]:
    """Leave out the line that says where the earlier ones are."""
    moved = MOVED.encode()
    return (line for line in lines if not (goes_on and line.startswith(moved)))


def _lines_of(file: Path) -> Iterator[bytes]:
    try:
        opened = file.open("rb")
    except FileNotFoundError:
        return

    def read(position: int, size: int) -> bytes:
        opened.seek(position)
        return opened.read(size)

    with opened:
        yield from _backwards(opened.seek(0, os.SEEK_END), read)


def _backwards(size: int, read: Read, block: int = BLOCK) -> Iterator[bytes]:
    """Read lines from the last to the first, long ones cut at their beginning.

    `block` is how much is read at first.
    """
    position, rest, is_last = size, b"", True
    while position > 0:
        size, block = min(block, position), BLOCK
        position -= size
        first, *lines = (read(position, size) + rest).split(b"\n")
        if is_last and lines and not lines[-1]:
            lines.pop()  # the file ends with a newline
        is_last = False
        yield from reversed(lines)
        rest = first[-LONGEST:]
    if rest or not is_last:
        yield rest


class _FarFile:
    """A file of which one piece at a time is here."""

    def __init__(self, piece: LogPiece, get: GetLogs, ask: Ask) -> None:
        self.size = piece.start + len(piece.data)
        self._piece = piece
        self._get = get
        self._ask = ask

    def __repr__(self) -> str:
        return f"<_FarFile {self._piece.file} {self._piece.start}-{self.size}>"

    @property
    def here(self) -> int:
        """How much of its end is here."""
        return len(self._piece.data)

    def read(self, position: int, size: int) -> bytes:
        """Read what was there when its end was read; less where it is gone by now."""
        end, found = position + size, b""
        while end > position:
            if not self._piece.start < end <= self._piece.start + len(self._piece.data):
                pieces = self._ask(replace(self._get, end=end))
                if not pieces or not pieces[0].data:
                    break
                self._piece = pieces[0]
            first = max(position, self._piece.start)
            at = self._piece.start
            found = self._piece.data[first - at : end - at] + found
            end = first
        return found
