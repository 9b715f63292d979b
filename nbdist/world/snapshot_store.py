"""The folders of snapshots on the disk: find, write, publish and remove them.

    ROOT/NAME/20260131-120301/{manifest.json, rank0.frames, rank1.frames, ...}

`World` and the notebook's magics use this file in the notebook's process.  The ranks write and read
the `.frames` files themselves (`nbdist.worker.ops.snapshot`).

Until a snapshot is complete, the name of its folder begins with a dot.  Each new folder is private
and has a lock file; a snapshot without a lock file is never removed (`nbdist.system.folders`).  A
process holds the lock while it writes a snapshot, so an incomplete folder that is not locked was
left by a killed process.  A snapshot is a pickle, which can run any code.  So only files are read
that belong to this user and that no other user can write.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from nbdist import __version__
from nbdist.config import DEFAULT_POOL
from nbdist.errors import NbdistError, UsageError
from nbdist.system import folders, processes
from nbdist.wire.ops import Mesh, Written

ELSEWHERE_SECONDS = 7 * 86_400
"""Seconds after which the snapshot of a run on another machine may be removed.

Until then the run may still go on, because this machine cannot check whether it has ended.
"""

SNAPSHOTS_PER_NAME = 3
"""How many snapshots of a name a notebook keeps; `publish` removes older ones.

Snapshots of another run of the notebook are neither counted nor removed while that run may go on.
"""

MANIFEST = "manifest.json"
FORMAT = 2  # the version of the formats of the manifest and of the ranks' files
UNFINISHED = ".part-"
NAME = re.compile(r"[\w][\w.-]*", re.ASCII)
STAMP = re.compile(r"[0-9]{8}-[0-9]{6}(\.[0-9]+)?", re.ASCII)
CONTENTS = re.compile(
    rf"manifest\.json|rank[0-9]+\.frames|{re.escape(folders.LOCK_FILE)}", re.ASCII
)

NO_FILE = f"process {uuid.uuid4().hex}"
"""The owner of snapshots if this process is no kernel and its program has no file."""


@dataclass(frozen=True)
class Snapshot:
    """A snapshot on the disk, as its manifest describes it.

    `parts` has by rank a description of the rank's file.  Before ranks unpickle their files, they
    need the device meshes `meshes`.  `left_out` has variables that could not be saved, each with
    the reason.  `versions` has the versions of Python and packages on the ranks.  `owner`
    identifies the notebook that wrote the snapshot, and `process` that notebook's process.
    `problem` says what is wrong, as far as the manifest and the files' sizes show, and `distrust`
    why another user could have written the snapshot; both are "" for none.
    """

    name: str
    stamp: str
    folder: Path
    time: float = 0.0
    parts: Mapping[int, Written] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    meshes: tuple[Mesh, ...] = ()
    owner: str = ""
    process: str = ""
    problem: str = ""
    distrust: str = ""

    @property
    def key(self) -> str:
        """The full name `NAME@STAMP`, by which `%dist_restore` finds exactly this snapshot."""
        return f"{self.name}@{self.stamp}"

    @property
    def names(self) -> list[str]:
        """The names of the variables of all ranks, sorted."""
        return sorted({name for part in self.parts.values() for name in part.names})

    @property
    def size(self) -> int:
        """The size of all ranks' files, in bytes."""
        return sum(part.size for part in self.parts.values())

    @property
    def clock(self) -> str:
        """The time of a snapshot of today as `12:03`, of another day as `2026-01-31 12:03`."""
        today = time.strftime("%Y%m%d") == self.stamp[:8]
        return time.strftime("%H:%M" if today else "%Y-%m-%d %H:%M", time.localtime(self.time))


def root_folder(log_dir: str | None) -> Path:
    """Return the folder of all snapshots.

    By default the folder is `snapshots` in the log folder or, without log files, in the user's
    state folder; NBDIST_SNAPSHOT_DIR in the environment names another folder.
    """
    chosen = os.environ.get("NBDIST_SNAPSHOT_DIR")
    usual = os.path.join(log_dir or folders.state_folder(), "snapshots")
    return folders.current_folder() / Path(chosen or usual).expanduser()


def owner_of(pool: str) -> str:
    """Return a text that identifies the owner of a pool's snapshots: the program, and the pool.

    The program is the file of the notebook or script; if no file is known, the kernel or process.
    The default pool is not named.
    """
    main = vars(sys.modules["__main__"])
    # JupyterLab and VS Code tell a kernel the path of its notebook.  While a notebook has no name
    # yet, the path is a folder and ends with "/".
    in_jupyter = os.environ.get("JPY_SESSION_NAME") if "ipykernel" in sys.modules else None
    file = main.get("__vsc_ipynb_file__") or in_jupyter or main.get("__file__")
    if isinstance(file, str) and not file.endswith(os.sep):
        program = os.path.normpath(os.path.join(folders.current_folder(), file))
    else:
        program = _kernel() or NO_FILE
    return program if pool == DEFAULT_POOL else f"{program} pool {pool}"


def _kernel() -> str:
    """Return a text that identifies the notebook kernel, the same after a restart of the kernel.

    Returns "" if this process is no kernel, or its connection file cannot be read or has no key.
    """
    if "ipykernel" not in sys.modules:
        return ""
    from ipykernel.connect import get_connection_file

    try:
        key = json.loads(Path(get_connection_file()).read_text())["key"]
    # No kernel runs here, or its connection file was removed or is damaged.
    except (RuntimeError, OSError, ValueError, KeyError):
        return ""
    return f"kernel {hashlib.sha256(key.encode()).hexdigest()[:32]}" if key else ""


class SnapshotStore:
    """The snapshots of all notebooks in the folder `root`; `owner` identifies this notebook.

    Of the snapshots of a name, `find` prefers those of this notebook to those of other notebooks.
    """

    def __init__(self, root: Path, owner: str = NO_FILE) -> None:
        self.root, self.owner = root, owner

    def all(self) -> list[Snapshot]:
        """Return all snapshots, the newest first."""
        snapshots = [each for folder in _folders(self.root) for each in self.of(folder.name)]
        snapshots.sort(key=lambda each: (each.time or float("inf"), each.stamp), reverse=True)
        return sorted(snapshots, key=lambda each: each.stamp.partition(".")[0], reverse=True)

    def of(self, name: str) -> list[Snapshot]:
        """Return the snapshots of a name, the newest first."""
        return [_read(name, folder) for folder in _stamped(self.root / name)]

    @property
    def default_name(self) -> str:
        """The default name of a snapshot: the owner's file name, or `snapshot` without a file."""
        stem = Path(self.owner).stem if self.owner.startswith("/") else ""
        return "-".join(re.findall(r"[\w.-]+", stem, re.ASCII)).lstrip(".-") or "snapshot"

    def own_snapshots(self) -> list[Snapshot]:
        """Return the snapshots that this notebook has written, the newest first.

        A damaged snapshot whose owner cannot be read counts as this notebook's if this notebook has
        another snapshot of the same name.
        """
        snapshots = self.all()
        names = {each.name for each in snapshots if each.owner == self.owner}
        lost = [
            each for each in snapshots if each.problem and not each.owner and each.name in names
        ]
        return [each for each in snapshots if each.owner == self.owner or each in lost]

    def find(self, key: str | None) -> Snapshot:
        """Return the snapshot with the key `NAME@STAMP`, or the newest with the name `NAME`.

        For a `NAME`, snapshots of other notebooks count only if this notebook has none of the name.
        If `key` is None, return this notebook's newest snapshot.  Raises UsageError if there is no
        such snapshot.
        """
        name, _, stamp = (key or "").partition("@")
        mine = self.own_snapshots()
        matches = self.of(name) if _is_name(name) else [] if key else mine
        matches = [each for each in matches if not stamp or each.stamp == stamp]
        if matches:
            keys = {each.key for each in mine}
            return next((each for each in matches if each.key in keys), matches[0])
        newest = [snapshot.name for snapshot in self.all()]
        names = sorted({*newest})
        listed = ", ".join(f"`{name}`" for name in names[:6]) + (" …" if len(names) > 6 else "")
        text = f"No snapshot is known to be this notebook's. Available: {listed}. "
        if not names:
            text = f"There are no snapshots in {self.root}. `%dist_snapshot model step` saves one."
        elif key:
            text = f"There is no snapshot `{key}` in {self.root}. Available: {listed}."
        else:
            text += f"`%dist_restore --name {newest[0]}` restores one of them."
        raise UsageError(text)

    def damage_error(self, snapshot: Snapshot, problem: str) -> UsageError:
        """Return the error about a damaged snapshot.

        The error names the newest older snapshot of this name and owner that seems intact, if any.
        """
        owner = snapshot.owner or self.owner
        alike = (each for each in self.of(snapshot.name) if each.owner == owner)
        older = (each for each in alike if each.stamp < snapshot.stamp)
        remedy = "There is no older one."
        if intact := next((each for each in older if not (each.problem or each.distrust)), None):
            remedy = f"`%dist_restore --name {intact.key}` takes the one of {intact.clock}."
        return UsageError(f"The snapshot `{snapshot.key}` is damaged: {problem}. {remedy}")

    def distrust_error(self, snapshot: Snapshot, why: str) -> UsageError:
        """Return the error, with a remedy, about a snapshot that is not trusted, because `why`."""
        return UsageError(
            f"`{snapshot.key}` was not restored, because {why}: restoring a snapshot can run "
            "code. If you trust everyone who could have written it, copy it to a folder of your "
            f"own (`cp -r`, then `chmod -R go-w`) below {self.root}, or set NBDIST_SNAPSHOT_DIR."
        )

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Make a folder for a new snapshot, and remove it afterwards unless `publish` renamed it.

        Folders of killed writers are removed first.  Raises UsageError for a bad name, if files
        cannot be written, or while another notebook writes a snapshot of this name.
        """
        if not _is_name(name):
            forms = "letters, digits and `_.-`, such as `epoch-3`"
            raise UsageError(f"`{name}` is not a name for a snapshot: {forms}.")
        try:
            folders.make_private(self.root)
            for other in _folders(self.root):
                for leftover in other.glob(f"{UNFINISHED}*"):
                    folders.remove(leftover)
            with suppress(FileExistsError):
                (self.root / name).mkdir(mode=folders.PRIVATE_FOLDER)
            lock = self.root / name / ".lock"
            descriptor = folders.open_private(lock, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW)
            with os.fdopen(descriptor, "rb"):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                folder = self.root / name / f"{UNFINISHED}{uuid.uuid4().hex}"
                claim = None
                try:
                    folder.mkdir(mode=folders.PRIVATE_FOLDER)
                    claim = folders.claim(folder)
                    os.close(folders.open_trusted(folder / folders.LOCK_FILE))
                    yield folder
                finally:
                    if claim is not None:
                        os.close(claim)
                    if not folders.remove(folder):
                        # Either `publish` has renamed the folder, and `rmdir` fails.  Or Stop came
                        # before the folder got its lock file, without which `remove` does nothing.
                        with suppress(OSError):
                            folder.rmdir()
        except NbdistError:  # an error of a rank may be an OSError too: see `as_raised`
            raise
        except BlockingIOError:
            raise UsageError(
                f"Another notebook is writing a snapshot `{name}`: again, or take another name."
            ) from None
        except folders.Untrusted as error:
            raise UsageError(
                f"No snapshot was written: {error}, and files that others can write are never "
                "restored. Take another name, or another folder: NBDIST_SNAPSHOT_DIR."
            ) from None
        except OSError as error:
            raise UsageError(
                f"No snapshot was written: {error.strerror or error} ({self.root}); earlier ones "
                "are as they were. `NBDIST_SNAPSHOT_DIR` names another folder."
            ) from None

    def publish(self, folder: Path, name: str, parts: Mapping[int, Written]) -> Snapshot:
        """Complete and return a new snapshot: write the manifest, and rename the folder.

        `folder` is the folder of `writing`; `parts` has by rank what the rank has written.  Then
        removes snapshots of the same name and notebook for which `_is_removable` returns True,
        except the newest `SNAPSHOTS_PER_NAME` of them.
        """
        now = time.time()
        stamp = _next_stamp(self.root / name, now)
        manifest = {
            "format": FORMAT,
            "time": now,
            "nbdist": __version__,
            "versions": dict(next(iter(parts.values())).versions),
            "stamp": stamp,
            "owner": self.owner,
            "process": processes.identify(os.getpid()),
            "meshes": [asdict(mesh) for mesh in {m for p in parts.values() for m in p.meshes}],
            "left_out": {n: why for part in parts.values() for n, why in part.left_out.items()},
            "ranks": {
                rank: {each: getattr(part, each) for each in ("names", "also", "size", "digest")}
                for rank, part in parts.items()
            },
        }
        with open(folder / MANIFEST, "x", opener=folders.open_private) as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync(folder)
        folder.rename(self.root / name / stamp)
        _sync(self.root / name)
        own_snapshots = [each for each in self.of(name) if each.owner == self.owner]
        for old in [each for each in own_snapshots if self._is_removable(each)][
            SNAPSHOTS_PER_NAME:
        ]:
            _remove(old)
        return _read(name, self.root / name / stamp)

    def _is_removable(self, snapshot: Snapshot) -> bool:
        """Return True if the run that wrote a snapshot is this run, or has ended.

        A run on another machine counts as ended once the snapshot's age is `ELSEWHERE_SECONDS`.
        """
        is_of_this_run = snapshot.process == processes.identify(os.getpid())
        is_recent = time.time() - snapshot.time < ELSEWHERE_SECONDS
        can_be_checked = processes.is_of_this_machine(snapshot.process)
        may_run = (is_recent or can_be_checked) and processes.may_run(snapshot.process)
        return is_of_this_run or not may_run

    def remove(self, key: str) -> list[Snapshot]:
        """Remove this notebook's snapshots of a name, or any one snapshot `NAME@STAMP`.

        Returns the removed snapshots.  Raises UsageError if no snapshot was removed.
        """
        newest = self.find(key)
        chosen = (
            [newest] if "@" in key else [e for e in self.own_snapshots() if e.name == newest.name]
        )
        if not chosen:
            raise UsageError(
                f"`{key}` was not removed: another notebook has saved it. "
                f"`%dist_snapshot --remove {newest.key}` removes one of its snapshots."
            )
        removed = [each for each in chosen if _remove(each)]
        if not removed:
            raise UsageError(f"`{key}` was not removed: there are files in it that are not ours.")
        folder = newest.folder.parent
        if not _stamped(folder):
            with suppress(OSError):  # another notebook may be writing a snapshot there
                (folder / ".lock").unlink()
                folder.rmdir()
        return removed


def _remove(snapshot: Snapshot) -> bool:
    # Rename the folder first: a snapshot that is half removed must never look like a snapshot.
    going = snapshot.folder.with_name(f"{UNFINISHED}{uuid.uuid4().hex}")
    with suppress(OSError):
        if all(CONTENTS.fullmatch(each.name) for each in snapshot.folder.iterdir()):
            return folders.remove(snapshot.folder, aside=going)
    return False


def _is_name(name: str) -> bool:
    return NAME.fullmatch(name) is not None


def _folders(folder: Path) -> list[Path]:
    with suppress(OSError):
        return [each for each in folder.iterdir() if each.is_dir() and _is_name(each.name)]
    return []


def _stamped(folder: Path) -> list[Path]:
    """Return the folders of snapshots of one name, the newest first."""
    return sorted((each for each in _folders(folder) if STAMP.fullmatch(each.name)), reverse=True)


def _read(name: str, folder: Path) -> Snapshot:
    """Return a folder's snapshot; its `problem` says what is wrong with the manifest or a file."""
    try:
        with os.fdopen(folders.open_trusted(folder / MANIFEST), "rb") as file:
            manifest = json.load(file)
        if manifest["format"] != FORMAT:
            problem = f"nbdist {manifest['nbdist']} wrote it in another format"
            return Snapshot(name, folder.name, folder, problem=problem)
        parts = {
            int(rank): Written("", (*p["names"],), (*p["also"],), {}, p["size"], p["digest"])
            for rank, p in manifest["ranks"].items()
        }
        meshes = tuple(Mesh.read(mesh) for mesh in manifest["meshes"])
        versions = {k: str(v) for k, v in manifest.get("versions", {}).items()}
        contents = (manifest["time"], parts, manifest["left_out"], versions, meshes)
        process = str(manifest.get("process", ""))
        # A copy that the user has made under another stamp belongs to no notebook.
        is_copy = manifest.get("stamp", folder.name) != folder.name
        owner = "" if is_copy else str(manifest.get("owner", ""))
        problems = [_problem_of(folder / f"rank{r}.frames", p) for r, p in parts.items()]
    except folders.Untrusted as error:
        return Snapshot(name, folder.name, folder, distrust=str(error))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Snapshot(name, folder.name, folder, problem=f"{MANIFEST} cannot be read")
    problem = next(filter(None, problems), "")
    return Snapshot(name, folder.name, folder, *contents, owner, process, problem)


def _problem_of(path: Path, part: Written) -> str:
    try:
        with os.fdopen(folders.open_trusted(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return f"{path.name} is missing"
    return "" if size == part.size else f"{path.name} has {size:,} of {part.size:,} bytes"


def _next_stamp(folder: Path, now: float) -> str:
    """Return the time `now` as a stamp for a new snapshot in the folder.

    If the folder already has this stamp or a later one, return its newest stamp with a higher
    number behind it.
    """
    newest = next((each.name for each in _stamped(folder)), "")
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
