"""Tests of `nbdist.world.calling`: a line that is written over, in a terminal alone."""

from __future__ import annotations

import io

from nbdist.output.screen import Screen
from nbdist.world.calling import REDRAW_SECONDS, MovingLine


class Terminal(io.StringIO):
    """What was written, as a terminal shows it."""

    def isatty(self) -> bool:
        return True

    @property
    def shown(self) -> list[str]:
        screen = Screen()
        screen.write("stdout", self.getvalue())
        return [line.text for line in screen.tail(9)]


class Tee:
    """What people put in the place of stdout: it can write, and nothing else."""

    def write(self, text: str) -> int:
        raise AssertionError(text)


def test_in_a_terminal() -> None:
    """It is one line however often it changes, and gone without a trace where others come."""
    terminal = Terminal()
    line = MovingLine(terminal)
    line.clear()
    assert terminal.getvalue() == ""
    line.show("[0-1] long 10%", 0.0)
    assert line.is_due(REDRAW_SECONDS)
    line.show("[0-1] 20%", REDRAW_SECONDS)
    assert terminal.shown == ["[0-1] 20%"]
    line.clear()
    terminal.write("a\n")
    line.show("[0-1] 30%", 2 * REDRAW_SECONDS)
    assert terminal.shown == ["a", "[0-1] 30%"]
    line.show("", 3 * REDRAW_SECONDS)
    assert terminal.shown == ["a"]


def test_not_too_often() -> None:
    """Between drawings there is some time; a line that was cleared is back at once."""
    terminal = Terminal()
    line = MovingLine(terminal)
    line.show("10%", 0.0)
    line.show("20%", REDRAW_SECONDS / 2)
    assert terminal.shown == ["10%"]
    assert not line.is_due(REDRAW_SECONDS / 2)
    line.clear()
    line.show("30%", REDRAW_SECONDS / 2)
    assert terminal.shown == ["30%"]


def test_in_a_log() -> None:
    """Nothing is written where nothing can be written over."""
    log = io.StringIO()
    for stream in (log, Tee()):
        line = MovingLine(stream)  # type: ignore[arg-type]
        assert not line.is_due(0.0)
        line.show("10%", 0.0)
        line.clear()
    assert log.getvalue() == ""
