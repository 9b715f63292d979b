"""The folder of a world's sockets: only this user can open it, and it goes with the agent."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "nbdist-"
LOCK = "lock"
"""The agent holds it as long as it lives."""
FRESH_SECONDS = 60.0
"""A folder younger than this may belong to an agent that has not locked it yet."""


def make_runtime_folder() -> Path:
    """A new folder, mode 0700, with a path short enough for a unix socket's 107 bytes."""
    parent = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    if not os.access(parent, os.W_OK) or len(str(parent)) > 60:
        parent = Path("/tmp")
    drop_dead_folders(parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    (folder / LOCK).touch()
    return folder


def drop_dead_folders(parent: Path) -> None:
    """Remove folders whose agent was killed before it could.

    Only such that have the lock: others begin with this name that are somebody's data.
    """
    for folder in parent.glob(PREFIX + "*"):
        try:
            old = time.time() - folder.stat().st_mtime > FRESH_SECONDS
            if old and folder.stat().st_uid == os.getuid() and _is_unlocked(folder / LOCK):
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # it went meanwhile, or has no lock


def _is_unlocked(lock: Path) -> bool:
    with lock.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
