"""Folders that nbdist makes: private from the start, and removed once no process uses them.

Processes lock a file in the folders that they use.  A folder is not removed if it is locked, has
no such file, or can be written by other users.  All processes of nbdist use this file.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from nbdist.errors import NoRuntimeFolder

LOCK_FILE = ".nbdist"
PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK, because opening a named pipe instead of the file would wait for a writer.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Untrusted(Exception):
    """Raised for a file that another user could have written; the text names it and the reason."""


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
    """Return this folder, or the nearest folder above it that exists and can be entered."""
    folders = (Path(path), *Path(path).parents)
    return next((str(each) for each in folders if os.access(each, os.X_OK) and each.is_dir()), "/")


# --- making -----------------------------------------------------------------------------


def make_private(folder: Path) -> None:
    """Make a folder, and missing folders above it, that only this user can open.

    Existing folders stay as they are.  Raises OSError, but not for a file in the folder's place.
    """
    if not folder.is_dir():
        make_private(folder.parent)
        with suppress(FileExistsError):  # another process was quicker, or there is a file
            folder.mkdir(mode=PRIVATE_FOLDER)


def check_private(folder: Path) -> None:
    """Raise PermissionError unless this is a folder of this user that no other user can open."""
    status = os.lstat(folder)
    is_open = not stat.S_ISDIR(status.st_mode) or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    if is_open or status.st_uid != os.geteuid():
        raise PermissionError(f"{folder} is not a folder that only this user can open")


def open_private(path: str | Path, flags: int) -> int:
    """Open a file; a new file can only be read by this user.  Also an `opener` for `open`."""
    return os.open(path, flags | os.O_CLOEXEC, PRIVATE_FILE)


@contextmanager
def whole_file(path: Path, mode: int = 0o666, part: Path | None = None) -> Iterator[BinaryIO]:
    """Open a new file that replaces `path` after the block; if the block raises, remove the file.

    During the block the file is `part`, or a hidden file beside `path`.  Raises OSError.
    """
    # A random name, because processes in other containers or machines can have the same pid.
    part = part or path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        part.unlink(missing_ok=True)  # left by a process that was killed
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


def state_folder() -> str:
    """Return the folder for files that outlive a run, such as logs and snapshots."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return str(Path(state).expanduser() / "nbdist")


# --- locking and removing ---------------------------------------------------------------


def claim(folder: Path) -> int:
    """Make a folder's lock file, which contains the folder's name, and lock it.

    Returns a descriptor; the folder stays locked until the descriptor is closed.  Raises OSError.
    """
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW
    file = _lock(open_private(folder / LOCK_FILE, flags), fcntl.LOCK_SH)
    # Written only under the lock: `remove` spares a folder whose lock file is still empty.
    os.write(file, os.fsencode(folder.name))
    return file


def join(folder: Path, lock: int = fcntl.LOCK_SH) -> int | None:
    """Lock a folder that `claim` has locked before; return a descriptor.

    Returns None if the folder has no lock file, can be written by another user, or is just being
    removed; with LOCK_EX also if another process has locked the folder, or if its file system has
    no locks.
    """
    with suppress(OSError, Untrusted), _opened(folder) as folder_fd:
        return _lock_in(folder_fd, lock)
    return None


def remove(folder: Path, aside: Path | None = None) -> bool:
    """Remove a folder that `join` can lock, if no process uses it; return True if it was removed.

    Symbolic links in it are removed, and never followed.  With `aside` the folder is first renamed,
    so that nobody reads a folder that is half removed.
    """
    with suppress(OSError, Untrusted), _opened(folder) as folder_fd:
        lock = _lock_in(folder_fd, fcntl.LOCK_EX)
        try:
            if aside is not None:
                folder.rename(aside)
            # By the descriptor, because another folder may have the name by now.  The lock file
            # is removed last, so that a later call can complete an interrupted removal.
            for name in {*os.listdir(folder_fd)} - {LOCK_FILE}:
                try:
                    os.unlink(name, dir_fd=folder_fd)
                except IsADirectoryError:
                    shutil.rmtree(name, ignore_errors=True, dir_fd=folder_fd)
            os.unlink(LOCK_FILE, dir_fd=folder_fd)
            os.rmdir(aside or folder)
            return True
        finally:
            os.close(lock)
    return False


def _lock_in(folder_fd: int, lock: int) -> int:
    file = os.open(LOCK_FILE, os.O_RDWR | _FILE, dir_fd=folder_fd)
    if lock == fcntl.LOCK_EX and not os.fstat(file).st_size:
        os.close(file)
        raise BlockingIOError(f"{LOCK_FILE} has been made, but is not locked yet")
    return _lock(file, lock)


def _lock(file: int, lock: int) -> int:
    try:
        fcntl.flock(file, lock | fcntl.LOCK_NB)
    except OSError as error:
        # On a file system without locks no folder is ever removed, so none needs a shared lock.
        if lock == fcntl.LOCK_EX or isinstance(error, BlockingIOError):
            os.close(file)
            raise
    return file


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    fd = _open_own(folder, None, _FOLDER)
    try:
        yield fd
    finally:
        os.close(fd)


# --- reading ----------------------------------------------------------------------------


def open_trusted(path: Path) -> int:
    """Open a plain file that only this user can have written; return its descriptor.

    The two folders above it are checked too.  Raises Untrusted, also for a symbolic link, and
    OSError.
    """
    with ExitStack() as opened:
        above = None
        for folder in (path.parent.parent, path.parent):
            above = _open_own(folder, above, _FOLDER)
            opened.callback(os.close, above)
        return _open_own(path, above, _FILE)


def _open_own(path: Path, above: int | None, flags: int) -> int:
    """Open a file or folder of this user; raise Untrusted if another user can write to it.

    The group's permission bits are also set if an access control list lets others write.
    """
    name = path if above is None else path.name
    if stat.S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
        raise Untrusted(f"{path} is a symbolic link")
    fd = os.open(name, flags, dir_fd=above)
    status, why = os.fstat(fd), ""
    if flags == _FILE and not stat.S_ISREG(status.st_mode):
        why = f"{path} is no plain file"
    elif status.st_uid != os.geteuid():
        why = f"{path} belongs to user {_user_name(status.st_uid)}"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = f"others can write to {path} (mode {stat.S_IMODE(status.st_mode):04o})"
    if why:
        os.close(fd)
        raise Untrusted(why)
    return fd


# --- runtime folders --------------------------------------------------------------------------


RUNTIME_FOLDER_PREFIX, NOTEBOOK_SOCKET = "nbdist-", "notebook.sock"

MADE = "[a-z0-9_]" * 8
"""Matches the letters that `tempfile.mkdtemp` adds to a prefix, but not the name of a copy."""

MADE_NAME = RUNTIME_FOLDER_PREFIX + MADE
"""Matches the names of runtime folders, and not `nbdist-code-...`."""

LAST_PLACES = ("/tmp", "/var/tmp")
"""Where runtime folders are made if the environment names no usable place."""

LONGEST_SOCKET_NAME, SOCKET_PATH_LIMIT = "a123456g1234r123456.tasks", 107
"""The longest name of a socket in the folder, and the most bytes in the path of a socket.

The kernel allows 108 bytes, with a final zero (unix(7))."""

ROOM = 1 << 18
"""Bytes that must be free: the small files of a world take at most so much."""


class RuntimeFolder:
    """A new folder for a world's sockets, locked by this process.

    Raises NoRuntimeFolder if no place can hold it, with the reason for each.  Also removes the
    runtime folders of processes that were killed.
    """

    def __init__(self) -> None:
        # Old folders are removed from all places, because an earlier session may have had another
        # environment.  Folders of running worlds have such names, too, but they are locked.
        for folder in (each for parent in places() for each in parent.glob(MADE_NAME)):
            remove(folder)
        problems = {}
        for parent in places():
            try:
                self.path, self.socket = _make_folder_in(parent), NOTEBOOK_SOCKET
                break
            except OSError as error:
                problems[str(parent)] = error.strerror or str(error)
        else:
            raise NoRuntimeFolder(problems)
        self._claim = claim(self.path)

    def close(self) -> None:
        """Remove the folder, in case its agent was killed before doing that, and unlock it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Unlock the folder without removing it, because agents still use it."""
        os.close(self._claim)


class JoinedFolder:
    """The runtime folder of a running world to which this notebook attaches, locked here too.

    Raises OSError if the folder is another user's or is being removed.
    """

    def __init__(self, path: Path) -> None:
        check_private(path)
        self.path, self.socket = path, f"notebook-{os.getpid()}.sock"
        claim = join(path)
        if claim is None:
            raise FileNotFoundError(f"{path} is the folder of no world")
        self._claim = claim

    def close(self) -> None:
        """Remove this process's socket and unlock the folder, which its agents will remove."""
        (self.path / self.socket).unlink(missing_ok=True)
        os.close(self._claim)

    release = close


def problem_of(parent: Path) -> str:
    """Return why no runtime folder can be made in this place, or ""."""
    try:
        shutil.rmtree(_make_folder_in(parent))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def places() -> list[Path]:
    """Return the places for runtime folders, in the order in which they are tried."""
    configured = (os.environ.get(name, "") for name in ("XDG_RUNTIME_DIR", "TMPDIR"))
    return [Path(place) for place in dict.fromkeys((*configured, *LAST_PLACES)) if place]


def _make_folder_in(parent: Path) -> Path:
    """Make a runtime folder in this place.

    Raises OSError if the path is too long for a socket, the disk is full, or its file system does
    not support sockets.
    """
    if not parent.is_absolute():
        raise OSError("it is no absolute path")
    # Counted in bytes, because the kernel limits bytes, and a letter may take four.
    longest = len(os.fsencode(parent / f"{RUNTIME_FOLDER_PREFIX}12345678" / LONGEST_SOCKET_NAME))
    if longest > SOCKET_PATH_LIMIT or not str(parent).isprintable():
        raise OSError("its path is too long for a socket's, or has signs that it cannot have")
    folder = Path(tempfile.mkdtemp(prefix=RUNTIME_FOLDER_PREFIX, dir=parent))
    path = folder / LONGEST_SOCKET_NAME
    try:
        path.write_bytes(bytes(ROOM))
        path.unlink()
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(os.fsencode(path))
        path.unlink()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder
