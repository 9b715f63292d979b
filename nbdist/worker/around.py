"""What cells of a worker find around them: folder, `sys.path`, `sys.argv` and environment.

They are the notebook's, and follow it from task to task; what a rank has changed itself stays.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import process

from nbdist.wire.code_tree import moved_path
from nbdist.wire.start import WorkerStart
from nbdist.wire.task import Surroundings


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
