"""Names of a rank's log files, and the line that points from one to the one before it."""

from __future__ import annotations

from pathlib import Path

MOVED = "[nbdist: what stood before this line was moved to "
"""How the first line of a file begins whose earlier lines are in another."""


def moved_line(earlier: Path, limit: int) -> str:
    """Write the first line of a file that was begun because the one before was full."""
    allowed = f"NBDIST_LOG_LIMIT allows {limit >> 20} MiB"
    return f"{MOVED}{earlier.name}, in the place of what had been moved there: {allowed}]\n"


def earlier_file(file: Path) -> Path:
    """Name the file that has what was said before a log file begins."""
    return file.with_name(f"{file.name}.1")
