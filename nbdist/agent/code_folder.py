"""This node's copy of the notebook's folder, which is made for the option `--sync-code`.

A node that shares the notebook's folder gets no copy.  Runs in the agent, which gets the files from
`nbdist.world.code_sync` in the notebook.  The copy is the workers' working directory: workers
import modules from there, and find there the files that earlier cells have written.  The copy keeps
its path while the agent is running.
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

CODE_FOLDER_PREFIX = "nbdist-code-"

FILES, LIST, NEW_FILE = "code", "files", "new"
"""Names in the folder that `CodeFolder` makes.

`code` is the copy of the notebook's folder.  `files` lists the files that the notebook sent; these
files are removed when the agent ends.  `new` is a file that is being written."""

MADE_BY_PYTHON = "__pycache__"


class CodeFolder:
    """This node's folder with copies of the notebook's files; cells may write more files there.

    `path` is the working directory of this node's workers, or None while there is no copy.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._claim = -1
        self._digest = ""
        self._archive = bytearray()
        self._sent = frozenset[str]()

    def answer(self, request: GetCode | PutCode) -> CodeHeld:
        """Answer whether this node has the files of an archive; unpack the archive once it is here.

        `GetCode` asks before any part of the archive is sent.  Each `PutCode` brings a part, and
        the last part makes this method unpack the archive.  If that fails, the answer says why.  A
        node that shares the notebook's folder has the files without a copy.
        """
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
                except (zlib.error, tarfile.TarError) as error:
                    return CodeHeld(host, problem=f"the archive arrived damaged ({error})")
        return CodeHeld(host, is_here=self._digest == request.digest)

    def with_folder(self, spec: WorldSpec) -> WorldSpec:
        """Return `spec` with the copy in place of the notebook's folder in `cwd` and `sys_path`.

        Returns `spec` unchanged if there is no copy.
        """
        if self.path is None:
            return spec
        path = (moved_path(entry, spec.cwd, str(self.path)) for entry in spec.sys_path)
        return replace(spec, cwd=str(self.path), sys_path=tuple(path))

    def close(self) -> None:
        """Remove the files that the notebook sent; keep the folder if cells have written files."""
        if self.path is None:
            return
        os.close(self._claim)
        if kept := remove(self.path.parent):
            log.warning("%s stays, with what cells have written there: %s", self.path, kept)
        self.path = None

    def _unpack(self) -> None:
        files = _files_of(self._archive)
        if self.path is None:
            parent = Path(tempfile.gettempdir())
            remove_dead_folders(parent)
            folder = Path(tempfile.mkdtemp(prefix=CODE_FOLDER_PREFIX, dir=parent))
            self._claim = folders.claim(folder)
            self.path = folder / FILES
            folders.make_private(self.path)
        # The list is written before the files: if the agent is killed, the guard can remove them.
        with folders.whole_file(self.path.parent / LIST, folders.PRIVATE_FILE) as listing:
            listing.write(b"\0".join(map(os.fsencode, self._sent.union(files))))
        for path in self._sent.difference(files):
            _unlink(self.path, path)
        self._sent |= files.keys()
        for path, (content, mode) in files.items():
            _replace(self.path, path, content, mode)
        self._sent = frozenset(files)


def remove(folder: Path) -> list[str]:
    """Remove the notebook's files from `folder`, a folder that a `CodeFolder` has made.

    Returns the paths of the other files, which cells have written, without Python's bytecode.  If
    there are no such files, `folder` is removed, too.
    """
    code = folder / FILES
    with suppress(OSError):
        for path in (folder / LIST).read_bytes().split(b"\0"):
            _unlink(code, os.fsdecode(path))
    files = (Path(root, name) for root, _, names in os.walk(code) for name in names)
    relative = [path.relative_to(code) for path in files]
    kept = sorted(str(path) for path in relative if MADE_BY_PYTHON not in path.parts)
    if not kept:
        folders.remove(folder)
    else:  # the folder keeps the user's files: without its lock file, no agent ever removes it
        for name in (LIST, NEW_FILE, folders.LOCK_FILE):
            (folder / name).unlink(missing_ok=True)
    return kept


def remove_dead_folders(parent: Path) -> None:
    """Call `remove` for each code folder in `parent` whose agent was killed."""
    for folder in parent.glob(CODE_FOLDER_PREFIX + folders.MADE):
        if (lock := folders.join(folder, fcntl.LOCK_EX)) is not None:
            os.close(lock)
            remove(folder)


def _files_of(archive: bytes | bytearray) -> Mapping[str, tuple[bytes, int]]:
    """Return, by path, the content and the mode (only the owner's bits) of each file in an archive.

    Raises OSError if the archive has anything but plain files, or a path that could lead out of the
    folder.  Raises zlib.error or TarError if the archive is damaged.
    """
    files = {}
    with tarfile.open(fileobj=io.BytesIO(zlib.decompress(archive))) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isfile() else None
            if file is None or Path(member.name).is_absolute() or ".." in Path(member.name).parts:
                raise OSError(f"{member.name!r} was refused: it is no file below the folder")
            files[member.name] = file.read(), member.mode & folders.PRIVATE_FOLDER
    return files


def _is_below(folder: Path, file: Path) -> bool:
    """Return True if no folder between `folder` and `file` is a symbolic link.

    A cell could make a link, through which nbdist would write or remove files outside `folder`.
    """
    return file.parent.resolve() == folder.resolve() / file.parent.relative_to(folder)


def _replace(folder: Path, path: str, content: bytes, mode: int) -> None:
    """Write `content` to the file `path` in `folder`, with these permissions (`mode`).

    Does nothing if the file has the same content and permissions already.

    The file is replaced atomically, because a worker may be reading it.  Raises OSError if `path`
    leads through a symbolic link.
    """
    file = folder / path
    if not _is_below(folder, file):
        raise OSError(f"{path!r} was refused: it leads out of the folder")
    with suppress(OSError):
        if file.lstat().st_mode == stat.S_IFREG | mode and file.read_bytes() == content:
            return
    folders.make_private(file.parent)
    with folders.whole_file(file, mode, part=folder.parent / NEW_FILE) as new:
        new.write(content)
    _drop_compiled(file)


def _unlink(folder: Path, path: str) -> None:
    """Remove the file `path` from `folder`, and the folders inside `folder` that become empty.

    Does nothing if `path` leads through a symbolic link.
    """
    file = folder / path
    if not _is_below(folder, file):
        return
    with suppress(OSError):
        file.unlink()
    _drop_compiled(file)
    with suppress(OSError):  # raised by the first folder that is not empty
        for above in file.parents:
            if (above / MADE_BY_PYTHON).is_dir():
                (above / MADE_BY_PYTHON).rmdir()
            if above == folder:
                return
            above.rmdir()


def _drop_compiled(file: Path) -> None:
    """Remove the bytecode of a module whose file was replaced or removed.

    Python would use the old bytecode if a new file has the same size and time of change.
    """
    if file.suffix == ".py":
        for compiled in (file.parent / MADE_BY_PYTHON).glob(f"{file.stem}.*.pyc"):
            compiled.unlink(missing_ok=True)
