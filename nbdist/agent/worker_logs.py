"""Log files: what each rank has written, whatever the notebook shows of it.

ROOT/NAME/attempt_N/RANK/{stdout.log, stderr.log, and with ".1" what was written before}
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from nbdist.output.events import StreamName
from nbdist.system import folders
from nbdist.wire.files import earlier_file, moved_line, renumbered_line

log = logging.getLogger("nbdist.agent")

RUNS_KEPT = 20

LONGEST_LINE = 1 << 20
"""Bytes that a file may be longer than its share so that a line is whole."""

RUN = re.compile(
    r"attempt_\d+/(\d+/"
    r"((stdout|stderr)\.log(\.1)?|error\.json|(display|error)-\d+\.[a-z\d.]+|figure-[\da-f]{12}\.[a-z]+)?)?",
    re.ASCII,
)
"""What nbdist, and torch's `@record`, write into the folder of a run; figures the notebook."""


class WorkerLog:
    """`stdout.log` and `stderr.log` of one rank, appended to, with about `limit` bytes each.

    Half of it is in the file, half in that with what was written before, up to the end of a
    line; 0 is no limit.
    Whatever is written is in the file at once: `tail -f` shows it, and no process's death
    loses it.  A full disk ends the log with one warning, never the cell.
    """

    def __init__(self, folder: Path | None, limit: int = 0) -> None:
        self._limit = limit
        self._files: dict[StreamName, _File] = {}
        self._open(folder)

    def move(self, folder: Path | None, rank: int) -> None:
        """Go on in another folder: what was this rank is another one from now on."""
        before = self.folder
        self.close()
        self._open(folder)
        if before is not None:
            for stream in [*self._files]:
                self.write(stream, renumbered_line(before / f"{stream}.log", rank))

    def _open(self, folder: Path | None) -> None:
        self.folder = folder
        if folder is None:
            return
        try:
            folders.make_private(folder)
            for stream in ("stdout", "stderr"):
                self._files[stream] = _File(folder / f"{stream}.log", self._limit // 2)
        except OSError as error:
            self._give_up(error)

    def write(self, stream: StreamName, text: str) -> None:
        """Append; readable for others when this returns."""
        if stream in self._files:
            try:
                self._files[stream].write(text.encode("utf-8", "surrogatepass"))
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        """Close it: nothing more comes."""
        files, self._files = self._files, {}
        for file in files.values():
            file.close()

    def _give_up(self, error: OSError) -> None:
        log.warning("no more log files in %s: %s", self.folder, error)
        self.close()
        self.folder = None


class _File:
    """One that is set aside, and begun anew, when it has its `share` of bytes; 0: never."""

    def __init__(self, path: Path, share: int) -> None:
        self._path = path
        self._share = share
        self._begin()

    def _begin(self) -> None:
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
        self._fd = folders.open_private(self._path, flags)
        self._size = os.fstat(self._fd).st_size

    def write(self, data: bytes) -> None:
        if self._share and self._size + len(data) > self._share:
            # The line that is under way ends where it began.
            rest = data.find(b"\n") + 1
            if rest or self._size > self._share + LONGEST_LINE:
                self._append(data[:rest])
                self._set_aside()
                data = data[rest:]
        self._append(data)

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            done = os.write(self._fd, view)
            self._size += done
            view = view[done:]

    def _set_aside(self) -> None:
        earlier = earlier_file(self._path)
        self._path.rename(earlier)
        full = self._fd
        self._begin()
        os.close(full)
        self._append(moved_line(earlier, self._share * 2).encode())

    def close(self) -> None:
        with suppress(OSError):  # a network's file system can say here that it failed before
            os.close(self._fd)


class RunFolder:
    """The log folder of a run, ROOT/NAME, held while it is open: no agent removes it meanwhile."""

    def __init__(self, root: Path, name: str) -> None:
        self.path = root / name
        self._claims: list[int] = []
        # Where a folder cannot be made there are no logs: `WorkerLog` warns of it.
        with suppress(OSError):
            folders.make_private(root)
            for folder in (*reversed(self.path.parents), self.path):
                if folder.is_relative_to(root) and folder != root:
                    self._enter(folder)
        with suppress(OSError):  # also where the disk is full
            drop_old_runs(root)

    def __repr__(self) -> str:
        return f"<RunFolder {self.path}>"

    def close(self) -> None:
        """Let go of it: it may be removed from now on, when it is old."""
        for claim in self._claims:
            os.close(claim)
        self._claims.clear()

    def _enter(self, folder: Path) -> None:
        """Make it and hold it, or hold one of ours; another one is left as it is."""
        try:
            folder.mkdir(mode=folders.PRIVATE_FOLDER)
        except FileExistsError:
            held = folders.join(folder, _what(folder))
        else:
            held = folders.claim(folder, _what(folder))
        if held is not None:
            self._claims.append(held)

    def new_attempt(self, number: int) -> Path:
        """Make a folder for a start of the workers, the `number`-th of this agent, from 0 on.

        A later number where there is one already, of an earlier world of the same name.
        """
        while True:
            folder = self.path / f"attempt_{number}"
            try:
                folder.mkdir(mode=folders.PRIVATE_FOLDER)
            except FileExistsError:
                number += 1
            except OSError:
                return folder
            else:
                return folder


def drop_old_runs(root: Path) -> None:
    """Keep the newest runs of a log folder, so that it does not grow for ever.

    Only what nbdist made is removed, no agent uses, and nothing else was put into.
    Raises OSError where another agent removes the same: then the next start does it.
    """
    ours = [*_ours_in(root)]
    runs = [folder for folder in ours if any(folder.glob("attempt_*"))]
    newest = {*sorted(runs, key=lambda run: run.stat().st_mtime)[-RUNS_KEPT:]}
    for folder in reversed(ours):  # what lies in another folder of ours comes first
        if folder not in newest:
            folders.remove(folder, _what(folder), RUN)


def _ours_in(folder: Path) -> Iterator[Path]:
    """Yield runs, and the folders of runs with a name such as `exp/run`."""
    for each in folder.iterdir():
        if folders.is_ours(each, _what(each)):
            yield each
            yield from _ours_in(each)


def _what(folder: Path) -> str:
    return f"logs of {folder.name}"
