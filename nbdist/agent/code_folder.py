"""The notebook's folder as this node was sent it (`--sync-code`): kept as the notebook has it.

It is one folder as long as the agent lives: workers work in it, import from it, and find there what
earlier cells have written.
"""

from __future__ import annotations

import fcntl
import io
import logging
import os
import socket
import stat
import tarfile
import tempfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from nbdist.system import folders
from nbdist.wire.messages import CodeHeld, GetCode, Landmark, PutCode
from nbdist.wire.spec import WorldSpec, moved_path

log = logging.getLogger("nbdist.agent")

PREFIX = "nbdist-code-"

FILES, LIST, NEW_FILE = "code", "files", "new"
"""In a folder of ours: the workers' copy of the notebook's folder, the list of all files in it that
were sent, by which they are removed later, and the file that is being written."""

MADE_BY_PYTHON = "__pycache__"


class CodeFolder:
    """The notebook's files, for this node's workers; files that user code writes there stay.

    `path` is the folder that workers have in place of the notebook's, None before it is sent.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._claim = -1
        self._digest = ""
        self._archive = bytearray()
        self._sent = frozenset[str]()

    def take(self, request: GetCode | PutCode) -> CodeHeld:
        """Say whether the code with this digest is here, or take a part of its archive."""
        host = socket.gethostname()
        match request:
            case GetCode(_, mark) if self.path is None and mark and mark == Landmark.of(mark.path):
                return CodeHeld(host, is_here=True, is_shared=True)
            case GetCode():
                self._archive.clear()
            case PutCode(digest, part, is_last):
                self._archive += part
                try:
                    if is_last:
                        self._digest = ""
                        self._unpack()
                        self._digest = digest
                except OSError as error:
                    where = error.filename2 or error.filename or self.path or tempfile.gettempdir()
                    return CodeHeld(host, problem=f"{where}: {error.strerror or error}")
        return CodeHeld(host, is_here=self._digest == request.digest)

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
        if left := remove(self.path.parent):
            log.warning("%s stays, with what cells have written there: %s", self.path, left)
        self.path = None

    def _unpack(self) -> None:
        files = _files_of(zlib.decompress(self._archive))
        if self.path is None:
            parent = Path(tempfile.gettempdir())
            drop_dead(parent)
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            self._claim = folders.claim(folder)
            self.path = folder / FILES
            folders.make_private(self.path)
        # First: the next agent removes by it what one that was killed had written.
        with folders.whole_file(self.path.parent / LIST, folders.PRIVATE_FILE) as known:
            known.write(b"\0".join(map(os.fsencode, self._sent.union(files))))
        for path in self._sent.difference(files):
            _unlink(self.path, path)
        self._sent |= files.keys()
        for path, (content, mode) in files.items():
            _replace(self.path, path, content, mode)
        self._sent = frozenset(files)


def remove(folder: Path) -> list[str]:
    """Remove what was sent to a folder, and it too if nothing else is there; name what is."""
    code = folder / FILES
    with suppress(OSError):
        for path in (folder / LIST).read_bytes().split(b"\0"):
            _unlink(code, os.fsdecode(path))
    there = (Path(root, name) for root, _, names in os.walk(code) for name in names)
    found = [path.relative_to(code) for path in there]
    left = sorted(str(path) for path in found if MADE_BY_PYTHON not in path.parts)
    if not left:
        folders.remove(folder)
    else:  # from now on it is the user's
        for name in (LIST, NEW_FILE, folders.LOCK_FILE):
            (folder / name).unlink(missing_ok=True)
    return left


def drop_dead(parent: Path) -> None:
    """Remove folders whose agents were killed before they could."""
    for folder in parent.glob(PREFIX + folders.MADE):
        if (lock := folders.join(folder, fcntl.LOCK_EX)) is not None:
            os.close(lock)
            remove(folder)


def _files_of(archive: bytes) -> Mapping[str, tuple[bytes, int]]:
    """Return the content and mode of each file in an archive, by its path.

    Raises OSError if a member is no plain file, or its path leads out of the folder.
    """
    files = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isfile() else None
            if file is None or Path(member.name).is_absolute() or ".." in Path(member.name).parts:
                raise OSError(f"{member.name!r} was refused: it is no file below the folder")
            files[member.name] = file.read(), member.mode & folders.PRIVATE_FOLDER
    return files


def _is_below(folder: Path, file: Path) -> bool:
    """Return False where a link that user code has made leads out of the folder."""
    return file.parent.resolve() == folder.resolve() / file.parent.relative_to(folder)


def _replace(folder: Path, path: str, content: bytes, mode: int) -> None:
    """Write a file whole, or not at all: a worker may be reading it."""
    file = folder / path
    if not _is_below(folder, file):
        raise OSError(f"{path!r} was refused: it leads out of the folder")
    with suppress(OSError):  # modules that have not changed stay as they are
        if file.lstat().st_mode == stat.S_IFREG | mode and file.read_bytes() == content:
            return
    folders.make_private(file.parent)
    with folders.whole_file(file, mode, part=folder.parent / NEW_FILE) as new:
        new.write(content)
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
            if above == folder:
                return
            above.rmdir()


def _drop_compiled(file: Path) -> None:
    """Remove what Python has kept of a module: it tells it by the second and the size only."""
    if file.suffix == ".py":
        for compiled in (file.parent / MADE_BY_PYTHON).glob(f"{file.stem}.*.pyc"):
            compiled.unlink(missing_ok=True)
