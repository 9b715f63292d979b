"""Which of the user's own modules have been edited since this worker has imported them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from traceback import format_exc
from types import ModuleType

from nbdist.wire.places import PACKAGES

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
