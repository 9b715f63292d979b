"""What user code finds in a worker: variables, names, threads, bars, `sys.path`."""

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

from nbdist.wire.spec import SET_ON_IMPORT, WorkerStart, moved_path, sharing_variables
from nbdist.wire.views import PACKAGES
from nbdist.wire.work import Surroundings
from nbdist.worker.compat import accelerator
from nbdist.worker.compat import torch as seam
from nbdist.worker.tracking import track

WIDGET_BARS = "tqdm.notebook"  # `tqdm.autonotebook` takes text where this lacks its other names
RICH_CONSOLE = "rich.console"
_NAMES = {"tqdm": "tqdm", "trange": "trange", "tqdm_notebook": "tqdm", "tnrange": "trange"}


def prepare_torch(start: WorkerStart) -> None:
    """Set the rank's GPU, and torch's number of threads."""
    # A forked worker's torch and OpenMP have read OMP_NUM_THREADS and TORCH_DISTRIBUTED_DEBUG in
    # the fork server, which does not have the world's environment.
    torch.set_num_threads(start.world.threads)
    seam.read_debug_level()
    device = torch.device(start.device)
    if device.type != "cpu":
        accelerator.use(device)
        share_gpu(start)


def share_gpu(start: WorkerStart) -> None:
    """Allow NCCL several ranks on one GPU, where they share it or have slices of it."""
    if start.gpus and (start.has_slice or start.world.config.share_gpus):
        version, slices = accelerator.nccl_version(), start.has_slice
        os.environ.update(sharing_variables(start.rank, version, os.environ, slices=slices))


def ready_names(start: WorkerStart) -> dict[str, Any]:
    """Return what a cell finds without importing anything."""
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
    """Finds tqdm's module of widgets, with ordinary bars in it, and rich's console of text."""

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
    """Draw tqdm's and rich's bars as lines, which the notebook shows for each rank.

    With ipywidgets both take widgets in an ipykernel, and a worker's would never move.
    """
    sys.meta_path.insert(0, _TextBars())
    if rich_console := sys.modules.get(RICH_CONSOLE):
        _write_text(rich_console)
    # Rich draws a bar that moves only where it is said that a moving cursor is understood.
    os.environ.setdefault("TTY_COMPATIBLE", "1")


# --- the notebook's folder, `sys.path`, `sys.argv` and environment, followed task by task -----


class Around:
    """Follows the notebook's surroundings from task to task.

    What a rank has changed itself stays until the notebook changes the same thing again.

    Made after the worker's own imports: a `random.py` in the notebook's folder is for cells alone.
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
        # What "" on the path is for processes that multiprocessing spawns.
        process.ORIGINAL_DIR = self._folder  # type: ignore[attr-defined]

    def follow(self, around: Surroundings | None) -> None:
        """Change what has changed in the notebook since the last task; None for as at the start."""
        if around == self._told:
            return
        self._told, world = around, self._at_start
        around = around or Surroundings(world.cwd, world.cwd)
        self._go_to(around.folder, around.first)
        path = world.sys_path
        if around.sys_path is not None:
            path = tuple(moved_path(each, around.first, world.cwd) for each in around.sys_path)
        before, self._path = self._path, self._path_with(path)
        # A rank that has entries of its own keeps them.
        is_own = sys.path != before
        sys.path[:] = merged(sys.path, before, self._path) if is_own else self._path
        self._take_environ(around.environ)

    def _take_environ(self, now: Mapping[str, str | None]) -> None:
        """Change the variables that the notebook has changed, also those that this rank has set.

        Variables that libraries set in each process stay if this rank has its own.
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
        """Change to the folder, or to the one in its place on this machine, if it is another."""
        wanted, now = moved_path(folder, first, self._at_start.cwd), _folder_now()
        if wanted == self._wanted and now is not None:
            return  # the notebook has not moved: a rank that has stays where it is
        there = next(filter(os.path.isdir, (wanted, folder)), None)
        if there is None:
            self._wanted = ""  # it may be made later
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
    """Change variables, or remove those that are None `after`; those set meanwhile stay."""
    for name, value in after.items():
        if os.environ.get(name) != before.get(name):
            continue  # this rank has a value of its own
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def merged(own: Sequence[str], before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Return this process's `own` path, which was `before`, with the notebook's changes to `after`.

    New entries go to the front if the notebook has them before all that it had; else last.
    """
    new = [entry for entry in after if entry not in before and entry not in own]
    old = next((at for at, entry in enumerate(after) if entry in before), len(after))
    first = [entry for entry in new if after.index(entry) < old]
    stays = [entry for entry in own if entry in after or entry not in before]
    return [*first, *stays, *(entry for entry in new if entry not in first)]


def _folder_now() -> str | None:
    """Return the working directory; None where it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


# --- which of the user's own modules have been edited since this worker has imported them -----

OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
CLOCKS = 2 * 10**9  # nanoseconds by which the clock of a file server may be ahead of this machine's


@dataclass
class Source:
    """A module's file: its time and contents when it was imported, and the time last reported.

    `shown` is the end of its path that names its package too: `pkg/__init__.py`.  `contents` is a
    digest, empty if the file may have been edited before it could be made.
    """

    file: str
    shown: str
    imported: int
    contents: bytes
    told: int = 0

    def is_edited(self, at: int) -> bool:
        """Return True if the file, whose time is `at` now, has other contents than imported."""
        if at in (0, self.imported):
            return False
        if self.contents and _contents(self.file) == self.contents:
            self.imported = at  # it was only touched, or written again as it was
            return False
        return True

    def reloaded(self, at: int) -> None:
        """Note that the module has been imported again from the file of this time."""
        self.imported, self.contents = at, _contents(self.file)


class OwnModules(MetaPathFinder):
    """Notes what is imported, also anew; finds nothing itself."""

    def __init__(self) -> None:
        self._begun: dict[str, int] = {}  # when, of those that have not been looked at
        self._sources: dict[str, Source] = {}
        self._is_reloading = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Note the time; called by the import system before it reads a module's file."""
        self._begun[fullname] = time.time_ns()
        return None

    def news(self, before: int, *, reloads: bool) -> tuple[str, ...]:
        """Name the files that were edited after their import and `before` this time; each once.

        `before` is when the task began, in nanoseconds.  Where `%autoreload` is on (`reloads`),
        it reloads them, but for what was edited before it was turned on, which is reloaded here.
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
        """Reload what was edited before this time as `%autoreload` does, in the order of import.

        What other modules have imported from it is the new one too.
        """
        for name, (source, edited) in self._edited(before).items():
            autoreload = import_module("IPython.extensions.autoreload")
            try:
                autoreload.superreload(sys.modules[name], old_objects={})
            except Exception:  # noqa: BLE001 (it is the user's code)
                print(f"[autoreload of {name} failed: {format_exc(10)}]", file=sys.stderr)  # noqa: T201
            source.reloaded(edited)

    def forget_edited(self, is_own: Callable[[str], bool]) -> None:
        """Have a script's own modules imported again if one was edited: they import one another."""
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
                # It may have been edited while the task still ran that has imported it.
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
    except OSError:  # it is gone, or being written
        return 0


def _contents(file: str) -> bytes:
    """Return a digest of a file; empty if it cannot be read."""
    try:
        with open(file, "rb") as opened:
            return blake2b(opened.read(), digest_size=16).digest()
    except OSError:
        return b""


def _shown(module: str, file: str) -> str:
    """Return the last parts of a module's path, from its outermost package on."""
    parts = module.count(".") + 1 + (os.path.basename(file) == "__init__.py")
    return os.sep.join(file.split(os.sep)[-parts:])
