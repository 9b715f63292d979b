"""Names of a rank's log files, the line that points from one to the one before it, and pieces."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MOVED = "[nbdist: what stood before this line was moved to "
"""How the first line of a file begins whose earlier lines are in another."""


ATTEMPT = "attempt_"
"""How the names of folders begin that have the files of one start of the workers each."""


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


@dataclass(frozen=True, slots=True)
class LogPiece:
    """A piece of a rank's log file: `data` begins at byte `start`; `file` is its path there.

    `attempts` are the starts of the workers that there are files of, `has_earlier` says whether
    a file has what was said before.  Without files `file` is "".
    """

    rank: int
    stream: str
    file: str
    start: int
    data: bytes
    has_earlier: bool
    attempts: tuple[int, ...]


def file_of(folder: Path, stream: str, attempt: int | None = None) -> Path:
    """Name a log file in a rank's folder, or in its folder of another attempt."""
    if attempt is not None:
        folder = folder.parent.parent / f"{ATTEMPT}{attempt}" / folder.name
    return folder / f"{stream}.log"


def attempts_beside(folder: Path) -> tuple[int, ...]:
    """List the attempts of which there are files, a rank's folder being of one of them."""
    found = folder.parent.parent.glob(f"{ATTEMPT}*")
    return tuple(sorted(int(each.name[len(ATTEMPT) :]) for each in found))
