"""Where snapshots lie: a folder for each, which has its name only when it is complete.

    ROOT/NAME/20260131-120301/{manifest.json, rank0.frames, rank1.frames, ...}

Runs in the notebook's process.  What is being written lies beside it under a name that
begins with a dot; the lock of NAME tells a writer's folder from one that was left behind.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nbdist import __version__
from nbdist.errors import UsageError
from nbdist.world.spec import state_folder

KEPT = 3
"""Snapshots of one name; older ones are removed when another has been written."""

MANIFEST = "manifest.json"
UNFINISHED = ".part-"
NAME = re.compile(r"[\w][\w.-]*", re.ASCII)


@dataclass(frozen=True)
class Part:
    """One rank's file; `also` are names that functions among `names` need."""

    names: tuple[str, ...]
    also: tuple[str, ...]
    size: int
    digest: str


@dataclass(frozen=True)
class Snapshot:
    """One that lies in its folder; `problem` says what is wrong with it, as far as is seen."""

    name: str
    stamp: str
    folder: Path
    time: float = 0.0
    parts: Mapping[int, Part] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    torch: str = ""
    problem: str = ""

    @property
    def key(self) -> str:
        """By which `%dist_restore` finds it, also when there are newer ones of its name."""
        return f"{self.name}@{self.stamp}"

    @property
    def names(self) -> list[str]:
        """The variables that any rank has in it."""
        return sorted({name for part in self.parts.values() for name in part.names})

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return sum(part.size for part in self.parts.values())

    @property
    def clock(self) -> str:
        """`12:03`; with the day where that is another."""
        today = time.strftime("%Y%m%d") == self.stamp[:8]
        return time.strftime("%H:%M" if today else "%Y-%m-%d %H:%M", time.localtime(self.time))


def root_folder(log_dir: str | None) -> Path:
    """Beside the log files, or in the state folder; `$NBDIST_SNAPSHOT_DIR` before both."""
    chosen = os.environ.get("NBDIST_SNAPSHOT_DIR")
    if chosen:
        return Path(chosen).expanduser().absolute()
    return Path(log_dir or state_folder(), "snapshots").expanduser().absolute()


class Shelf:
    """All snapshots under one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __repr__(self) -> str:
        return f"<Shelf {self.root}, {len(self.all())} snapshots>"

    # --- reading --------------------------------------------------------------------------

    def all(self) -> list[Snapshot]:
        """The newest first."""
        found = [each for folder in _folders(self.root) for each in self.of(folder.name)]
        return sorted(found, key=lambda snapshot: snapshot.stamp, reverse=True)

    def of(self, name: str) -> list[Snapshot]:
        """Those of one name, the newest first."""
        folders = _folders(self.root / name)
        return [_read(name, folder) for folder in sorted(folders, reverse=True)]

    def find(self, key: str | None) -> Snapshot:
        """The newest of all, or of a name, or the one `NAME@STAMP`; UsageError for none."""
        name, _, stamp = (key or "").partition("@")
        found = self.of(name) if _is_name(name) else [] if key else self.all()
        for snapshot in found:
            if not stamp or snapshot.stamp == stamp:
                return snapshot
        there = sorted({snapshot.name for snapshot in self.all()})
        if not there:
            raise UsageError(f"There are no snapshots in {self.root}. `%dist_snapshot NAME`.")
        which = f"no snapshot `{key}`" if key else "none"
        listed = ", ".join(there[:6]) + (" …" if len(there) > 6 else "")
        raise UsageError(f"There is {which} in {self.root}; there are {listed}.")

    def damaged(self, snapshot: Snapshot, problem: str) -> UsageError:
        """The error that says so, and names the next older one that looks intact."""
        older = [each for each in self.of(snapshot.name) if each.stamp < snapshot.stamp]
        remedy = "There is no older one."
        for each in older:
            if not each.problem:
                remedy = f"`%dist_restore {each.key}` takes the one of {each.clock}."
                break
        return UsageError(f"The snapshot `{snapshot.key}` is damaged: {problem}. {remedy}")

    # --- writing --------------------------------------------------------------------------

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """A folder to write into, which is gone afterwards unless it was published.

        What writers that were killed have left is removed first.  Raises UsageError, also
        while somebody else writes one of this name.
        """
        if not _is_name(name):
            raise UsageError(
                f"`{name}` is no name for a snapshot: letters, digits and `_.-`, such as `epoch-3`."
            )
        try:
            (self.root / name).mkdir(parents=True, exist_ok=True)
            for other in _folders(self.root):
                # It may be another user's, or somebody may be writing there.
                with suppress(OSError), _locked(other):
                    _remove_leftovers(other)
            with _locked(self.root / name):
                folder = self.root / name / f"{UNFINISHED}{uuid.uuid4().hex}"
                folder.mkdir()
                try:
                    yield folder
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            raise UsageError(
                f"Another notebook is writing a snapshot `{name}`: again, or take another name."
            ) from None
        except OSError as error:
            raise self._unwritable(error) from None

    def publish(self, folder: Path, name: str, parts: Mapping[int, Mapping[str, Any]]) -> Snapshot:
        """Give a complete one its name, and remove the oldest; for `writing`.

        The notebook does it, because it knows when all ranks are done: a barrier would take
        a group, which not every world has.
        """
        now = time.time()
        stamp = _next_stamp(self.root / name, now)
        first = next(iter(parts.values()))
        manifest = {
            "format": 1,
            "name": name,
            "time": now,
            "world_size": len(parts),
            "nbdist": __version__,
            "torch": first["torch"],
            "left_out": {n: why for part in parts.values() for n, why in part["left_out"].items()},
            "ranks": {
                rank: asdict(Part(part["names"], part["also"], part["size"], part["digest"]))
                for rank, part in parts.items()
            },
        }
        with (folder / MANIFEST).open("x") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync(folder)
        folder.rename(self.root / name / stamp)
        _sync(self.root / name)
        for old in self.of(name)[KEPT:]:
            self._remove(old)
        return _read(name, self.root / name / stamp)

    def _remove(self, snapshot: Snapshot) -> None:
        """First out of its name: half of one must never look like one."""
        with suppress(OSError):
            going = snapshot.folder.with_name(f"{UNFINISHED}{uuid.uuid4().hex}")
            snapshot.folder.rename(going)
            shutil.rmtree(going, ignore_errors=True)

    def _unwritable(self, error: OSError) -> UsageError:
        return UsageError(
            f"No snapshot was written: {error.strerror or error} ({self.root}); earlier ones are "
            "as they were. `NBDIST_SNAPSHOT_DIR` names another folder."
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The right to write there; BlockingIOError while somebody else has it."""
    lock = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def _remove_leftovers(folder: Path) -> None:
    for left in folder.glob(f"{UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)


def _is_name(name: str) -> bool:
    return NAME.fullmatch(name) is not None


def _folders(folder: Path) -> list[Path]:
    try:
        return [each for each in folder.iterdir() if each.is_dir() and _is_name(each.name)]
    except OSError:
        return []


def _read(name: str, folder: Path) -> Snapshot:
    """A snapshot as its manifest has it, compared with the files' sizes."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        parts = {
            int(rank): Part(tuple(part["names"]), tuple(part["also"]), part["size"], part["digest"])
            for rank, part in manifest["ranks"].items()
        }
        found = (manifest["time"], parts, manifest["left_out"], manifest["torch"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Snapshot(name, folder.name, folder, problem=f"{MANIFEST} cannot be read")
    problems = [_problem_of(folder / f"rank{rank}.frames", part) for rank, part in parts.items()]
    return Snapshot(name, folder.name, folder, *found, problem=next(filter(None, problems), ""))


def _problem_of(file: Path, part: Part) -> str:
    try:
        size = file.stat().st_size
    except OSError:
        return f"{file.name} is missing"
    return "" if size == part.size else f"{file.name} has {size:,} of {part.size:,} bytes"


def _next_stamp(folder: Path, now: float) -> str:
    """When, as a folder's name that sorts after all others, also where the clock went back."""
    newest = max((each.name for each in _folders(folder)), default="")
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    if stamp > newest:
        return stamp
    second, _, number = newest.partition(".")
    return f"{second}.{int(number or 0) + 1:03}"


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
