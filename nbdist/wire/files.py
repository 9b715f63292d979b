"""Files of other machines: the ends of ranks' logs, and the notebook's code.

The agent of a machine reads logs for notebooks on other ones; the notebook itself those of its own
machine, where they are there also once the agent has ended.

The notebook's folder goes by `--sync-code` to nodes that do not share it.  The notebook lists its
files (`nbdist.world.code_sync`); a node, or the head for its nodes, answers which it lacks
(`nbdist.agent.code_folder`), by what is in them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, chain
from pathlib import Path

from nbdist.system.folders import MARKER

MOVED = "[nbdist: what stood before this line was moved to "
"""How the first line of a file begins whose earlier lines are in another."""

ATTEMPT = "attempt_"
"""How the names of folders begin that have the files of one start of the workers each."""

BLOCK = 1 << 16
"""Bytes that are read at once."""

PAGE = 1 << 20
"""Bytes of a file's lines after which no more are read for one answer."""

LONGEST = 1 << 14
"""Bytes of a line that are shown; of longer ones the last."""


@dataclass(frozen=True, slots=True)
class GetLogs:
    """Read the last `most` lines of these ranks' log files, fewer where they are long.

    `attempt` is None for the files that are written now; `end` is where an earlier answer
    began, None for the end.  Answered by a tuple of `LogTail`.
    """

    ranks: tuple[int, ...]
    streams: tuple[str, ...]
    most: int
    attempt: int | None = None
    end: int | None = None


@dataclass(frozen=True, slots=True)
class LogTail:
    """Lines of a rank's log, the first of which begins at `start`; `file` is its path there.

    Bytes count from where the file with the earlier lines begins.  `attempts` are the starts of
    the workers that there are files of.  Without files `file` is "".
    """

    rank: int
    stream: str
    file: str = ""
    lines: tuple[str, ...] = ()
    start: int = 0
    attempts: tuple[int, ...] = ()


def read_logs(folders_of: Mapping[int, Path | None], get: GetLogs) -> tuple[LogTail, ...]:
    """Read what is asked for of ranks with these folders."""
    ranks = [rank for rank in get.ranks if rank in folders_of]
    return tuple(
        _tail_of(rank, folders_of[rank], stream, get) for rank in ranks for stream in get.streams
    )


def _tail_of(rank: int, folder: Path | None, stream: str, get: GetLogs) -> LogTail:
    if folder is None:
        return LogTail(rank, stream)
    file = file_of(folder, stream, get.attempt)
    lines, start = last_lines(file, get.most, get.end)
    return LogTail(rank, stream, str(file), tuple(lines), start, attempts_beside(folder))


def last_lines(file: Path, most: int, end: int | None = None) -> tuple[list[str], int]:
    """Read the last lines of a log before `end`, and say where the first of them begins."""
    earlier = earlier_file(file)
    moved = earlier.stat().st_size if earlier.exists() else 0
    own = _backwards(file, None if end is None else end - moved)
    found: list[str] = []
    start = size = 0
    for at, line in chain(((moved + at, line) for at, line in own), _backwards(earlier, end)):
        start = at
        if moved and at >= moved and line.startswith(MOVED.encode()):
            continue
        found.append(line.decode("utf-8", "replace"))
        size += len(line)
        if len(found) == most or size > PAGE:
            break
    return found[::-1], start


def _backwards(file: Path, end: int | None) -> Iterator[tuple[int, bytes]]:
    """Read lines from the last to the first, long ones cut at their beginning; and their places."""
    with suppress(FileNotFoundError), file.open("rb") as opened:
        position = opened.seek(0, os.SEEK_END)
        position = position if end is None else max(0, min(position, end))
        rest, is_last = b"", True
        while position > 0:
            size = min(BLOCK, position)
            position -= size
            opened.seek(position)
            lines = (opened.read(size) + rest).split(b"\n")
            starts = accumulate((len(each) + 1 for each in lines), initial=position)
            found = [*zip(starts, lines, strict=False)]
            if is_last and len(found) > 1 and not lines[-1]:
                found.pop()  # the file ends with a newline
            is_last = False
            yield from reversed(found[1:])
            rest = lines[0][-LONGEST:]
        if rest or not is_last:
            yield 0, rest


# --- their names ------------------------------------------------------------------------------


def moved_line(earlier: Path, limit: int) -> str:
    """Write the first line of a file that was begun because the one before was full."""
    allowed = f"NBDIST_LOG_LIMIT allows {limit >> 20} MiB"
    return f"{MOVED}{earlier.name}, in the place of what had been moved there: {allowed}]\n"


def renumbered_line(earlier: Path, rank: int) -> str:
    """Write the first line of a file of what was another rank before."""
    return f"[nbdist: this was rank {rank} until now, and wrote to {earlier}]\n"


def earlier_file(file: Path) -> Path:
    """Name the file that has what was said before a log file begins."""
    return file.with_name(f"{file.name}.1")


def file_of(folder: Path, stream: str, attempt: int | None = None) -> Path:
    """Name a log file in a rank's folder, or in its folder of another attempt."""
    if attempt is not None:
        folder = folder.parent.parent / f"{ATTEMPT}{attempt}" / folder.name
    return folder / f"{stream}.log"


def attempts_beside(folder: Path) -> tuple[int, ...]:
    """List the attempts of which there are files, a rank's folder being of one of them."""
    found = folder.parent.parent.glob(f"{ATTEMPT}*")
    return tuple(sorted(int(each.name[len(ATTEMPT) :]) for each in found))


# --- the notebook's code ----------------------------------------------------------------------


PART = 4 << 20
"""Bytes of files after which a message has enough: other messages need not wait for more."""

MANIFEST = ".nbdist-files"
"""Names all files that a node was sent, so that nothing else is removed one day."""
NEW_FILE = ".nbdist-new"
"""A file that is being written there."""
OWN_NAMES = (MARKER, MANIFEST, NEW_FILE)


@dataclass(frozen=True, slots=True)
class CodeFile:
    """What is in a file, by its digest; a program or not."""

    digest: bytes
    is_program: bool = False

    @classmethod
    def read(cls, path: str) -> tuple[CodeFile, bytes]:
        """Read a file; raises OSError."""
        with open(path, "rb") as file:
            content, mode = file.read(), os.fstat(file.fileno()).st_mode
        return cls(digest_of(content), bool(mode & stat.S_IXUSR)), content


def digest_of(content: bytes) -> bytes:
    """Return what two files with the same in them have in common."""
    return blake2b(content, digest_size=16).digest()


def landmark(path: str) -> tuple[int, int] | None:
    """Return by which machines tell that they have the very same file; None for no file.

    Those that mount one file system see one inode, and when it was last changed in
    nanoseconds; a copy has others, and no program can set the latter.
    """
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns


def part_of(
    lacks: Iterable[CodeFile], read: Callable[[CodeFile], bytes | None]
) -> dict[CodeFile, bytes]:
    """Return what is in the first of these files, for one message; {} if none can be read."""
    part: dict[CodeFile, bytes] = {}
    size = 0
    for file in lacks:
        if size < PART and (content := read(file)) is not None:
            part[file] = content
            size += len(content)
    return part


def refusal_of(path: str) -> str:
    """Return why a node must not write to a path below its folder of code; "" where it may."""
    steps = path.split("/")
    if not path or path.startswith("/") or "\0" in path:
        return "it is no path below a folder"
    if any(step in ("", ".", "..") for step in steps):
        return "it leads out of the folder"
    return "the name is nbdist's own" if steps[0] in OWN_NAMES else ""


def moved_path(path: str, here: str, there: str) -> str:
    """Return the path below `there` where it lies below `here`; else the path itself."""
    if path == here or path.startswith(f"{here}/"):
        return there + path[len(here) :]
    return path
