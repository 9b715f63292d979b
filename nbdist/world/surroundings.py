"""The notebook's folder, `sys.path` and environment after the workers' start.

Runs in the notebook's process; a task takes along what is not as it was then.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from nbdist.config import LOCAL, WorldConfig
from nbdist.errors import UsageError
from nbdist.wire.start import WorldSpec
from nbdist.wire.task import Surroundings
from nbdist.wire.worker_environ import NBDIST_SETS
from nbdist.words import count
from nbdist.world.spec import READ_AT_START, Here, copied, given_environ, path_for

Changes = Mapping[str, str | None]

SET_ON_IMPORT = re.compile(
    r"KMP_(DUPLICATE_LIB_OK|INIT_AT_FORK)|PYTORCH_NVML_BASED_CUDA_CHECK|TORCHINDUCTOR_CACHE_DIR"
    r"|QT_QPA_.*|PYDEVD_.*|WANDB_SERVICE|_.*"
)
"""Variables that sklearn, torch, Lightning, polars and others set: they are not mentioned."""

MOST_NAMES = 6
"""Variables that one line names."""


class NotebookSurroundings:
    """Compares the notebook's surroundings with those that the workers were described with."""

    def __init__(self, config: WorldConfig, spec: WorldSpec) -> None:
        self._config, self._spec = config, spec
        self._start = self._seen = Here.now()
        self._here: Surroundings | None = None
        self._said: Changes = {}
        self._note = ""
        # A notebook that takes a world over may be in another folder.
        if spec.cwd != self._start.cwd:
            self._here = Surroundings(self._start.cwd, spec.cwd)

    def __repr__(self) -> str:
        return f"<NotebookSurroundings {self._here}>"

    def now(self) -> Surroundings | None:
        """Return what is other than it was; None where nothing is."""
        seen = self._seen
        with suppress(FileNotFoundError):  # the folder was removed: the last one stays
            folder, path, environ = os.getcwd(), (*sys.path,), dict(os.environ)
            if (folder, path, environ) != (seen.cwd, seen.sys_path, seen.environ):
                self._seen = replace(seen, cwd=folder, sys_path=path, environ=environ)
                self._here = self._compare()
        return self._here

    def take_note(self) -> str:
        """Return a line about variables that have changed since it was last asked for; or ""."""
        said, self._note = self._note, ""
        return said

    def _compare(self) -> Surroundings | None:
        now, given, path = self._seen, self._given(), None
        if now.sys_path != self._start.sys_path:
            first = given.get("PYTHONPATH", "")
            path = path_for(now, first, is_foreign=self._spec.own_path)
        changes = changed(self._start.environ, now.environ)
        names = self._followed({**self._said, **changes}, {*NBDIST_SETS, *given})
        sent = {name: value for name, value in changes.items() if name in names}
        self._say(changes, names)
        if now.cwd == self._spec.cwd and path is None and not sent:
            return None
        return Surroundings(now.cwd, self._spec.cwd, path, sent)

    def _given(self) -> Mapping[str, str]:
        """Read what the options set on the workers."""
        with suppress(UsageError):  # the file of `--env-file` has gone
            return given_environ(self._config)
        return self._config.env

    def _followed(self, names: Iterable[str], own: Collection[str]) -> frozenset[str]:
        """Choose the variables that ranks are to have too, but for those of their `own`."""
        wanted = dict.fromkeys([name for name in names if name not in own], "")
        # What is right on this machine need not be on others.
        return frozenset(wanted if self._is_here else copied(self._config.copy_env or "", wanted))

    @property
    def _is_here(self) -> bool:
        return self._config.launched_by == LOCAL

    def _say(self, changes: Changes, names: Collection[str]) -> None:
        """Word the line about what has changed since the last one."""
        new = [name for name in {**self._said, **changes} if _differs(name, self._said, changes)]
        new = [name for name in new if not SET_ON_IMPORT.fullmatch(name)]
        self._said = changes
        restart = [name for name in new if name not in names or READ_AT_START.fullmatch(name)]
        followed = [name for name in new if name not in restart]
        texts = []
        if followed:
            texts.append(f"{_list(followed)} changed in the notebook, and on the ranks too")
        if restart:
            option = "" if self._is_here else f" --env {min(restart)}=..."
            texts.append(
                f"{_list(restart)} changed in the notebook after the workers started: "
                f"`%dist_restart{option}` gives it to them"
            )
        if texts:
            self._note = " · ".join(texts)


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables of `after` that differ, and None for those that it lacks."""
    found: dict[str, str | None] = {n: v for n, v in after.items() if before.get(n) != v}
    found.update(dict.fromkeys(before.keys() - after.keys()))
    return {name: value for name, value in found.items() if not name.startswith("NBDIST_")}


def _differs(name: str, before: Changes, after: Changes) -> bool:
    return (name in before, before.get(name)) != (name in after, after.get(name))


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in sorted(names)[:MOST_NAMES])
    left = len(names) - MOST_NAMES
    title = "environment variable" if len(names) == 1 else "environment variables"
    return f"{title} {shown}" + (f" and {count(left, 'other')}" if left > 0 else "")
