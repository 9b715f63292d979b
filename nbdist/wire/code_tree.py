"""The files of the notebook's folder as `--sync-code` sends them to nodes that do not share it.

The notebook lists them (`nbdist.world.code_sync`); a node, or the head for its nodes, answers
which it lacks (`nbdist.agent.code_folder`), by what is in them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b

from nbdist.system.folders import MARKER

PART = 4 << 20
"""Bytes of files after which a message has enough: other messages need not wait for more."""

MANIFEST = ".nbdist-files"
"""Names all files that a node was sent, so that nothing else is removed one day."""
NEW_FILE = ".nbdist-new"
"""A file that is being written there."""
OWN_NAMES = (MARKER, MANIFEST, NEW_FILE)


@dataclass(frozen=True, slots=True)
class CodeFile:
    """What is in a file, by its digest; a program or not."""

    digest: bytes
    is_program: bool = False

    @classmethod
    def read(cls, path: str) -> tuple[CodeFile, bytes]:
        """Read a file; raises OSError."""
        with open(path, "rb") as file:
            content, mode = file.read(), os.fstat(file.fileno()).st_mode
        return cls(digest_of(content), bool(mode & stat.S_IXUSR)), content


def digest_of(content: bytes) -> bytes:
    """Return what two files with the same in them have in common."""
    return blake2b(content, digest_size=16).digest()


def landmark(path: str) -> tuple[int, int] | None:
    """Return by which machines tell that they have the very same file; None for no file.

    Those that mount one file system see one inode, and when it was last changed in
    nanoseconds; a copy has others, and no program can set the latter.
    """
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns


def part_of(
    lacks: Iterable[CodeFile], read: Callable[[CodeFile], bytes | None]
) -> dict[CodeFile, bytes]:
    """Return what is in the first of these files, for one message; {} if none can be read."""
    part: dict[CodeFile, bytes] = {}
    size = 0
    for file in lacks:
        if size < PART and (content := read(file)) is not None:
            part[file] = content
            size += len(content)
    return part


def refusal_of(path: str) -> str:
    """Return why a node must not write to a path below its folder of code; "" where it may."""
    steps = path.split("/")
    if not path or path.startswith("/") or "\0" in path:
        return "it is no path below a folder"
    if any(step in ("", ".", "..") for step in steps):
        return "it leads out of the folder"
    return "the name is nbdist's own" if steps[0] in OWN_NAMES else ""


def moved_path(path: str, here: str, there: str) -> str:
    """Return the path below `there` where it lies below `here`; else the path itself."""
    if path == here or path.startswith(f"{here}/"):
        return there + path[len(here) :]
    return path
