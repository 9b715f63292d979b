"""Names of log files, and the line that says where one goes on."""

from __future__ import annotations

from pathlib import Path

from nbdist.wire.log_files import MOVED, earlier_file, moved_line, renumbered_line


def test_a_file_goes_on_in_another() -> None:
    """The first line of the new one names it, and how to have more."""
    earlier = earlier_file(Path("/logs/0/stdout.log"))
    assert earlier == Path("/logs/0/stdout.log.1")
    line = moved_line(earlier, 200 << 20)
    assert line.startswith(f"{MOVED}stdout.log.1, ")
    assert line.endswith("NBDIST_LOG_LIMIT allows 200 MiB]\n")


def test_what_was_another_rank() -> None:
    """The line names the rank, and where that wrote to."""
    line = renumbered_line(Path("/logs/attempt_0/3/stdout.log"), 3)
    assert (
        line == "[nbdist: this was rank 3 until now, and wrote to /logs/attempt_0/3/stdout.log]\n"
    )
