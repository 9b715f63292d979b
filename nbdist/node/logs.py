"""Log files: the full text of each rank, whatever the notebook shows of it."""

from __future__ import annotations

import logging
import shutil
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from nbdist.wire.outputs import StreamName

log = logging.getLogger("nbdist.node")

RUNS_KEPT = 20

SNAPSHOTS = "snapshots"
"""A folder beside the runs that is none; see `nbdist.world.shelf`."""


class RankLog:
    """`stdout.log` and `stderr.log` of one rank, appended to.

    A full disk ends the log with one warning, never the cell.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._files: dict[StreamName, BinaryIO] = {}
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._files = {
                "stdout": (folder / "stdout.log").open("ab"),
                "stderr": (folder / "stderr.log").open("ab"),
            }
        except OSError as error:
            self._give_up(error)

    def write(self, stream: StreamName, text: str) -> None:
        """Append; on disk after the next `flush`."""
        if stream in self._files:
            try:
                self._files[stream].write(text.encode("utf-8", "surrogatepass"))
            except OSError as error:
                self._give_up(error)

    def flush(self) -> None:
        """Make what was written readable for others."""
        try:
            for file in self._files.values():
                file.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Write out and close."""
        self.flush()
        files, self._files = self._files, {}
        for file in files.values():
            file.close()

    def _give_up(self, error: OSError) -> None:
        log.warning("no more log files in %s: %s", self.folder, error)
        files, self._files = self._files, {}
        for file in files.values():
            with suppress(OSError):  # what it still held cannot be written either
                file.close()
        self.folder = None


def attempt_folder(run: Path, attempt: int) -> Path:
    """For a start of the workers, the `attempt`-th of this agent, from 0 on.

    A later number where an earlier world of the same name has used it.
    """
    while (folder := run / f"attempt_{attempt}").exists():
        attempt += 1
    return folder


def drop_old_runs(folder: Path) -> None:
    """Keep the newest runs of a log folder, so that it does not grow for ever."""
    try:
        found = [run for run in folder.iterdir() if run.is_dir() and run.name != SNAPSHOTS]
        runs = sorted(found, key=_age)
    except OSError:
        return
    for run in runs[:-RUNS_KEPT]:
        shutil.rmtree(run, ignore_errors=True)


def _age(run: Path) -> float:
    return run.stat().st_mtime
