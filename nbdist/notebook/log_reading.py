"""Log files read from their ends, and not further than needed: here, or on other machines."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from nbdist.output.ansi import strip
from nbdist.wire.log_files import MOVED, LogPiece, earlier_file
from nbdist.wire.messages import GetLogs

BLOCK = 1 << 16
FAR_BLOCK = 1 << 20
"""Bytes that are read at once, here and of another machine's files."""

LONGEST = 1 << 14
"""Bytes of a line that are shown; of longer ones the last."""

Read = Callable[[int, int], bytes]
"""Reads bytes from a position on."""
Ask = Callable[[GetLogs], tuple[LogPiece, ...]]


def last_lines(file: Path, most: int, pattern: re.Pattern[str] | None = None) -> list[str]:
    """Read the last lines of a file, or the last that hold the pattern; none of a missing file."""
    return _last(_through_both(file), most, pattern)


def last_lines_there(
    piece: LogPiece, get: GetLogs, ask: Ask, most: int, pattern: re.Pattern[str] | None = None
) -> list[str]:
    """Do the same where another machine has the file; `piece` is its end, which `get` got."""
    one = replace(get, ranks=(piece.rank,), streams=(piece.stream,), most=FAR_BLOCK)
    return _last(_through_both_there(piece, one, ask), most, pattern)


def _last(lines: Iterator[bytes], most: int, pattern: re.Pattern[str] | None) -> list[str]:
    found: list[str] = []
    for line in lines:
        text = strip(line.decode("utf-8", "replace")).rstrip("\r")
        # What a progress bar has overwritten was never seen either.
        text = text.rpartition("\r")[2]
        if pattern is None or pattern.search(text):
            found.append(text)
            if len(found) == most:
                break
    return found[::-1]


# --- lines from the last to the first, also of the file with earlier ones --------------------


def _through_both(file: Path) -> Iterator[bytes]:
    earlier = earlier_file(file)
    yield from _own_lines(_lines_of(file), goes_on=earlier.exists())
    yield from _lines_of(earlier)


def _through_both_there(piece: LogPiece, get: GetLogs, ask: Ask) -> Iterator[bytes]:
    far = _FarFile(piece, get, ask)
    yield from _own_lines(_backwards(far.size, far.read, far.here), goes_on=piece.has_earlier)
    if piece.has_earlier and (pieces := ask(replace(get, earlier=True, end=None))):
        far = _FarFile(pieces[0], replace(get, earlier=True), ask)
        yield from _backwards(far.size, far.read, far.here)


def _own_lines(lines: Iterator[bytes], *, goes_on: bool) -> Iterator[bytes]:
    """Leave out the line that says where the earlier ones are."""
    moved = MOVED.encode()
    return (line for line in lines if not (goes_on and line.startswith(moved)))


def _lines_of(file: Path) -> Iterator[bytes]:
    try:
        opened = file.open("rb")
    except FileNotFoundError:
        return

    def read(position: int, size: int) -> bytes:
        opened.seek(position)
        return opened.read(size)

    with opened:
        yield from _backwards(opened.seek(0, os.SEEK_END), read)


def _backwards(size: int, read: Read, block: int = BLOCK) -> Iterator[bytes]:
    """Read lines from the last to the first, long ones cut at their beginning.

    `block` is how much is read at first.
    """
    position, rest, is_last = size, b"", True
    while position > 0:
        size, block = min(block, position), BLOCK
        position -= size
        first, *lines = (read(position, size) + rest).split(b"\n")
        if is_last and lines and not lines[-1]:
            lines.pop()  # the file ends with a newline
        is_last = False
        yield from reversed(lines)
        rest = first[-LONGEST:]
    if rest or not is_last:
        yield rest


class _FarFile:
    """A file of which one piece at a time is here."""

    def __init__(self, piece: LogPiece, get: GetLogs, ask: Ask) -> None:
        self.size = piece.start + len(piece.data)
        self._piece = piece
        self._get = get
        self._ask = ask

    def __repr__(self) -> str:
        return f"<_FarFile {self._piece.file} {self._piece.start}-{self.size}>"

    @property
    def here(self) -> int:
        """How much of its end is here."""
        return len(self._piece.data)

    def read(self, position: int, size: int) -> bytes:
        """Read what was there when its end was read; less where it is gone by now."""
        end, found = position + size, b""
        while end > position:
            if not self._piece.start < end <= self._piece.start + len(self._piece.data):
                pieces = self._ask(replace(self._get, end=end))
                if not pieces or not pieces[0].data:
                    break
                self._piece = pieces[0]
            first = max(position, self._piece.start)
            at = self._piece.start
            found = self._piece.data[first - at : end - at] + found
            end = first
        return found
