"""The environment of user code in a worker: variables, progress bars, folder and `sys.path`.

Runs in each worker. If the notebook has changed its folder, `sys.path` or environment variables,
the kernel makes the same changes in the worker before the next task, by `Around`. After each task
the kernel asks `OwnModules` which modules the user has edited.
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

WIDGET_BARS = "tqdm.notebook"  # replaced by `_TextBars`; `tqdm.autonotebook` then uses text too
RICH_CONSOLE = "rich.console"
_NAMES = {"tqdm": "tqdm", "trange": "trange", "tqdm_notebook": "tqdm", "tnrange": "trange"}


def prepare_torch(start: WorkerStart) -> None:
    """Set the rank's GPU, and torch's number of threads and debug level."""
    # In a forked worker, torch and OpenMP have read OMP_NUM_THREADS and TORCH_DISTRIBUTED_DEBUG in
    # the fork server, which does not have the world's variables. So set both again.
    torch.set_num_threads(start.world.threads)
    seam.read_debug_level()
    device = torch.device(start.device)
    if device.type != "cpu":
        accelerator.use(device)
        share_gpu(start)


def share_gpu(start: WorkerStart) -> None:
    """Set the environment variables with which NCCL accepts a GPU that several ranks share.

    Do nothing if this rank has no GPU, or if it has a whole GPU and `--share-gpus` is not given.
    """
    if start.gpus and (start.has_slice or start.world.config.share_gpus):
        version, slices = accelerator.nccl_version(), start.has_slice
        os.environ.update(sharing_variables(start.rank, version, os.environ, slices=slices))


def ready_names(start: WorkerStart) -> dict[str, Any]:
    """Return the variables that cells can use from the start, such as `rank` and `torch`."""
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
    """An import finder that changes two modules when they are imported.

    `tqdm.notebook` gets tqdm's bars of text, and `rich.console` draws no widgets.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == RICH_CONSOLE and (spec := PathFinder.find_spec(fullname, path)):
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_change(module: ModuleType) -> None:
                execute(module)
                _disable_widgets(module)

            loader.exec_module = execute_and_change
            return spec
        return ModuleSpec(fullname, self) if fullname == WIDGET_BARS else None

    def exec_module(self, module: ModuleType) -> None:
        text = import_module("tqdm.std")
        for name, of_text in _NAMES.items():
            setattr(module, name, getattr(text, of_text))


def _disable_widgets(rich_console: ModuleType) -> None:
    rich_console.Console.__init__.__kwdefaults__["force_jupyter"] = False


def draw_bars_as_text() -> None:
    """Make tqdm and rich draw bars as lines of text, which the notebook can compare.

    In an ipykernel with ipywidgets both libraries would draw widgets instead.
    """
    sys.meta_path.insert(0, _TextBars())
    if rich_console := sys.modules.get(RICH_CONSOLE):
        _disable_widgets(rich_console)
    # With this variable rich assumes a terminal whose cursor can move. Without it rich would draw
    # no bars that move.
    os.environ.setdefault("TTY_COMPATIBLE", "1")


# --- the notebook's folder, `sys.path`, `sys.argv` and environment --------------------------------


class Around:
    """Gives a rank the folder, `sys.path` and environment variables that the notebook has now.

    If code on the rank changes a value, the change usually stays until the notebook changes the
    same value. `__init__` sets `sys.path`, so the worker must make its own imports before:
    otherwise it might import a `random.py` from the notebook's folder.
    """

    def __init__(self, start: WorkerStart, worker_path: Sequence[str]) -> None:
        self._world = start.world
        self._worker_entries = [*worker_path] if start.world.own_path else []
        self._last_surroundings: Surroundings | None = None
        self._folder = os.getcwd()
        self._folder_here = start.world.cwd  # the notebook's folder, as a path on this machine
        self._missing_folder = ""  # the notebook's folder, if this rank could not change to it
        self._first_environ = dict(os.environ)
        self._environ_changes: Mapping[str, str | None] = {}
        self._path = self._path_with(start.world.sys_path)
        sys.path[:] = self._path
        sys.argv[:] = start.world.argv
        # A process that multiprocessing spawns gets a copy of `sys.path`. In this copy,
        # multiprocessing replaces an entry "" by the folder `ORIGINAL_DIR`.
        process.ORIGINAL_DIR = self._folder  # type: ignore[attr-defined]

    def follow(self, around: Surroundings | None) -> None:
        """Change this rank's folder, `sys.path` and environment variables to the notebook's.

        `around` has what the notebook has changed since the world's start. It is None if the
        notebook has changed nothing.
        """
        if around == self._last_surroundings and not self._missing_folder:
            return
        self._last_surroundings, world = around, self._world
        around = around or Surroundings(world.cwd, world.cwd)
        self._change_folder(around.folder, around.first)
        new_path = world.sys_path
        if around.sys_path is not None:
            new_path = tuple(moved_path(each, around.first, world.cwd) for each in around.sys_path)
        old_path, self._path = self._path, self._path_with(new_path)
        # If code on the rank has changed `sys.path`, keep the rank's own entries.
        is_own = sys.path != old_path
        sys.path[:] = merge_paths(sys.path, old_path, self._path) if is_own else self._path
        self._change_environ(around.environ)

    def _change_environ(self, changes: Mapping[str, str | None]) -> None:
        """Set or remove environment variables that the notebook has changed since the last call.

        `changes` has all of the notebook's changes since the world's start, with None for a removed
        variable. The notebook's value replaces a value that code on this rank has set. Only if
        libraries set the variable when they are imported (`SET_ON_IMPORT`), the rank's value stays.
        """
        last_changes, self._environ_changes = self._environ_changes, changes
        initial, absent = self._first_environ, object()
        changed = [
            n
            for n in {**last_changes, **changes}
            if changes.get(n, absent) != last_changes.get(n, absent)
        ]
        after = {name: changes.get(name, initial.get(name)) for name in changed}
        before = {
            name: last_changes.get(name, initial.get(name))
            if SET_ON_IMPORT.fullmatch(name)
            else os.environ.get(name)
            for name in changed
        }
        change_environ(before, after)

    def _path_with(self, path: Sequence[str]) -> list[str]:
        return [*path, *(entry for entry in self._worker_entries if entry not in path)]

    def _change_folder(self, folder: str, first: str) -> None:
        """Change to the notebook's folder if the notebook has changed its folder since last time.

        Also change to it if the folder of this rank was removed. `folder` is the notebook's folder
        now, and `first` its folder at the world's start. If this rank cannot change its folder, a
        line on stderr says why, once for each folder, and each later task tries again.
        """
        folder_here, current = moved_path(folder, first, self._world.cwd), _working_folder()
        if folder_here == self._folder_here and current is not None and not self._missing_folder:
            return  # stay in the present folder, even if code on the rank has changed to it
        target, why = next(filter(os.path.isdir, (folder_here, folder)), ""), ""
        if not target:
            why = f"{socket.gethostname()} has no folder {folder}: this rank stays in {current}"
        else:
            try:
                os.chdir(target)
            except OSError as error:
                why = f"this rank could not change to {target}: {error.strerror}"
        if why and folder != self._missing_folder:  # print the reason only once for each folder
            sys.stderr.write(f"{why}\n")
        self._missing_folder = folder if why else ""
        if why:
            return
        if current not in (self._folder, os.getcwd(), None):
            sys.stderr.write(f"this rank has left {current} for the notebook's folder {target}\n")
        self._folder_here = folder_here
        self._folder = process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]


def change_environ(before: Mapping[str, str | None], after: Mapping[str, str | None]) -> None:
    """Set the environment variables in `after`, and remove those that are None in `after`.

    If a variable now has another value than in `before`, code on this rank has changed the
    variable, and it keeps its value.
    """
    for name, value in after.items():
        if os.environ.get(name) != before.get(name):
            continue  # this rank has a value of its own
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def merge_paths(rank_path: Sequence[str], before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Return a rank's `sys.path` after the notebook's path has changed from `before` to `after`.

    Entries that the notebook has removed are left out. Entries that it has added at the front of
    its path go to the front of the rank's path, and all others that it has added go to the end.
    """
    new = [entry for entry in after if entry not in before and entry not in rank_path]
    old = next((at for at, entry in enumerate(after) if entry in before), len(after))
    new_in_front = [entry for entry in new if after.index(entry) < old]
    kept = [entry for entry in rank_path if entry in after or entry not in before]
    return [*new_in_front, *kept, *(entry for entry in new if entry not in new_in_front)]


def _working_folder() -> str | None:
    """Return the current working directory; None if the directory was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


# --- edited modules of the user -----------------------------------------------------------------

NBDIST_PREFIX = os.path.dirname(os.path.dirname(__file__)) + os.sep
CLOCKS = 2 * 10**9  # nanoseconds by which a file server's clock may be ahead of this machine's


@dataclass
class ModuleSource:
    """The file of an imported module of the user, with facts by which a later edit is noticed.

    `short_path` is the end of the file's path, from the outermost package on: `pkg/__init__.py`.
    `imported` is the file's modification time at the import, and `digest` is a digest of its
    contents. If the file may have been edited before nbdist computed the digest, `digest` is empty,
    and `imported` is the time at which the import began. `reported` is the modification time of the
    last edit that was reported to the user. All times are in nanoseconds since 1970.
    """

    file: str
    short_path: str
    imported: int
    digest: bytes
    reported: int = 0

    def is_edited(self, modified_ns: int) -> bool:
        """Return True if the file seems to have other contents than when it was imported.

        `modified_ns` is the file's modification time now, 0 if the file cannot be read.
        """
        if modified_ns in (0, self.imported):
            return False
        if self.digest and _digest_of(self.file) == self.digest:
            # The file was touched, or written again with equal contents.
            self.imported = modified_ns
            return False
        return True

    def record_reload(self, modified_ns: int) -> None:
        """Record that the module was reloaded from its file, which had this modification time."""
        self.imported, self.digest = modified_ns, _digest_of(self.file)


class OwnModules(MetaPathFinder):
    """Finds out which modules of the user were edited since their import, and can reload them.

    The object is also a finder in `sys.meta_path`, before Python's own finders. There it only
    records when each import begins, and leaves it to the other finders to find the module.
    """

    def __init__(self) -> None:
        # By module name, when an import began, in ns since 1970. `_find_edited` clears the table.
        self._import_starts: dict[str, int] = {}
        self._sources: dict[str, ModuleSource] = {}
        self._is_reloading = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Record when an import begins; Python calls this before it reads the module's file.

        Returns None, so that Python asks the next finders for the module.
        """
        self._import_starts[fullname] = time.time_ns()
        return None

    def pop_edited_files(self, before_ns: int, *, reloads: bool) -> tuple[str, ...]:
        """Return short paths of module files that were edited after their import, each edit once.

        Edits after `before_ns`, the time when the task began, are left to a later call.

        `reloads` says whether `%autoreload` is on. If it is on, the result is empty, because
        `%autoreload` reloads edited files. But it does not reload files that were edited before it
        was turned on: this method reloads these files in its first call with `reloads`.
        """
        if reloads and not self._is_reloading:
            self.reload(before_ns)
        self._is_reloading = reloads
        edited_files = []
        for source, modified_ns in self._find_edited(before_ns).values():
            if reloads:
                source.record_reload(modified_ns)
            elif modified_ns != source.reported:
                source.reported = modified_ns
                edited_files.append(source.short_path)
        return tuple(edited_files)

    def reload(self, before_ns: int) -> None:
        """Reload the modules that were edited before this time; print the error of a failed reload.

        As with `%autoreload`, functions and classes of the module are updated in place, so that
        other modules that have imported them use the new code.
        """
        for name, (source, modified_ns) in self._find_edited(before_ns).items():
            autoreload = import_module("IPython.extensions.autoreload")
            try:
                autoreload.superreload(sys.modules[name], old_objects={})
            except Exception:  # noqa: BLE001 (it is the user's code)
                print(f"[autoreload of {name} failed: {format_exc(10)}]", file=sys.stderr)  # noqa: T201
            source.record_reload(modified_ns)

    def forget_edited(self, is_own: Callable[[str], bool]) -> None:
        """Remove all modules of a script from `sys.modules` if one of them was edited.

        `is_own` returns True for the path of a file that belongs to the script. The script then
        imports all of its modules again: modules that were not edited may have imported objects
        from the edited one.
        """
        edited = self._find_edited(sys.maxsize)
        own_modules = [name for name, source in self._sources.items() if is_own(source.file)]
        if not edited.keys().isdisjoint(own_modules):
            for name in own_modules:
                del self._sources[name]
                sys.modules.pop(name, None)

    def _find_edited(self, before_ns: int) -> dict[str, tuple[ModuleSource, int]]:
        """Return the user's modules that were edited since their import, but not after `before_ns`.

        The result has, by the module's name, its `ModuleSource` and the time of the edit.
        """
        # `sys.modules` has modules in the order in which their imports ended. So a module comes
        # after the modules on which it depends, and is reloaded after them.
        for name in [*sys.modules] if self._import_starts else ():
            if (began_ns := self._import_starts.pop(name, None)) is None:
                continue
            spec = getattr(sys.modules.get(name), "__spec__", None)
            file = str(getattr(spec, "origin", ""))
            is_library = PACKAGES.match(file) or file.startswith(NBDIST_PREFIX)
            if file.endswith(".py") and not is_library:
                modified_ns = _modified_ns(file)
                # A file with a later modification time was changed after its import had begun.
                is_as_imported = modified_ns <= began_ns + CLOCKS
                digest = _digest_of(file) if is_as_imported else b""
                imported = modified_ns if is_as_imported else began_ns
                self._sources[name] = ModuleSource(file, _short_path(name, file), imported, digest)
        self._import_starts.clear()  # `sys.modules` has none of the remaining names
        times = {name: (each, _modified_ns(each.file)) for name, each in self._sources.items()}
        return {
            name: (each, modified_ns)
            for name, (each, modified_ns) in times.items()
            if modified_ns <= before_ns and each.is_edited(modified_ns)
        }


def _modified_ns(file: str) -> int:
    try:
        return os.stat(file).st_mtime_ns
    except OSError:  # the file was removed, or is being replaced
        return 0


def _digest_of(file: str) -> bytes:
    """Return a digest of a file's contents; empty if the file cannot be read."""
    try:
        with open(file, "rb") as opened:
            return blake2b(opened.read(), digest_size=16).digest()
    except OSError:
        return b""


def _short_path(module: str, file: str) -> str:
    """Return the end of a module's path, from its outermost package on."""
    parts = module.count(".") + 1 + (os.path.basename(file) == "__init__.py")
    return os.sep.join(file.split(os.sep)[-parts:])
