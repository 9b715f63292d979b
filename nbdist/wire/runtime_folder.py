"""The folder of a world's sockets on one machine: the notebook's, or that of a node elsewhere."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path

from nbdist import folders
from nbdist.errors import NoRuntimeFolder

PREFIX = "nbdist-"
SOCKET = "notebook.sock"
LAST_PLACES = ("/tmp", "/var/tmp")
"""Where it goes when the environment names no place that can hold it."""
LONGEST_NAME = "a123456g1234r123456.tasks"
"""As long as any name of a socket in the folder."""
SOCKET_PATH_LIMIT = 107
"""Bytes (unix(7), without the zero at the end)."""
ROOM = 1 << 18
"""Bytes that a world's small files take, at most."""


class RuntimeFolder:
    """A new folder, mode 0700, in the first place that can hold one.

    Who has made it holds it as long as it lives, and so does the agent: `nbdist.folders`.
    Raises NoRuntimeFolder with what is wrong with each place.
    """

    def __init__(self) -> None:
        self.path, self.socket = _make_folder(), SOCKET
        self._claim = folders.claim(self.path, folders.runtime(self.path))

    def __repr__(self) -> str:
        return f"<RuntimeFolder {self.path}>"

    def close(self) -> None:
        """Remove it, which an agent that was killed could not, and let go of it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.let_go()

    def let_go(self) -> None:
        """Leave it to the agents that use it."""
        os.close(self._claim)


class JoinedFolder:
    """The folder of a world that another notebook has made, and left to its agents.

    Raises OSError for one that is not ours, or is going.
    """

    def __init__(self, path: Path) -> None:
        folders.check_private(path)
        self.path, self.socket = path, f"notebook-{os.getpid()}.sock"
        claim = folders.join(path, folders.runtime(path))
        if claim is None:
            raise FileNotFoundError(f"{path} is the folder of no world")
        self._claim = claim

    def __repr__(self) -> str:
        return f"<JoinedFolder {self.path}>"

    def close(self) -> None:
        """Take out of it what is this process's; its agents remove it."""
        (self.path / self.socket).unlink(missing_ok=True)
        os.close(self._claim)

    let_go = close


def _make_folder() -> Path:
    problems = {}
    # In all of them: the session that left one may have had another environment.
    for parent in places():
        drop_dead_folders(parent)
    for parent in places():
        try:
            return _make_folder_in(parent)
        except OSError as error:
            problems[str(parent)] = error.strerror or str(error)
    raise NoRuntimeFolder(problems)


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
    try:
        _try_out(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def _try_out(folder: Path) -> None:
    """Raise OSError where there is no room for a world's files, or for no sockets."""
    tried = folder / LONGEST_NAME
    tried.write_bytes(bytes(ROOM))
    tried.unlink()
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.fsencode(tried))
    tried.unlink()


def drop_dead_folders(parent: Path) -> None:
    """Remove folders whose notebook and agent were killed before they could.

    Others begin with this name that are users' data, or a running world's from which a
    cleaner of /tmp took files: these have no marker of ours, or it is held.
    """
    for folder in parent.glob(PREFIX + "*"):
        folders.remove(folder, folders.runtime(folder), None)
