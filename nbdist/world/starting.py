"""What is said while workers are being started, where that takes long."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from nbdist.errors import count

if TYPE_CHECKING:
    from nbdist.world.world import World

QUIET_SECONDS = 2.0
"""Before that nobody wonders."""


def starting_texts(world: World) -> Iterator[str]:
    """Starts the workers; `starting 4 workers: 2 ready` when it takes long, and when that changes.

    Comes round without a word now and then, with "".
    """
    said, begun = "", time.monotonic()
    for up in world.starting():
        text = f"starting {count(world.size, 'worker')}: {_ready(up, world)}"
        is_due = time.monotonic() - begun >= QUIET_SECONDS and text != said
        if is_due:
            said = text
        yield text if is_due else ""


def show_on_terminal(texts: Iterable[str]) -> None:
    """Show the last of these in one line of stderr, which is gone at the end."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    shown = False
    try:
        for text in filter(None, texts):
            if is_terminal:
                shown = True
                sys.stderr.write(f"\r\x1b[K{text}")
                sys.stderr.flush()
    finally:
        if shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _ready(up: int, world: World) -> str:
    return f"{up} ready" if up < world.size else "forming their group"
