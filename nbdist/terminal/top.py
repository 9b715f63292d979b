"""Draws what runs again and again: `nbdist top`; with rich where it is installed, else without."""

from __future__ import annotations

import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from nbdist.terminal.looking import Worlds
from nbdist.terminal.picture import NONE, CpuMeter, as_lines, table, title
from nbdist.wire.seen import WorldSeen

Found = Sequence[tuple[WorldSeen, Mapping[int, float]]]
Draw = Callable[[Found], None]

STATE_STYLES = {"idle": "green", "busy": "blue", "dead": "red", "starting": "yellow"}
WHOLE_WIDTH = ("rank", "state", "pid", "device", "memory", "cpu", "gpu")
"""Columns that are not cut where a line is too long."""

LEAST_WIDTH = 8
"""Of the others."""

ON, OFF = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Another screen without a cursor, and back."""


def show_top(every: float, looks: int = 0) -> None:
    """Draw all worlds every `every` seconds, until `q` or Ctrl-C, or `looks` times."""
    worlds, meter = Worlds(), CpuMeter()
    try:
        with _drawing() as draw, _keys_at_once():
            number = 0
            while True:
                draw([(seen, meter.read(seen)) for seen in worlds.seen()])
                number += 1
                if number == looks:
                    return
                if quits_within(every):
                    return
    except KeyboardInterrupt:
        return
    finally:
        worlds.close()


@contextmanager
def _keys_at_once() -> Iterator[None]:
    """Have the terminal pass on a key as it is typed, and not show it."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def quits_within(seconds: float) -> bool:
    """Wait `seconds`; return True as soon as `q` is typed."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        time.sleep(seconds)
        return False
    end = time.monotonic() + seconds
    while select.select([sys.stdin], [], [], max(0.0, end - time.monotonic()))[0]:
        if os.read(sys.stdin.fileno(), 1) in (b"q", b"Q", b""):
            return True
    return False


@contextmanager
def _drawing() -> Iterator[Draw]:
    if not sys.stdout.isatty():
        yield _print
        return
    try:
        from rich.live import Live
    except ImportError:
        sys.stdout.write(ON)
        try:
            yield _redraw
        finally:
            sys.stdout.write(OFF)
            sys.stdout.flush()
        return
    with Live(screen=True, auto_refresh=False) as live:
        yield lambda found: live.update(rich_picture(found), refresh=True)


def _print(found: Found) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in [*as_lines(found, 10_000), ""]))
    sys.stdout.flush()


def _redraw(found: Found) -> None:
    """Draw over what is there, which does not flicker as a cleared screen would."""
    size = shutil.get_terminal_size()
    lines = [*as_lines(found, size.columns)][: size.lines - 1]
    text = "".join(f"{line}\x1b[K\r\n" for line in lines)
    sys.stdout.write(f"\x1b[H{text}\x1b[J")
    sys.stdout.flush()


def rich_picture(found: Found) -> Any:
    """Make tables of rich's."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if not found:
        return Text(NONE)
    parts: list[Any] = []
    for seen, cpu in found:
        parts.append(Text(title(seen), style="bold"))
        headings, *rows = table(seen, cpu) or [()]
        shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for heading, *column in zip(headings, *rows, strict=True):
            width = max(map(len, (heading, *column)))
            least = width if heading in WHOLE_WIDTH else min(width, LEAST_WIDTH)
            shown.add_column(heading, no_wrap=True, overflow="ellipsis", min_width=least)
        for row in rows:
            styles = [STATE_STYLES.get(text.partition(" ")[0], "") for text in row]
            shown.add_row(*(Text(text, style) for text, style in zip(row, styles, strict=True)))
        parts += [shown, Text("")]
    return Group(*parts)
