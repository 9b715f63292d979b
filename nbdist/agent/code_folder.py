"""The notebook's folder as this node was sent it (`--sync-code`): kept as the notebook has it.

It is one folder as long as the agent lives, since workers work in it and import from it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from nbdist.system import folders
from nbdist.wire.messages import (
    MANIFEST,
    NEW_FILE,
    OWN_NAMES,
    CodeFile,
    CodeHeld,
    GetCode,
    PutCode,
    landmark,
)
from nbdist.wire.spec import WorldSpec, moved_path

log = logging.getLogger("nbdist.agent")

PREFIX = "nbdist-code-"

MADE_BY_PYTHON = "__pycache__"


class CodeFolder:
    """The notebook's files, for this node's workers; files that user code writes into it stay."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self._claim = -1
        self._sent = frozenset[str]()

    def take(self, request: GetCode | PutCode) -> CodeHeld:
        """Remove the files that the notebook has no longer, or write some that it has."""
        host, is_shared = socket.gethostname(), False
        try:
            match request:
                case GetCode(marks, paths):
                    if self.path is None:  # workers that are in a copy stay there
                        is_shared = bool(marks) and all(landmark(p) == marks[p] for p in marks)
                    else:
                        for path in self._sent - paths:
                            _unlink(self.path, path)
                        self._sent &= paths
                case PutCode(files):
                    self._write(files)
        except OSError as error:
            where = error.filename or self.path or tempfile.gettempdir()
            return CodeHeld(host, problem=f"{where}: {error.strerror or error}")
        return CodeHeld(host, is_shared)

    def moved(self, spec: WorldSpec) -> WorldSpec:
        """Let workers work and find their code here, instead of in the notebook's folder."""
        if self.path is None:
            return spec
        path = (moved_path(entry, spec.cwd, str(self.path)) for entry in spec.sys_path)
        return replace(spec, cwd=str(self.path), sys_path=tuple(path))

    def close(self) -> None:
        """Remove what was sent, and all if there is nothing else."""
        if self.path is None:
            return
        os.close(self._claim)
        if left := remove(self.path):
            log.warning("%s stays, with what cells have written there: %s", self.path, left)
        self.path = None

    def _write(self, files: Mapping[str, CodeFile]) -> None:
        if self.path is None:
            parent = Path(tempfile.gettempdir())
            drop_dead(parent)
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            self._claim = folders.claim(self.path, _what(self.path))
        self._sent |= files.keys()
        # First: the next agent removes by it what one that was killed had written.
        _replace(self.path, MANIFEST, CodeFile(b"\0".join(map(os.fsencode, self._sent))))
        for path, file in files.items():
            _replace(self.path, path, file)


def remove(folder: Path) -> list[str]:
    """Remove what was sent to a folder, and it too if nothing else is there; name what is."""
    with suppress(OSError):
        for path in (folder / MANIFEST).read_bytes().split(b"\0"):
            _unlink(folder, os.fsdecode(path))
    there = (Path(root, name) for root, _, names in os.walk(folder) for name in names)
    found = [path.relative_to(folder) for path in there]
    left = [str(path) for path in found if MADE_BY_PYTHON not in path.parts]
    left = sorted(path for path in left if path not in OWN_NAMES)
    if not left:
        folders.remove(folder, _what(folder), None)
    else:  # from now on it is the user's
        for name in OWN_NAMES:
            (folder / name).unlink(missing_ok=True)
    return left


def drop_dead(parent: Path) -> None:
    """Remove folders whose agents were killed before they could."""
    for folder in parent.glob(PREFIX + "*"):
        if folders.is_ours(folder, _what(folder), fcntl.LOCK_EX):
            remove(folder)


def _what(folder: Path) -> str:
    return f"code of a notebook in {folder.name}"


def _is_below(folder: Path, file: Path) -> bool:
    """Return False where a link that user code has made leads out of the folder."""
    return file.is_relative_to(folder) and (
        file.parent.resolve() == folder.resolve() / file.parent.relative_to(folder)
    )


def _replace(folder: Path, path: str, content: CodeFile) -> None:
    """Write a file whole, or not at all: a worker may be reading it."""
    file = folder / path
    if not _is_below(folder, file):
        raise OSError(f"{path!r} was refused: it leads out of the folder")
    with suppress(OSError):
        if CodeFile.read(str(file)) == content:  # modules that have not changed stay as they are
            return
    folders.make_private(file.parent)
    mode = 0o700 if content.is_program else 0o600
    with folders.whole_file(file, mode, part=folder / NEW_FILE) as new:
        new.write(content.content)
    _drop_compiled(file)


def _unlink(folder: Path, path: str) -> None:
    """Remove a file that was sent, and the folders that are empty then."""
    file = folder / path
    if not _is_below(folder, file):
        return
    with suppress(OSError):
        file.unlink()
    _drop_compiled(file)
    with suppress(OSError):  # up to the first that holds something else
        for above in file.parents:
            if (above / MADE_BY_PYTHON).is_dir():
                (above / MADE_BY_PYTHON).rmdir()
            above.rmdir()


def _drop_compiled(file: Path) -> None:
    """Remove what Python has kept of a module: it tells it by the second and the size only."""
    if file.suffix == ".py":
        for compiled in (file.parent / MADE_BY_PYTHON).glob(f"{file.stem}.*.pyc"):
            compiled.unlink(missing_ok=True)
