"""Folders that nbdist makes: private from their first moment on, removed only with proof.

A folder that may be removed one day has a marker, a file with the folder's purpose and inode: no
copy passes for it.  Processes that use the folder lock the marker, so that none in use is removed,
whatever a cleaner of /tmp took away.  Without a marker nothing is removed.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import re
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from nbdist.errors import NoRuntimeFolder

MARKER = ".nbdist"
PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A pipe in a file's place must not keep us waiting for its other end.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Untrusted(Exception):
    """What others could have written; the message says which file or folder, and why."""


# --- the working directory --------------------------------------------------------------


def current_folder() -> str:
    """Return the working directory; if it was removed, the nearest folder above it that exists."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return nearest_folder(removed_folder())


def removed_folder() -> str:
    """Return the path that the working directory had before it was removed, "" if it exists."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return os.readlink("/proc/self/cwd").removesuffix(" (deleted)")
    return ""


def nearest_folder(path: str) -> str:
    """Return this folder, or the nearest one above it that exists and can be entered."""
    folders = (Path(path), *Path(path).parents)
    return next((str(each) for each in folders if os.access(each, os.X_OK) and each.is_dir()), "/")


# --- making -----------------------------------------------------------------------------


def make_private(folder: Path) -> None:
    """Make what is missing of a path, for this user alone; what is there stays.  Raises OSError."""
    if not folder.is_dir():
        make_private(folder.parent)
        with suppress(FileExistsError):  # another process was quicker, or it is a file: seen in use
            folder.mkdir(mode=PRIVATE_FOLDER)


def check_private(folder: Path) -> None:
    """Raise PermissionError for a folder that others can open."""
    found = os.lstat(folder)
    is_open = not stat.S_ISDIR(found.st_mode) or found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    if is_open or found.st_uid != os.geteuid():
        raise PermissionError(f"{folder} is not a folder that only this user can open")


def open_private(path: str | Path, flags: int) -> int:
    """Open files, as their `opener`, that only this user can read, whatever the umask."""
    return os.open(path, flags | os.O_CLOEXEC, PRIVATE_FILE)


@contextmanager
def whole_file(path: Path, mode: int = 0o666, part: Path | None = None) -> Iterator[BinaryIO]:
    """Open a new file that takes the place of `path` once it is written, or else is removed.

    Meanwhile it is hidden beside it, or is `part`.  Raises OSError.
    """
    # No other process has a thread of this number.
    part = part or path.with_name(f".{path.name}.{threading.get_native_id()}")
    try:
        part.unlink(missing_ok=True)  # a process that was killed may have left it
        with open(part, "xb", opener=partial(os.open, mode=mode)) as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def check_links(root: Path, folder: Path) -> None:
    """Raise Untrusted if a path leads from `root` through a symbolic link of another user."""
    for path in (*reversed(folder.parents), folder):
        if path == root or not path.is_relative_to(root) or not path.is_symlink():
            continue
        if (owner := os.lstat(path).st_uid) not in (0, os.geteuid()):
            raise Untrusted(f"{path} is a symbolic link of user {_user_name(owner)}")


def _user_name(number: int) -> str:
    with suppress(KeyError):
        return pwd.getpwuid(number).pw_name
    return str(number)


def claim(folder: Path, what: str) -> int:
    """Mark a folder just made; the descriptor holds it until it is closed.  Raises OSError."""
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW
    marker = open_private(folder / MARKER, flags)
    _lock(marker, fcntl.LOCK_SH)
    os.write(marker, _text(what, os.stat(folder).st_ino))
    return marker


def join(folder: Path, what: str, lock: int = fcntl.LOCK_SH) -> int | None:
    """Hold a folder that `claim` has marked; None for one that is not ours, or is going.

    With LOCK_EX alone: None too for one in use, or where there are no locks.
    """
    with suppress(OSError), _opened(folder) as at:
        return _held(at, what, lock)
    return None


def _lock(marker: int, lock: int) -> bool:
    try:
        fcntl.flock(marker, lock | fcntl.LOCK_NB)
    except OSError as error:
        # On a file system without locks nothing is removed: there it needs none.
        return lock == fcntl.LOCK_SH and not isinstance(error, BlockingIOError)
    return True


def _text(what: str, inode: int) -> bytes:
    return f"nbdist made this folder and may remove it: {what}, inode {inode}\n".encode()


def runtime(folder: Path) -> str:
    """Word the purpose of a folder of a world's sockets."""
    return f"sockets of {folder.name}"


def state_folder() -> str:
    """Find where the user keeps what outlives a run."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return str(Path(state).expanduser() / "nbdist")


# --- removing ---------------------------------------------------------------------------


def is_ours(folder: Path, what: str, lock: int = fcntl.LOCK_SH) -> bool:
    """Return True if it has the marker that `claim` wrote; with LOCK_EX if it is unused, too."""
    marker = join(folder, what, lock)
    if marker is not None:
        os.close(marker)
    return marker is not None


def remove(
    folder: Path, what: str, contents: re.Pattern[str] | None, aside: Path | None = None
) -> bool:
    """Remove a folder of ours that is not in use and holds nothing else; return True if it went.

    `contents` match the paths in it, relative to it, those of folders with a slash at their
    end; None for whatever is there.  What does not match, a symbolic link, another user's
    file or a folder in which others can write keeps all as it is.  It gets the name `aside`
    before, where half of it must not be taken for the whole.
    """
    with suppress(OSError), _opened(folder) as at:
        marker = _held(at, what, fcntl.LOCK_EX)
        if marker is None:
            return False
        try:
            # The folder that was proved, whatever has its name now; below it names hold still.
            here = Path(f"/proc/self/fd/{at}")
            # Of what is ours the marker is last: a removal that is cut off can be taken up again.
            found = sorted(here.rglob("*"), reverse=True)
            if not all(_is_known(each, str(each.relative_to(here)), contents) for each in found):
                return False
            if aside is not None:
                folder.rename(aside)
            for each in found:
                (os.rmdir if stat.S_ISDIR(each.lstat().st_mode) else os.unlink)(each)
            os.rmdir(aside or folder)
            return True
        finally:
            os.close(marker)
    return False


def _held(at: int, what: str, lock: int) -> int | None:
    """Return the locked marker of an open folder, None where it has none of ours; or OSError."""
    marker = os.open(MARKER, os.O_RDWR | _FILE, dir_fd=at)
    found, folder = os.fstat(marker), os.fstat(at)
    is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and _is_closed(folder)
    if is_ours and os.read(marker, 1024) == _text(what, folder.st_ino) and _lock(marker, lock):
        return marker
    os.close(marker)
    return None


def _is_known(path: Path, name: str, contents: re.Pattern[str] | None) -> bool:
    found = path.lstat()
    if stat.S_ISDIR(found.st_mode):
        name, is_own = f"{name}/", _is_closed(found)
    else:
        is_file = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
        is_own = is_file or contents is None
    return is_own and (contents is None or name == MARKER or bool(contents.fullmatch(name)))


def _is_closed(folder: os.stat_result) -> bool:
    """Return True for a folder that this user can list and change, and no other user change."""
    return folder.st_uid == os.geteuid() and folder.st_mode & 0o722 == stat.S_IRWXU


# --- reading ----------------------------------------------------------------------------


def open_trusted(path: Path) -> int:
    """Open a plain file that only this user can have written, as the two folders it is in.

    Symbolic links count for none.  Raises Untrusted, and OSError.
    """
    with ExitStack() as opened:
        at = None
        for folder in (path.parent.parent, path.parent):
            at = _open_own(folder, at, _FOLDER)
            opened.callback(os.close, at)
        return _open_own(path, at, _FILE)


def _open_own(path: Path, above: int | None, flags: int) -> int:
    """Raise where others can write: an access list that allows it shows in the group's bits."""
    name = path if above is None else path.name
    if stat.S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
        raise Untrusted(f"{path} is a symbolic link")
    fd = os.open(name, flags, dir_fd=above)
    found, why = os.fstat(fd), ""
    if flags == _FILE and not stat.S_ISREG(found.st_mode):
        why = f"{path} is no plain file"
    elif found.st_uid != os.geteuid():
        why = f"{path} belongs to user {_user_name(found.st_uid)}"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = f"others can write to {path} (mode {stat.S_IMODE(found.st_mode):04o})"
    if why:
        os.close(fd)
        raise Untrusted(why)
    return fd


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    fd = os.open(folder, _FOLDER)
    try:
        yield fd
    finally:
        os.close(fd)


# --- folders of worlds' sockets ---------------------------------------------------------------


PREFIX, SOCKET = "nbdist-", "notebook.sock"

LAST_PLACES = ("/tmp", "/var/tmp")
"""Where it goes when the environment names no place that can hold it."""

LONGEST_NAME, SOCKET_PATH_LIMIT = "a123456g1234r123456.tasks", 107
"""No socket's name in the folder is longer; bytes of a path (unix(7), without the final zero)."""

ROOM = 1 << 18
"""Bytes that a world's small files take, at most."""


class RuntimeFolder:
    """A new folder, held by this process; NoRuntimeFolder says what is wrong with each place."""

    def __init__(self) -> None:
        # In all places: the session that left one may have had another environment.  Others begin
        # with this name that are users' data, or a running world's from which a cleaner of /tmp
        # took files: these have no marker of ours, or it is held.
        for folder in (each for parent in places() for each in parent.glob(PREFIX + "*")):
            remove(folder, runtime(folder), None)
        problems = {}
        for parent in places():
            try:
                self.path, self.socket = _make_folder_in(parent), SOCKET
                break
            except OSError as error:
                problems[str(parent)] = error.strerror or str(error)
        else:
            raise NoRuntimeFolder(problems)
        self._claim = claim(self.path, runtime(self.path))

    def close(self) -> None:
        """Remove it, which an agent that was killed could not, and let go of it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Leave it to the agents that use it."""
        os.close(self._claim)


class JoinedFolder:
    """The folder of a world that another notebook has left; OSError for one not ours, or going."""

    def __init__(self, path: Path) -> None:
        check_private(path)
        self.path, self.socket = path, f"notebook-{os.getpid()}.sock"
        claim = join(path, runtime(path))
        if claim is None:
            raise FileNotFoundError(f"{path} is the folder of no world")
        self._claim = claim

    def close(self) -> None:
        """Take out of it what is this process's; its agents remove it."""
        (self.path / self.socket).unlink(missing_ok=True)
        os.close(self._claim)

    release = close


def problem_of(parent: Path) -> str:
    """Return why no runtime folder can lie there, "" if one can."""
    try:
        shutil.rmtree(_make_folder_in(parent))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def places() -> list[Path]:
    """Return where runtime folders may lie, in the order in which they are tried."""
    asked = (os.environ.get(name, "") for name in ("XDG_RUNTIME_DIR", "TMPDIR"))
    return [Path(place) for place in dict.fromkeys((*asked, *LAST_PLACES)) if place]


def _make_folder_in(parent: Path) -> Path:
    """Make it; OSError where it cannot hold a socket's path, or sockets, or is full."""
    if not parent.is_absolute():
        raise OSError("it is no absolute path")
    # In bytes, as the kernel counts: a letter can be four.
    longest = len(os.fsencode(parent / f"{PREFIX}12345678" / LONGEST_NAME))
    if longest > SOCKET_PATH_LIMIT or not str(parent).isprintable():
        raise OSError("its path is too long for a socket's, or has signs that it cannot have")
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    tried = folder / LONGEST_NAME
    try:
        tried.write_bytes(bytes(ROOM))
        tried.unlink()
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(os.fsencode(tried))
        tried.unlink()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder
