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
    refusal_of,
)
from nbdist.wire.spec import WorldSpec, moved_path

log = logging.getLogger("nbdist.agent")

PREFIX = "nbdist-code-"

WRITTEN_MODE, PROGRAM_MODE = 0o600, 0o700

MADE_BY_PYTHON = "__pycache__"


class CodeFolder:
    """The notebook's files, for this node's workers; files that user code writes into it stay."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self._claim = -1
        self._is_shared = False
        self._files: Mapping[str, CodeFile] = {}
        self._wanted: Mapping[str, CodeFile] = {}
        self._new: dict[str, CodeFile] = {}
        self._contents: dict[CodeFile, bytes] = {}
        self._host = socket.gethostname()

    def take(self, request: GetCode | PutCode) -> CodeHeld:
        """Take in which files there are, or what was missing; return what is missing still."""
        match request:
            case GetCode(marks, files):
                self._is_shared = bool(marks) and all(landmark(p) == marks[p] for p in marks)
                self._wanted, self._contents = files, {}
                # What is there is read each time: user code may have changed it.
                self._new = {p: f for p, f in files.items() if not self._has(p, f)}
            case PutCode(contents):
                self._contents |= contents
        if self._is_shared:
            return CodeHeld(self._host, is_shared=True)
        missing = dict.fromkeys(f for f in self._new.values() if f not in self._contents)
        return CodeHeld(self._host, tuple(missing)) if missing else self._write_all()

    def moved(self, spec: WorldSpec) -> WorldSpec:
        """Let workers work and find their code here, instead of in the notebook's folder."""
        if self.path is None or self._is_shared:
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

    # --- files ----------------------------------------------------------------------------

    def _has(self, path: str, file: CodeFile) -> bool:
        with suppress(OSError):
            return path in self._files and CodeFile.read(f"{self.path}/{path}")[0] == file
        return False

    def _write_all(self) -> CodeHeld:
        try:
            self._write(self._opened())
        except OSError as error:
            where = error.filename or self.path or tempfile.gettempdir()
            return CodeHeld(self._host, problem=f"{where}: {error.strerror or error}")
        finally:
            self._contents = {}
        return CodeHeld(self._host)

    def _opened(self) -> Path:
        if self.path is None:
            parent = Path(tempfile.gettempdir())
            drop_dead(parent)
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            self._claim = folders.claim(self.path, _what(self.path))
        return self.path

    def _write(self, folder: Path) -> None:
        for path in self._wanted:
            if why := refusal_of(path):
                raise OSError(f"{path!r} was refused: {why}")
        for path in self._files.keys() - self._wanted.keys():
            _unlink(folder, path)
        # First: the next agent removes by it what one that was killed had written.
        _replace(folder, MANIFEST, b"\0".join(map(os.fsencode, self._wanted)))
        self._files = self._wanted
        for path, file in self._new.items():
            _replace(folder, path, self._contents[file], is_program=file.is_program)


def remove(folder: Path) -> list[str]:
    """Remove what was sent to a folder, and it too if nothing else is there; name what is."""
    with suppress(OSError):
        for path in (folder / MANIFEST).read_bytes().split(b"\0"):
            if not refusal_of(os.fsdecode(path)):
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
    return file.parent.resolve() == folder.resolve() / file.parent.relative_to(folder)


def _replace(folder: Path, path: str, content: bytes, *, is_program: bool = False) -> None:
    """Write a file whole, or not at all: a worker may be reading it."""
    file, new = folder / path, folder / NEW_FILE
    if not _is_below(folder, file):
        raise OSError(f"{path!r} was refused: it leads out of the folder")
    folders.make_private(file.parent)
    try:
        new.write_bytes(content)
        new.chmod(PROGRAM_MODE if is_program else WRITTEN_MODE)
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)
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
