"""Files of other machines: the ends of ranks' logs, and the notebook's code.

Agents read logs for notebooks on other machines; a notebook reads those of its own, which outlive
the agent.  By `--sync-code` a node gets the notebook's files that it lacks, by what is in them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from hashlib import blake2b
from itertools import accumulate, chain, product
from pathlib import Path
from typing import NamedTuple

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


class GetLogs(NamedTuple):
    """Read the last `most` lines of these ranks' logs, fewer long ones; a tuple of `LogTail`.

    `attempt` is None for the present one; `end` is where an earlier answer began, or None.
    """

    ranks: tuple[int, ...]
    streams: tuple[str, ...]
    most: int
    attempt: int | None = None
    end: int | None = None


class LogTail(NamedTuple):
    """Lines of a rank's log, the first of which begins at `start`; without files `file` is "".

    Bytes count from where the file with the earlier lines begins.  `attempts` are the starts of
    the workers that there are files of.
    """

    rank: int
    stream: str
    file: str = ""
    lines: tuple[str, ...] = ()
    start: int = 0
    attempts: tuple[int, ...] = ()


def read_logs(folders_of: Mapping[int, Path | None], get: GetLogs) -> tuple[LogTail, ...]:
    """Read what is asked for of ranks with these folders."""
    found = []
    for rank, stream in product([rank for rank in get.ranks if rank in folders_of], get.streams):
        if (folder := folders_of[rank]) is None:
            found.append(LogTail(rank, stream))
            continue
        run = folder.parent.parent  # with a folder for each attempt
        names = (each.name for each in run.glob(f"{ATTEMPT}*"))
        attempts = tuple(sorted(int(name.removeprefix(ATTEMPT)) for name in names))
        if get.attempt is not None:
            folder = run / f"{ATTEMPT}{get.attempt}" / folder.name
        file = folder / f"{stream}.log"
        lines, start = last_lines(file, get.most, get.end)
        found.append(LogTail(rank, stream, str(file), tuple(lines), start, attempts))
    return tuple(found)


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


# --- the notebook's code ----------------------------------------------------------------------

PART = 4 << 20
"""Bytes of files after which a message has enough: other messages need not wait for more."""

MANIFEST = ".nbdist-files"
"""Names all files that a node was sent, so that nothing else is removed one day."""
NEW_FILE = ".nbdist-new"
"""A file that is being written there."""
OWN_NAMES = (MARKER, MANIFEST, NEW_FILE)


class CodeFile(NamedTuple):
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
    """Return by which machines know the very same file, inode and ctime; None for no file."""
    with suppress(OSError):
        found = os.stat(path)
        return found.st_ino, found.st_ctime_ns
    return None


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
