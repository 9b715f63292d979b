"""Modules beside a script: imported anew where they were edited since the last run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress


class OwnModules:
    """Those that scripts have imported from their own folders, and the start of that run."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[str, float]] = {}
        self._started = 0.0
        self._before: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return f"<OwnModules {sorted(self._since)}>"

    def begin(self) -> None:
        """Before a script: forget all if one is newer, for they may import one another."""
        self._started = time.time()
        if any(_is_newer(file, since) for file, since in self._since.values()):
            for name in self._since:
                sys.modules.pop(name, None)
            self._since.clear()
        self._before = frozenset(sys.modules)

    def end(self, is_own: Callable[[str], bool]) -> None:
        """After it: remember what it has imported."""
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if name not in self._before and isinstance(file, str) and is_own(file):
                self._since[name] = (file, self._started)


def _is_newer(file: str, since: float) -> bool:
    with suppress(OSError):
        return os.stat(file).st_mtime > since
    return True  # it is gone, or was moved
