"""What cells of a worker find around them: folder, `sys.path`, `sys.argv` and environment.

They are the notebook's, and follow it from task to task; what a rank has changed itself stays.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from multiprocessing import process
from traceback import format_exc
from types import ModuleType

from nbdist.wire.files import moved_path
from nbdist.wire.spec import WorkerStart
from nbdist.wire.views import PACKAGES
from nbdist.wire.work import Surroundings


class Around:
    """Has this process follow the notebook's surroundings, as tasks say what they are."""

    def __init__(self, start: WorkerStart, own_path: Sequence[str]) -> None:
        """Give what cells run the notebook's `sys.path` and `sys.argv`.

        After the worker's own imports: a `random.py` in the notebook's folder is for them alone.
        """
        self._at_start = start.world
        self._own_path = [*own_path] if start.world.own_path else []
        self._told: Surroundings | None = None
        self._folder = os.getcwd()
        self._given = dict(os.environ)
        self._changes: Mapping[str, str | None] = {}
        self._path = self._path_with(start.world.sys_path)
        sys.path[:] = self._path
        sys.argv[:] = start.world.argv
        # What "" on the path is for processes that multiprocessing spawns.
        process.ORIGINAL_DIR = start.world.cwd  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"<Around {self._folder}>"

    def follow(self, around: Surroundings | None) -> None:
        """Change what is other in the notebook than it was told last; None for as at the start."""
        if around == self._told:
            return
        self._told, world = around, self._at_start
        around = around or Surroundings(world.cwd, world.cwd)
        self._go_to(around.folder, around.first)
        path = world.sys_path
        if around.sys_path is not None:
            path = tuple(moved_path(each, around.first, world.cwd) for each in around.sys_path)
        self._follow_path(self._path_with(path))
        self._follow_environ(around.environ)

    def _path_with(self, path: Sequence[str]) -> list[str]:
        return [*path, *(entry for entry in self._own_path if entry not in path)]

    def _go_to(self, folder: str, first: str) -> None:
        """Change to the folder, or to the one in its place on this machine."""
        places = [moved_path(folder, first, self._at_start.cwd), folder]
        there = next(filter(os.path.isdir, places), None)
        if there == self._folder or _folder_now() not in (self._folder, None):
            return
        if there is None:
            _say(
                f"{socket.gethostname()} has no folder {folder}: this rank stays in {_folder_now()}"
            )
            return
        try:
            os.chdir(there)
        except OSError as error:
            _say(f"this rank could not change to {there}: {error.strerror}")
            return
        self._folder = process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]

    def _follow_path(self, path: list[str]) -> None:
        before, self._path = self._path, path
        if sys.path == before:
            sys.path[:] = path
        elif path != before:  # this rank has entries of its own
            sys.path[:] = merged(sys.path, before, path)

    def _follow_environ(self, changes: Mapping[str, str | None]) -> None:
        """Have the variables that were changed, and those that are as at the start again."""
        before, self._changes = self._changes, changes
        for name in {**before, **changes}:
            at_start = self._given.get(name)
            if os.environ.get(name) != before.get(name, at_start):
                continue  # this rank has a value of its own
            value = changes.get(name, at_start)
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def merged(own: Sequence[str], before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Return a path that was `before` until this process changed it, with the notebook's changes.

    What is new goes to the front where the notebook has it before all that it had; else last.
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


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


# --- which of the user's own modules have been edited since this worker has imported them -----


OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep

CLOCKS = 2 * 10**9
"""Nanoseconds by which the clock of a file server may be ahead of this machine's."""


@dataclass
class Source:
    """A module's file, with its time when it was imported, and the last one that was told."""

    file: str
    imported: int
    told: int = 0


class OwnModules(MetaPathFinder):
    """Notes what is imported, also anew; finds nothing itself."""

    def __init__(self) -> None:
        self._begun: dict[str, int] = {}  # when, of those that have not been looked at
        self._sources: dict[str, Source] = {}
        self._is_reloading = False
        self.is_kept_in_step = False

    def __repr__(self) -> str:
        return f"<OwnModules {[*self._sources]}>"

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Note the time; called by the import system before it reads a module's file."""
        self._begun[fullname] = time.time_ns()
        return None

    def news(self, before: int, *, reloads: bool) -> tuple[str, ...]:
        """Name the files that were edited since, until this moment of `time.time_ns`; each once.

        A task asks at its end with the moment of its beginning.  Where `%autoreload` is on
        (`reloads`) none are: it has imported anew what was edited by then, but for what was
        before it was turned on, which is imported anew here.
        """
        self._take_new()
        if reloads and not self._is_reloading:
            for name in self._edited(before):
                reload_here(name)
            self._take_new()
        self._is_reloading = reloads
        told = []
        for name, edited in self._edited(before).items():
            source = self._sources[name]
            if reloads:
                source.imported = edited
            elif edited != source.told:
                source.told = edited
                told.append(source.file)
        return tuple(told)

    def keep_in_step(self) -> None:
        """Import anew what was edited, in the order in which it was first imported.

        A task of a world with `--sync-code` begins with that.
        """
        if self.is_kept_in_step:
            self._take_new()
            for name, edited in self._edited(time.time_ns()).items():
                reload_here(name)
                self._sources[name].imported = edited

    def _edited(self, before: int) -> dict[str, int]:
        """Name the modules that are not as their files are, with the times of these."""
        times = {name: _time_of(source.file) for name, source in self._sources.items()}
        imported = {name: source.imported for name, source in self._sources.items()}
        return {n: t for n, t in times.items() if t not in (0, imported[n]) and t <= before}

    def _take_new(self) -> None:
        """Take in what was imported since the last time, if it is the user's."""
        while self._begun:
            name, begun = self._begun.popitem()
            if file := _own_file(sys.modules.get(name)):
                edited = _time_of(file)
                # It may have been edited while the task still ran that has imported it.
                self._sources[name] = Source(file, edited if edited <= begun + CLOCKS else begun)


def reload_here(name: str) -> None:
    """Import a module anew, as `%autoreload` does: what was taken from it is the new one too."""
    autoreload = import_module("IPython.extensions.autoreload")
    try:
        autoreload.superreload(sys.modules[name], old_objects={})
    except Exception:  # noqa: BLE001 (it is the user's code)
        print(f"[autoreload of {name} failed: {format_exc(10)}]", file=sys.stderr)  # noqa: T201


def _own_file(module: object) -> str:
    """Name the file of a module, if it is the user's; else ""."""
    file = str(getattr(getattr(module, "__spec__", None), "origin", ""))
    is_other = PACKAGES.match(file) or file.startswith(OURS)
    return file if file.endswith(".py") and not is_other else ""


def _time_of(file: str) -> int:
    try:
        return os.stat(file).st_mtime_ns
    except OSError:  # it is gone, or being written
        return 0
