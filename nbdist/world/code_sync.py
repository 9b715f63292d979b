"""Copies the code in the notebook's folder to nodes that do not share the folder: `--sync-code`.

Runs in the notebook's process.  Before a task is sent, `CodeSync` lists the files in the folder.
If a file has changed, all files are sent in one archive.  Nodes that have an archive with the same
digest get nothing (`nbdist.agent.code_folder`).
"""

from __future__ import annotations

import io
import os
import re
import stat
import subprocess
import tarfile
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from importlib.machinery import PathFinder
from pathlib import Path

from nbdist.errors import CodeNotSent
from nbdist.wire.messages import CodeHeld, GetCode, Landmark, PutCode, Starting
from nbdist.wire.places import PACKAGES
from nbdist.words import size_text

MAX_SYNC_BYTES = 64 << 20  # the most bytes of all files together
MAX_SEARCHED_FILES = 50_000  # the most files and folders to search if git does not list the files
FRESH = 2 * 10**9  # nanoseconds; a second change of a file within this time may keep its mtime
NAMED = 3  # the most files that an error names
BRING_TIMEOUT = 1200.0  # seconds; must exceed a head's time to send the files to its machines
GIT_TIMEOUT = 10.0  # seconds for git to list the files

# Git must not fetch anything, nor run programs that the folder's own configuration names: the
# folder may be an unpacked archive that another person made.
GIT = ("git", "--no-pager", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
GIT_ENVIRON = {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}

QUIET = re.compile(r"(.*/)?(__pycache__|\.ipynb_checkpoints)/.*|.*\.ipynb")
"""Paths of files that no rank needs, and that change when the notebook is saved or imports code."""

SKIPPED_FOLDERS = re.compile(r"\..*|__pycache__|node_modules")
"""Names of folders in which `_python_files` does not search."""

Stamp = tuple[int, int, int, int]
"""Facts of a file by which a change is noticed: mtime and ctime in nanoseconds, bytes, inode."""

Asks = Callable[[GetCode | PutCode, float], Generator[Starting, None, CodeHeld]]
"""The type of `Link.calling`, which sends a request, yields progress and returns the reply."""


class CodeSync:
    """Sends the code in the notebook's folder to the nodes of a world.

    `is_shared` is True once all nodes are known to share the folder, so that they need no copy.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_shared = False
        self._sent_files: dict[str, Stamp] = {}
        self._sent_at = 0  # when the sent files were listed: nanoseconds since 1970

    def forget(self) -> None:
        """Forget which files were sent, and whether nodes share the folder.

        Call this for a new agent, about whose nodes nothing is known yet.
        """
        self._sent_files, self.is_shared = {}, False

    def send_changes(self, asks: Asks, *, to_new: bool = False) -> Generator[Starting, None, None]:
        """Send all files if some may have changed since the last call, or if nodes are new.

        `to_new` is True if nodes are new.  Nodes that share the folder, or have the same files
        already, get nothing.  Yields progress as `Link.calling` does.  Raises CodeNotSent if nodes
        cannot get the files.
        """
        if self.is_shared and not to_new:
            return
        try:
            os.stat(self.folder)  # raises if the folder was removed
            now, files = time.time_ns(), dict(_files_in(self.folder))
            # If a file changed just before it was sent, it may have changed again without a new
            # mtime.  So all files are read once more.
            is_fresh = any(abs(self._sent_at - each[0]) < FRESH for each in files.values())
            if files == self._sent_files and not (to_new or is_fresh):
                return
            self.forget()
            if sum(each[2] for each in files.values()) > MAX_SYNC_BYTES:
                raise CodeNotSent("", _too_large(files))
            archive = archive_of(self.folder, files)
        except OSError as error:
            raise CodeNotSent("", f"{error.filename or self.folder}: {error.strerror}") from None
        # The landmark is a file by which nodes find out whether they share the folder.  It is the
        # file that changed longest ago, because other machines may see changes late.
        oldest = min(files, key=lambda path: files[path][1], default="")
        digest = blake2b(archive, digest_size=16).hexdigest()
        landmark = Landmark.of(f"{self.folder}/{oldest}")
        reply = yield from asks(GetCode(digest, landmark), BRING_TIMEOUT)
        for put in () if reply.is_here else PutCode.of(digest, zlib.compress(archive, level=1)):
            reply = yield from asks(put, BRING_TIMEOUT)
        if reply.problem:
            raise CodeNotSent(reply.host, reply.problem)
        self.is_shared, self._sent_files, self._sent_at = reply.is_shared, files, now

    def has(self, path: str) -> bool:
        """Return True if the nodes have this file, as a copy or in the shared folder."""
        return self.is_shared or path in self._sent_files


def _too_large(stamps: Mapping[str, Stamp]) -> str:
    sizes = {path: stamp[2] for path, stamp in stamps.items()}
    largest = sorted(sizes, key=lambda path: -sizes[path])[:NAMED]
    named = ", ".join(f"{path} ({size_text(sizes[path])})" for path in largest)
    total = size_text(sum(sizes.values()))
    return (
        f"its files have {total}, and at most {size_text(MAX_SYNC_BYTES)} are sent; the largest "
        f"are {named}. Add what ranks do not need to .gitignore, after `git rm --cached FILE` if "
        "git tracks it, or move it to another folder"
    )


def _files_in(folder: Path, above: str = "") -> Iterator[tuple[str, Stamp]]:
    """Yield the path and `Stamp` of each file to send.

    If git knows the folder, these are the files that git lists; if not, the Python files.  `QUIET`
    files are left out.  `above` is put in front of each path.  If git lists another repository,
    such as a submodule, the files in that repository are yielded, too.
    """
    paths = _known_to_git(folder)
    for path in sorted({*(_python_files(folder) if paths is None else paths)}):
        here = folder / path
        try:
            status = here.stat()
        except OSError:  # a link that leads nowhere, or a file that git knows and that was removed
            continue
        if stat.S_ISREG(status.st_mode) and not QUIET.fullmatch(path):
            stamp = status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino
            yield above + path, stamp
        elif (here / ".git").exists() and not here.is_symlink() and here != folder:
            yield from _files_in(here, f"{above}{path.rstrip('/')}/")


def _known_to_git(folder: Path) -> list[str] | None:
    """Return the paths of files that git tracks or does not ignore, relative to `folder`.

    A repository in the folder, such as a submodule, is one path.  Returns None if git fails.
    Raises CodeNotSent if git takes too long.
    """
    command = [*GIT, "ls-files", "-co", "--exclude-standard", "-z"]
    environ = {**os.environ, **GIT_ENVIRON}
    try:
        git = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, timeout=GIT_TIMEOUT, check=True
        )
    except subprocess.TimeoutExpired:
        why = f"git did not list the files in {folder} within {GIT_TIMEOUT:.0f} s"
        raise CodeNotSent("", why) from None
    except (OSError, subprocess.CalledProcessError):
        return None
    return [os.fsdecode(path) for path in git.stdout.split(b"\0")]


def _python_files(folder: Path) -> Iterator[str]:
    looked_at = 0
    for root, folders, names in os.walk(folder):
        looked_at += len(folders) + len(names)
        if looked_at > MAX_SEARCHED_FILES:
            why = f"{folder} has more than {MAX_SEARCHED_FILES:,} files"
            raise CodeNotSent("", f"{why}: `git init` there, and list data in .gitignore")
        below = [each for each in folders if not SKIPPED_FOLDERS.fullmatch(each)]
        folders[:] = [each for each in below if not os.path.exists(f"{root}/{each}/pyvenv.cfg")]
        python = [each for each in names if each.endswith(".py")]
        yield from (os.path.relpath(f"{root}/{each}", folder) for each in python)


def archive_of(folder: Path, paths: Iterable[str]) -> bytes:
    """Return a tar archive of those files in `paths` that exist.

    The archive has no times and owners, so that equal files give an equal digest.  Raises OSError
    if a file cannot be read.
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path in paths:
            with suppress(FileNotFoundError), open(folder / path, "rb") as file:
                content, info = file.read(), tarfile.TarInfo(path)
                info.size = len(content)
                info.mode = 0o700 if os.fstat(file.fileno()).st_mode & stat.S_IXUSR else 0o600
                tar.addfile(info, io.BytesIO(content))
    return packed.getvalue()


# --- what nodes lack ----------------------------------------------------------------------------

_MISSING_FILE = re.compile(
    r"No module named '([\w.]+)'|No such file or directory: '((?!\.\.?/)[^'/][^']*)'"
)

LEFT_OUT = (
    "`{0}` is in the notebook's folder, but `--sync-code` leaves it out: it sends what git does "
    "not ignore, and without git Python files only. `git add -f {0}`, after `git init`, sends it."
)


def missing_text(
    message: str, host: str, folder: Path, path: Sequence[str], code: CodeSync | None
) -> str:
    """Return a text about a module or file that `host` lacks: where it is, and what helps.

    `message` is the message of an error that a rank on `host` raised.  Returns "" if this message
    is not about a missing module or file, or if no remedy is known.  `folder` is the notebook's
    folder, and `path` the notebook's `sys.path`.  `code` is None without `--sync-code`.
    """
    match = _MISSING_FILE.search(message)
    if match is None:
        return ""
    name = match[2] or match[1].replace(".", "/")
    files = [match[2]] if match[2] else [f"{name}.py", f"{name}/__init__.py"]
    if file := next((each for each in files if (folder / each).is_file()), ""):
        if code is not None:
            return "" if code.has(file) else LEFT_OUT.format(file)
        has_not = f"`{file}` is in the notebook's folder, which {host} does not have"
        return "" if match[2] else f"{has_not}: `--sync-code` sends it."
    if match[2]:
        return ""
    module = match[1].partition(".")[0]
    spec = PathFinder.find_spec(module, [entry for entry in path if entry])
    origin = (spec.origin or next(iter(spec.submodule_search_locations or ()), "")) if spec else ""
    if not origin:
        return ""
    if PACKAGES.match(origin):
        return f"`{module}` is installed on the notebook's machine, but not on {host}."
    place = str(Path(origin).parent if spec and spec.submodule_search_locations is None else origin)
    return f"`{module}` is in {place}, which {host} does not have: install it there."
