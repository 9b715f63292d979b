"""What user code finds around it in a worker: ready names, threads, bars as text, folder and path.

Runs in each rank: at its start, and before and after each task, when the kernel follows changes of
the notebook's surroundings and looks for edited modules.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from multiprocessing import process
from traceback import format_exc
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from nbdist.wire.places import PACKAGES
from nbdist.wire.spec import SET_ON_IMPORT, WorkerStart, moved_path, sharing_variables
from nbdist.wire.work import Surroundings
from nbdist.worker.compat import accelerator
from nbdist.worker.compat import torch as seam
from nbdist.worker.tracking import track

WIDGET_BARS = "tqdm.notebook"  # without its other names, `tqdm.autonotebook` falls back to text
RICH_CONSOLE = "rich.console"
_NAMES = {"tqdm": "tqdm", "trange": "trange", "tqdm_notebook": "tqdm", "tnrange": "trange"}


def prepare_torch(start: WorkerStart) -> None:
    """Set the rank's GPU, and torch's number of threads and debug level."""
    # torch and OpenMP of a forked worker have read OMP_NUM_THREADS and TORCH_DISTRIBUTED_DEBUG in
    # the fork server, which does not have the world's environment.
    torch.set_num_threads(start.world.threads)
    seam.read_debug_level()
    device = torch.device(start.device)
    if device.type != "cpu":
        accelerator.use(device)
        share_gpu(start)


def share_gpu(start: WorkerStart) -> None:
    """Allow NCCL to use one GPU for several ranks, if they share it or have slices of it."""
    if start.gpus and (start.has_slice or start.world.config.share_gpus):
        version, slices = accelerator.nccl_version(), start.has_slice
        os.environ.update(sharing_variables(start.rank, version, os.environ, slices=slices))


def ready_names(start: WorkerStart) -> dict[str, Any]:
    """Return the names that a cell finds without importing anything."""
    return {
        "rank": start.rank,
        "world_size": start.world.world_size,
        "local_rank": start.local_rank,
        "device": torch.device(start.device),
        "torch": torch,
        "dist": dist,
        "track": track,
    }


# --- for libraries ----------------------------------------------------------------------------


class _TextBars(MetaPathFinder, Loader):
    """Imports text bars as tqdm's module of widgets, and lets rich's console write text."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == RICH_CONSOLE and (found := PathFinder.find_spec(fullname, path)):
            loader: Any = found.loader
            execute = loader.exec_module

            def execute_and_change(module: ModuleType) -> None:
                execute(module)
                _write_text(module)

            loader.exec_module = execute_and_change
            return found
        return ModuleSpec(fullname, self) if fullname == WIDGET_BARS else None

    def exec_module(self, module: ModuleType) -> None:
        text = import_module("tqdm.std")
        for name, of_text in _NAMES.items():
            setattr(module, name, getattr(text, of_text))


def _write_text(rich_console: ModuleType) -> None:
    rich_console.Console.__init__.__kwdefaults__["force_jupyter"] = False


def draw_bars_as_text() -> None:
    """Make tqdm and rich draw bars as lines of text, which the notebook shows for each rank.

    In an ipykernel with ipywidgets both draw widgets, and a worker's widgets would never move.
    """
    sys.meta_path.insert(0, _TextBars())
    if rich_console := sys.modules.get(RICH_CONSOLE):
        _write_text(rich_console)
    # Without it rich does not move a bar, as it sees no terminal that understands a moving cursor.
    os.environ.setdefault("TTY_COMPATIBLE", "1")


# --- the notebook's folder, `sys.path`, `sys.argv` and environment --------------------------------


class Around:
    """Makes a rank follow the notebook's folder, `sys.path` and environment from task to task.

    What the rank has changed itself stays until the notebook changes the same thing again. Made
    after the worker's own imports, so that a `random.py` in the notebook's folder is for cells
    alone.
    """

    def __init__(self, start: WorkerStart, own_path: Sequence[str]) -> None:
        self._at_start = start.world
        self._own_path = [*own_path] if start.world.own_path else []
        self._told: Surroundings | None = None
        self._folder = os.getcwd()
        self._wanted = start.world.cwd  # the notebook's folder, as a path on this machine
        self._given = dict(os.environ)
        self._changes: Mapping[str, str | None] = {}
        self._path = self._path_with(start.world.sys_path)
        sys.path[:] = self._path
        sys.argv[:] = start.world.argv
        # Processes that multiprocessing spawns put this folder in the place of "" on the path.
        process.ORIGINAL_DIR = self._folder  # type: ignore[attr-defined]

    def follow(self, around: Surroundings | None) -> None:
        """Apply what has changed in the notebook since the last task; None is as at the start."""
        if around == self._told:
            return
        self._told, world = around, self._at_start
        around = around or Surroundings(world.cwd, world.cwd)
        self._go_to(around.folder, around.first)
        path = world.sys_path
        if around.sys_path is not None:
            path = tuple(moved_path(each, around.first, world.cwd) for each in around.sys_path)
        before, self._path = self._path, self._path_with(path)
        # If the rank has changed its path, keep its own entries.
        is_own = sys.path != before
        sys.path[:] = merged(sys.path, before, self._path) if is_own else self._path
        self._take_environ(around.environ)

    def _take_environ(self, now: Mapping[str, str | None]) -> None:
        """Change variables that the notebook has changed, even if this rank has set them too.

        Only variables that libraries set in each process (`SET_ON_IMPORT`) keep the rank's own
        value.
        """
        last, self._changes = self._changes, now
        given, absent = self._given, object()
        new = [n for n in {**last, **now} if now.get(n, absent) != last.get(n, absent)]
        after = {name: now.get(name, given.get(name)) for name in new}
        before = {
            name: last.get(name, given.get(name))
            if SET_ON_IMPORT.fullmatch(name)
            else os.environ.get(name)
            for name in new
        }
        change_environ(before, after)

    def _path_with(self, path: Sequence[str]) -> list[str]:
        return [*path, *(entry for entry in self._own_path if entry not in path)]

    def _go_to(self, folder: str, first: str) -> None:
        """Change to the notebook's folder, or its counterpart here, if it is another one."""
        wanted, now = moved_path(folder, first, self._at_start.cwd), _folder_now()
        if wanted == self._wanted and now is not None:
            return  # the notebook has not changed its folder: the rank may have
        there = next(filter(os.path.isdir, (wanted, folder)), None)
        if there is None:
            self._wanted = ""  # look again at the next task: the folder may be made later
            why = f"{socket.gethostname()} has no folder {folder}: this rank stays in"
            sys.stderr.write(f"{why} {now}\n")
            return
        try:
            os.chdir(there)
        except OSError as error:
            sys.stderr.write(f"this rank could not change to {there}: {error.strerror}\n")
            return
        if now not in (self._folder, os.getcwd(), None):
            sys.stderr.write(f"this rank has left {now} for the notebook's folder {there}\n")
        self._wanted = wanted
        self._folder = process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]


def change_environ(before: Mapping[str, str | None], after: Mapping[str, str | None]) -> None:
    """Set variables, or remove those that are None in `after`; keep what this rank has set."""
    for name, value in after.items():
        if os.environ.get(name) != before.get(name):
            continue  # this rank has a value of its own
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def merged(own: Sequence[str], before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Return a rank's `own` path with the changes that the notebook made from `before` to `after`.

    New entries go to the front if the notebook has them before all that it had; else to the end.
    """
    new = [entry for entry in after if entry not in before and entry not in own]
    old = next((at for at, entry in enumerate(after) if entry in before), len(after))
    first = [entry for entry in new if after.index(entry) < old]
    stays = [entry for entry in own if entry in after or entry not in before]
    return [*first, *stays, *(entry for entry in new if entry not in first)]


def _folder_now() -> str | None:
    """Return the working directory; None if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


# --- edited modules of the user -----------------------------------------------------------------

OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
CLOCKS = 2 * 10**9  # nanoseconds by which the clock of a file server may be ahead of this machine's


@dataclass
class Source:
    """A module's file, with its time and contents when it was imported, and the time last reported.

    `shown` is the end of its path from its outermost package on: `pkg/__init__.py`. `contents` is a
    digest; it is empty if the file may have been edited before the digest could be made.
    """

    file: str
    shown: str
    imported: int
    contents: bytes
    told: int = 0

    def is_edited(self, at: int) -> bool:
        """Return True if the file, of modification time `at`, differs from what was imported."""
        if at in (0, self.imported):
            return False
        if self.contents and _contents(self.file) == self.contents:
            self.imported = at  # the file was only touched, or written again with the same contents
            return False
        return True

    def reloaded(self, at: int) -> None:
        """Record that the module was imported again from the file, of modification time `at`."""
        self.imported, self.contents = at, _contents(self.file)


class OwnModules(MetaPathFinder):
    """Finds out which modules of the user were edited since their import; reloads them if asked.

    Stands first in `sys.meta_path` to see each import, also a repeated one, but finds no module.
    """

    def __init__(self) -> None:
        self._begun: dict[str, int] = {}  # by name, when an import began that was not looked at yet
        self._sources: dict[str, Source] = {}
        self._is_reloading = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Record when an import begins; called by the import system before it reads the file."""
        self._begun[fullname] = time.time_ns()
        return None

    def news(self, before: int, *, reloads: bool) -> tuple[str, ...]:
        """Name files edited between their import and the time `before`; report each edit once.

        `before` is when the task began, in nanoseconds. If `reloads`, `%autoreload` is on and has
        reloaded them, and none is named. It does not reload what was edited before it was turned
        on: that is done here.
        """
        if reloads and not self._is_reloading:
            self.reload(before)
        self._is_reloading = reloads
        told = []
        for source, edited in self._edited(before).values():
            if reloads:
                source.reloaded(edited)
            elif edited != source.told:
                source.told = edited
                told.append(source.shown)
        return tuple(told)

    def reload(self, before: int) -> None:
        """Reload the modules that were edited before this time, in the order of their import.

        As with `%autoreload`, other modules that have imported names from them get the new ones.
        """
        for name, (source, edited) in self._edited(before).items():
            autoreload = import_module("IPython.extensions.autoreload")
            try:
                autoreload.superreload(sys.modules[name], old_objects={})
            except Exception:  # noqa: BLE001 (it is the user's code)
                print(f"[autoreload of {name} failed: {format_exc(10)}]", file=sys.stderr)  # noqa: T201
            source.reloaded(edited)

    def forget_edited(self, is_own: Callable[[str], bool]) -> None:
        """Let a script import its own modules again if one of them was edited.

        All of them, because they import one another.
        """
        edited = self._edited(sys.maxsize)
        own = [name for name, source in self._sources.items() if is_own(source.file)]
        if not edited.keys().isdisjoint(own):
            for name in own:
                del self._sources[name]
                sys.modules.pop(name, None)

    def _edited(self, before: int) -> dict[str, tuple[Source, int]]:
        """Return the user's modules whose files were edited since their import, and when."""
        while self._begun:
            name, begun = self._begun.popitem()
            spec = getattr(sys.modules.get(name), "__spec__", None)
            file = str(getattr(spec, "origin", ""))
            is_other = PACKAGES.match(file) or file.startswith(OURS)
            if file.endswith(".py") and not is_other:
                edited = _time_of(file)
                # The file may have been edited after the import, while the task still ran.
                is_as_imported = edited <= begun + CLOCKS
                contents = _contents(file) if is_as_imported else b""
                imported = edited if is_as_imported else begun
                self._sources[name] = Source(file, _shown(name, file), imported, contents)
        times = {name: (each, _time_of(each.file)) for name, each in self._sources.items()}
        return {
            name: (each, at)
            for name, (each, at) in times.items()
            if at <= before and each.is_edited(at)
        }


def _time_of(file: str) -> int:
    try:
        return os.stat(file).st_mtime_ns
    except OSError:  # the file was removed, or is being written
        return 0


def _contents(file: str) -> bytes:
    """Return a digest of a file's contents; empty if the file cannot be read."""
    try:
        with open(file, "rb") as opened:
            return blake2b(opened.read(), digest_size=16).digest()
    except OSError:
        return b""


def _shown(module: str, file: str) -> str:
    """Return the end of a module's path, from its outermost package on."""
    parts = module.count(".") + 1 + (os.path.basename(file) == "__init__.py")
    return os.sep.join(file.split(os.sep)[-parts:])
