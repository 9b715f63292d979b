"""The notebook's folder as this node was sent it: unpacked, and kept as the notebook has it.

For worlds with `--sync-code`, in the agent.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from nbdist.system import folders
from nbdist.wire.code_tree import (
    MANIFEST,
    CodeFile,
    Digest,
    digest_of,
    moved,
    refusal_of,
)
from nbdist.wire.messages import CodeHeld, GetCode, PutCode
from nbdist.wire.spec import WorldSpec

log = logging.getLogger("nbdist.agent")

PREFIX = "nbdist-code-"

WRITTEN_MODE, PROGRAM_MODE = 0o600, 0o700

MADE_BY_PYTHON = "__pycache__"


class CodeFolder:
    """A folder of this user alone with the notebook's files, for the workers of this node.

    Files that user code writes into it are the user's: they stay where they are at the end.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._claim = -1
        self._is_shared = False
        self._files: dict[str, CodeFile] = {}
        self._contents: dict[Digest, bytes] = {}
        self._host = socket.gethostname()

    def __repr__(self) -> str:
        return f"<CodeFolder {self.path}, {len(self._files)} files>"

    def look(self, get: GetCode) -> CodeHeld:
        """Say what is missing of the notebook's files; a shared folder needs no other."""
        marks = get.landmarks
        self._is_shared = bool(marks) and all(mark.is_here for mark in marks)
        if self._is_shared:
            return CodeHeld(self._host, is_shared=True)
        self._contents.clear()
        self._files = {path: file for path, file in self._files.items() if self._has(path, file)}
        held = {file.digest for file in self._files.values()}
        wanted = dict.fromkeys(file.digest for file in get.files.values())
        return CodeHeld(self._host, tuple(each for each in wanted if each not in held))

    def take(self, put: PutCode) -> CodeHeld:
        """Take in what was missing; after the last part the files are as the notebook's are."""
        if self._is_shared:
            return CodeHeld(self._host, is_shared=True)
        self._contents |= put.part.contents
        if put.part.files is None:
            return CodeHeld(self._host)
        try:
            lacks = self._write(put.part.files)
        except OSError as error:
            where = error.filename or self.path or tempfile.gettempdir()
            return CodeHeld(self._host, problem=f"{where}: {error.strerror or error}")
        finally:
            self._contents.clear()
        return CodeHeld(self._host, lacks)

    def moved(self, spec: WorldSpec) -> WorldSpec:
        """Have workers find their code here, and work here, instead of in the notebook's folder."""
        if self.path is None or self._is_shared:
            return spec
        return moved(spec, spec.cwd, str(self.path))

    def close(self) -> None:
        """Remove what was sent, and all if there is nothing else."""
        if self.path is None:
            return
        os.close(self._claim)
        if left := remove(self.path):
            log.warning("%s stays, with what cells have written there: %s", self.path, left)
        self.path = None

    # --- files ----------------------------------------------------------------------------

    def _write(self, files: Mapping[str, CodeFile]) -> tuple[Digest, ...]:
        """Make the folder hold these and no others that were sent; what is still missing."""
        folder = self._opened()
        for path in files:
            if why := refusal_of(path):
                raise OSError(f"{path!r} was refused: {why}")
        new = {path: file for path, file in files.items() if self._files.get(path) != file}
        contents = {**self._contents, **dict(self._held(new))}
        if lacks := [file.digest for file in new.values() if file.digest not in contents]:
            return tuple(dict.fromkeys(lacks))
        _note(folder, {**self._files, **files})
        for path in [path for path in self._files if path not in files]:
            del self._files[path]
            _unlink(folder, path)
        for path, file in new.items():
            _replace(folder, path, contents[file.digest], is_program=file.is_program)
            self._files[path] = file
        _note(folder, files)
        return ()

    def _opened(self) -> Path:
        if self.path is None:
            parent = Path(tempfile.gettempdir())
            drop_dead(parent)
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            self._claim = folders.claim(self.path, _what(self.path))
        return self.path

    def _has(self, path: str, file: CodeFile) -> bool:
        """Say whether a file is as it was written: user code may have changed it."""
        assert self.path is not None
        with suppress(OSError):
            return digest_of((self.path / path).read_bytes()) == file.digest
        return False

    def _held(self, new: Mapping[str, CodeFile]) -> Iterator[tuple[Digest, bytes]]:
        """Read what new files have in common with those that are there."""
        wanted = {file.digest for file in new.values()} - self._contents.keys()
        for path, file in self._files.items():
            if file.digest in wanted and self.path is not None:
                yield file.digest, (self.path / path).read_bytes()


def remove(folder: Path) -> list[str]:
    """Remove what was sent to a folder, and it too if nothing else is there; name what is."""
    with suppress(OSError):
        for path in (folder / MANIFEST).read_bytes().split(b"\0"):
            if path and not refusal_of(os.fsdecode(path)):
                _unlink(folder, os.fsdecode(path))
    left = []
    for root, subfolders, files in os.walk(folder, topdown=False):
        if os.path.basename(root) == MADE_BY_PYTHON:
            for name in files:
                os.unlink(os.path.join(root, name))
        else:
            left += [os.path.relpath(os.path.join(root, name), folder) for name in files]
        for name in subfolders:
            with suppress(OSError):  # it holds something, or is a link
                os.rmdir(os.path.join(root, name))
    left = [path for path in left if path not in (MANIFEST, folders.MARKER)]
    if not left:
        folders.remove(folder, _what(folder), None)
        return []
    # From now on it is the user's.
    for name in (MANIFEST, folders.MARKER):
        (folder / name).unlink(missing_ok=True)
    return sorted(left)


def drop_dead(parent: Path) -> None:
    """Remove folders whose agents were killed before they could."""
    for folder in parent.glob(PREFIX + "*"):
        if folders.is_abandoned(folder, _what(folder)):
            remove(folder)


def _what(folder: Path) -> str:
    return f"code of a notebook in {folder.name}"


def _note(folder: Path, files: Mapping[str, CodeFile]) -> None:
    """Write down which files are ours, before they are there and as long as they are."""
    text = b"\0".join(map(os.fsencode, files))
    _replace(folder, MANIFEST, text, is_program=False)


def _replace(folder: Path, path: str, content: bytes, *, is_program: bool) -> None:
    """Write a file whole, or not at all; never through a link, nor out of the folder."""
    file = folder / path
    folders.make_private(file.parent)
    if file.parent.resolve() != folder.resolve() / Path(path).parent:
        raise OSError(f"{path!r} was refused: it leads out of the folder")
    fd, new = tempfile.mkstemp(prefix=PREFIX, dir=file.parent)
    try:
        with open(fd, "wb") as opened:
            opened.write(content)
        os.chmod(new, PROGRAM_MODE if is_program else WRITTEN_MODE)
        os.replace(new, file)
    except BaseException:
        os.unlink(new)
        raise
    _drop_compiled(file)


def _unlink(folder: Path, path: str) -> None:
    """Remove a file that was sent, and the folders that are empty then."""
    file = folder / path
    if file.parent.resolve() != folder.resolve() / Path(path).parent:
        return
    with suppress(OSError):
        file.unlink()
    _drop_compiled(file)
    for above in file.parents:
        if above == folder:
            return
        with suppress(OSError):
            (above / MADE_BY_PYTHON).rmdir()
        try:
            above.rmdir()
        except OSError:
            return


def _drop_compiled(file: Path) -> None:
    """Remove what Python has kept of a module: it tells it by the second and the size only."""
    if file.suffix == ".py":
        for compiled in (file.parent / MADE_BY_PYTHON).glob(f"{file.stem}.*.pyc"):
            compiled.unlink(missing_ok=True)
