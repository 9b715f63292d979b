"""The files of the notebook's folder as `--sync-code` sends them to nodes that do not share it.

The notebook lists them (`nbdist.world.code_sync`) and asks a node which it lacks, by the
digests of what is in them; the node unpacks what it is sent (`nbdist.agent.code_folder`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b

from nbdist.system.folders import MARKER
from nbdist.wire.spec import WorldSpec

DIGEST_BYTES = 16

PART = 4 << 20
"""Bytes of files that go in one message: what else the link carries need not wait for more."""

Digest = bytes


@dataclass(frozen=True, slots=True)
class CodeFile:
    """A file, by the digest of what is in it; a program or not."""

    digest: Digest
    is_program: bool = False


@dataclass(frozen=True, slots=True)
class Landmark:
    """By which a node tells whether a path there leads to the very same file.

    Machines that mount one file system see one inode, and when it was last `changed` in
    nanoseconds; a copy has others, and nobody can set the latter.
    """

    path: str
    inode: int
    changed: int

    @classmethod
    def of(cls, path: str) -> Landmark:
        """Look at a file; raises OSError."""
        found = os.stat(path)
        return cls(path, found.st_ino, found.st_ctime_ns)

    @property
    def is_here(self) -> bool:
        """Whether this machine has it."""
        try:
            return Landmark.of(self.path) == self
        except OSError:
            return False


@dataclass(frozen=True, slots=True)
class CodePart:
    """Some of what is in the files that a node lacks, by digest.

    The last part has in `files` all that there is to be then; what is in the others the node
    has already, and those that it has besides go.
    """

    contents: Mapping[Digest, bytes]
    files: Mapping[str, CodeFile] | None = None


def digest_of(content: bytes) -> Digest:
    """Give what two files with the same in them have in common."""
    return blake2b(content, digest_size=DIGEST_BYTES).digest()


def parts(
    files: Mapping[str, CodeFile], contents: Iterable[tuple[Digest, bytes]]
) -> Iterator[CodePart]:
    """Divide what has to go to a node."""
    waiting: dict[Digest, bytes] = {}
    size = 0
    for digest, content in contents:
        if waiting and size + len(content) > PART:
            yield CodePart(waiting)
            waiting, size = {}, 0
        waiting[digest] = content
        size += len(content)
    yield CodePart(waiting, files)


def refusal_of(path: str) -> str:
    """Say why a node must not write to a path below its folder of code; "" where it may."""
    steps = path.split("/")
    if not path or path.startswith("/") or "\0" in path:
        return "it is no path below a folder"
    if any(step in ("", ".", "..") for step in steps):
        return "it leads out of the folder"
    return "the name is nbdist's own" if steps[0] in OWN_NAMES else ""


MANIFEST = ".nbdist-files"
"""Names all files that were written, so that nothing else is removed one day."""

OWN_NAMES = (MARKER, MANIFEST)


def moved(spec: WorldSpec, here: str, there: str) -> WorldSpec:
    """Have workers use `there` where the spec says `here`: as working directory, and in the path.

    What of the path lies below it goes with it; `there` comes first where the path has "".
    """
    path = (moved_path(entry, here, there) for entry in spec.sys_path)
    return replace(spec, cwd=moved_path(spec.cwd, here, there), sys_path=tuple(path))


def moved_path(path: str, here: str, there: str) -> str:
    """Return the path below `there` where it lies below `here`; else the path itself."""
    if path == here or path.startswith(f"{here}/"):
        return there + path[len(here) :]
    return path
