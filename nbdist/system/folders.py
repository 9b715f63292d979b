"""Makes private folders, locks folders in use, and removes folders that no process uses.

A process that uses a folder locks a file in it.  `remove` spares a folder that is locked, that has
no such file, or to which other users can write.  Notebooks, agents, heads and workers use this
module.
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
# O_NONBLOCK, because `open` would wait for a writer if a named pipe is in the file's place.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Untrusted(Exception):
    """Raised if another user may control a file, folder or link; the message says which and why."""


# --- the working directory --------------------------------------------------------------


def current_folder() -> str:
    """Return the working directory; if it was removed, the nearest folder above it that exists."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return nearest_folder(removed_folder())


def removed_folder() -> str:
    """Return the path of this process's working directory if it was removed; "" if it exists."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return os.readlink("/proc/self/cwd").removesuffix(" (deleted)")
    return ""


def nearest_folder(path: str) -> str:
    """Return the nearest folder that this process can enter: `path`, or a folder above `path`."""
    folders = (Path(path), *Path(path).parents)
    return next((str(each) for each in folders if os.access(each, os.X_OK) and each.is_dir()), "/")


# --- making -----------------------------------------------------------------------------


def make_private(folder: Path) -> None:
    """Make a folder, and missing folders above it, so that only this user can open them.

    Does nothing if the path exists, even as a file.  Raises OSError if a folder cannot be made.
    """
    if not folder.is_dir():
        make_private(folder.parent)
        with suppress(FileExistsError):  # made by another process, or a file has the name
            folder.mkdir(mode=PRIVATE_FOLDER)


def check_private(folder: Path) -> None:
    """Raise an OSError if `folder` is no folder, is another user's, or can be opened by others."""
    status = os.lstat(folder)
    is_open = not stat.S_ISDIR(status.st_mode) or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    if is_open or status.st_uid != os.geteuid():
        raise PermissionError(f"{folder} is not a folder that only this user can open")


def open_private(path: str | Path, flags: int) -> int:
    """Open a file and return its descriptor; a new file can be opened by this user only.

    This function can be the `opener` of `open`.
    """
    return os.open(path, flags | os.O_CLOEXEC, PRIVATE_FILE)


@contextmanager
def whole_file(path: Path, mode: int = 0o666, part: Path | None = None) -> Iterator[BinaryIO]:
    """Return a context with a new open file, which replaces `path` when the context ends.

    Until then the new file is at `part`, by default a hidden file beside `path`.  If the context
    ends by an error, the new file is removed, and `path` stays as it was.  Raises OSError.
    """
    # A random name, because a process in another container or machine can have the same pid.
    part = part or path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        part.unlink(missing_ok=True)  # in case a process was killed before it could rename `part`
        with open(part, "xb", opener=partial(os.open, mode=mode)) as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def check_links(root: Path, folder: Path) -> None:
    """Raise Untrusted if another user owns a symbolic link on the path from `root` to `folder`.

    Links of this user and of root (user 0) are accepted.
    """
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
    """Return the user's folder for files that outlive a world, such as logs and snapshots."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return str(Path(state).expanduser() / "nbdist")


# --- locking and removing ---------------------------------------------------------------


def claim(folder: Path) -> int:
    """Make a lock file in a folder, lock the file, and write the folder's name into it.

    Returns a descriptor; the folder stays locked until the descriptor is closed.  Raises OSError.
    """
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW
    file = _lock(open_private(folder / LOCK_FILE, flags), fcntl.LOCK_SH)
    # Write only after locking: `remove` spares a folder whose lock file is empty, because such a
    # file may have been made and not been locked yet.
    os.write(file, os.fsencode(folder.name))
    return file


def join(folder: Path, lock: int = fcntl.LOCK_SH) -> int | None:
    """Lock a folder in which `claim` has made a lock file; return a descriptor to close later.

    Returns None if the folder has no lock file, if another user may control the folder, or if the
    folder is being removed.  With LOCK_EX, also returns None if another process uses the folder, or
    if its file system has no locks.
    """
    with suppress(OSError, Untrusted), _opened(folder) as folder_fd:
        return _lock_in(folder_fd, lock)
    return None


def remove(folder: Path, aside: Path | None = None) -> bool:
    """Remove a folder unless a process uses it; return True if the folder was removed.

    The folder must have a lock file (`claim`), and no other user may control the folder.  With
    `aside` the folder is first moved to this path, so that no process finds a half removed folder
    at the old path.  Symbolic links in the folder are not followed.
    """
    with suppress(OSError, Untrusted), _opened(folder) as folder_fd:
        lock = _lock_in(folder_fd, fcntl.LOCK_EX)
        try:
            if aside is not None:
                folder.rename(aside)
            # Use the descriptor, because another folder may have the path by now.  The lock file is
            # removed last, so that a later call can complete an interrupted removal.
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
        # On a file system without locks go on without a shared lock: `remove` cannot get a lock
        # there either, and so removes no folder.
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
    """Open a plain file of this user for reading, and return its descriptor.

    Raises Untrusted if the file, or one of the two folders above it, is a symbolic link, belongs to
    another user, or can be written by other users.  Also raises Untrusted if the path leads to a
    folder, pipe or device, and OSError if the file cannot be opened.
    """
    with ExitStack() as opened:
        above = None
        for folder in (path.parent.parent, path.parent):
            above = _open_own(folder, above, _FOLDER)
            opened.callback(os.close, above)
        return _open_own(path, above, _FILE)


def _open_own(path: Path, above: int | None, flags: int) -> int:
    """Open this user's file or folder and return its descriptor.

    `above` is the descriptor of the folder above; without it, the whole `path` is used.  Raises
    Untrusted if the file or folder is a symbolic link, belongs to another user, or can be written
    by others.  If an access control list lets others write, the group's permission bits show this.
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
"""A pattern of `glob` for the eight characters that `tempfile.mkdtemp` adds to a prefix."""

MADE_NAME = RUNTIME_FOLDER_PREFIX + MADE
"""A pattern for the names of runtime folders; it does not match code folders, `nbdist-code-...`."""

LAST_PLACES = ("/tmp", "/var/tmp")
"""Folders in which runtime folders are made if no folder of the environment can be used."""

LONGEST_SOCKET_NAME, SOCKET_PATH_LIMIT = "a123456g1234r123456.tasks", 107
"""The longest name of a socket in a runtime folder, and the most bytes in the path of a socket.

Linux allows 108 bytes, with a final zero (unix(7))."""

ROOM = 1 << 18
"""Bytes that must be free on the disk of a runtime folder: more than a world's small files take."""


class RuntimeFolder:
    """A new runtime folder: a private folder for a world's sockets, locked by this process.

    Making the object also removes the runtime folders that killed processes have left.  Raises
    NoRuntimeFolder if none of the `places` can have such a folder; the error says why.
    """

    def __init__(self) -> None:
        # Remove old folders in all places, because an earlier notebook may have used another place.
        # Folders of running worlds match the pattern too, but `remove` keeps locked folders.
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
        """Remove the folder, which its agent may have removed already, and unlock it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Unlock the folder without removing it, because an agent still uses it."""
        os.close(self._claim)


class JoinedFolder:
    """The runtime folder of a running world to which this notebook attaches.

    This process locks the folder, as the world's agent does.
    Raises OSError if the folder is missing, is open to other users, or is being removed.
    """

    def __init__(self, path: Path) -> None:
        check_private(path)
        self.path, self.socket = path, f"notebook-{os.getpid()}.sock"
        claim = join(path)
        if claim is None:
            raise FileNotFoundError(f"{path} is the folder of no world")
        self._claim = claim

    def close(self) -> None:
        """Remove this process's socket and unlock the folder, which the agent still uses."""
        (self.path / self.socket).unlink(missing_ok=True)
        os.close(self._claim)

    release = close


def problem_of(parent: Path) -> str:
    """Return "" if a runtime folder can be made in the folder `parent`, or why it cannot."""
    try:
        shutil.rmtree(_make_folder_in(parent))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def places() -> list[Path]:
    """Return the folders in which a runtime folder may be made, in the order of trying them."""
    configured = (os.environ.get(name, "") for name in ("XDG_RUNTIME_DIR", "TMPDIR"))
    return [Path(place) for place in dict.fromkeys((*configured, *LAST_PLACES)) if place]


def _make_folder_in(parent: Path) -> Path:
    """Make a runtime folder in the folder `parent` and return its path.

    Raises OSError if sockets cannot be made there, for example because the path is too long, the
    disk is full, or the file system has no sockets.
    """
    if not parent.is_absolute():
        raise OSError("it is no absolute path")
    # Count bytes, because Linux limits bytes, and a character may take four.
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
