"""Has tqdm draw bars as text, which the notebook shows for each rank and keeps.

`tqdm.auto`, which most libraries use, takes widgets in every process that has loaded ipykernel,
where ipywidgets is installed.  A worker's widgets would never move: nobody relays what they say.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

CHOOSES = "tqdm.autonotebook"


class _TextBars(ModuleType):
    """Stands for the module that chooses; tqdm itself is imported when somebody asks."""

    def __getattr__(self, name: str) -> Any:
        if name in ("tqdm", "trange"):
            return getattr(import_module("tqdm.std"), name)
        raise AttributeError(f"module {CHOOSES!r} has no attribute {name!r}")


def draw_bars_as_text() -> None:
    """Have `tqdm.auto` and `tqdm.autonotebook` be `tqdm.std`; `tqdm.notebook` stays."""
    if CHOOSES not in sys.modules:
        bars = _TextBars(CHOOSES)
        bars.__spec__ = ModuleSpec(CHOOSES, None)
        sys.modules[CHOOSES] = bars
