"""`nbdist.watch()`, in a loop whose steps are none of an optimizer; imports nothing."""

from __future__ import annotations

from collections.abc import Callable

watching: list[Callable[[], None]] = []
"""What wants to know of each step, while a cell with `--watch` runs in this process."""


def watch() -> None:
    """Count a step of a loop without an optimizer, for `%%distributed --watch model`.

    Does nothing where no cell with `--watch` runs, as in a script under torchrun.
    """
    for each in watching:
        each()
