"""What tests of scripts share; the fixture `write` is in `tests/conftest.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nbdist.output.ansi import strip
from nbdist.world.result import CellResult
from nbdist.world.running import RunningTask

Write = Callable[..., Path]


def said(result: CellResult | RunningTask) -> list[str]:
    """What each rank has written."""
    return [
        "\n".join(strip(line.text) for piece in track.pieces for line in piece.tail(1000))
        for track in result.transcript
    ]
