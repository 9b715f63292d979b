"""Tracebacks in parts: a user's own lines, and calls in libraries, which can be folded.  Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from nbdist.output.ansi import ansi_html, strip
from nbdist.output.wording import LINES, clip, dim
from nbdist.words import count

_FRAME = re.compile(
    r"(?:Cell |Input )?In ?\[|File |<ipython-input|(?:/|~/|\.\.?/)\S+(?::\d+)?,? in "
    r"|\[\.\.\. skipping"
)
_NEXT_ERROR = re.compile(r"During handling of the above|The above exception was the direct")
_LIBRARIES = (
    re.compile(r"(?:site|dist)-packages/([\w-]+)"),
    re.compile(r"lib/python\d[\d.]*/([\w-]+)"),
    re.compile(r"<frozen (\w+)"),
)
_ARROW = re.compile(r"-+> ?\d*")
_FEWEST_FOLDED = 3
_MOST_LIBRARIES = 3


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a traceback; `folded` says what they are where they need not be seen."""

    rows: tuple[str, ...]
    folded: str = ""

    @property
    def height(self) -> int:
        """How many rows are seen."""
        return 1 if self.folded else len(self.rows)


def parted(text: str) -> list[Part]:
    """Part a traceback: of three calls in libraries or more, one after the other, a folded one.

    The last call before an error is always seen: it raised it.
    """
    frames = [*_frames(text.split("\n"))]
    last = [
        number + 1 == len(frames) or bool(_NEXT_ERROR.match(strip(frames[number + 1][0])))
        for number in range(len(frames))
    ]
    kinds = [
        "" if is_last else _library(frame) for frame, is_last in zip(frames, last, strict=True)
    ]
    parts = []
    for in_library, run in groupby(zip(frames, kinds, strict=True), key=lambda pair: bool(pair[1])):
        pairs = [*run]
        rows = tuple(row for frame, _ in pairs for row in frame)
        is_long = in_library and len(pairs) >= _FEWEST_FOLDED
        parts.append(Part(rows, _label(kind for _, kind in pairs) if is_long else ""))
    return parts


def _frames(rows: Iterable[str]) -> Iterator[list[str]]:
    """Yield the rows of each call, and those before the first one."""
    frame: list[str] = []
    for row in rows:
        plain = strip(row)
        if frame and (_FRAME.match(plain) or _NEXT_ERROR.match(plain)):
            yield frame
            frame = []
        frame.append(row)
    yield frame


def _library(frame: list[str]) -> str:
    """Name the library that a call is in, "" for the user's own code."""
    head = strip(frame[0])
    if not _FRAME.match(head):
        return ""
    return next((found[1] for each in _LIBRARIES if (found := each.search(head))), "")


def _label(libraries: Iterable[str]) -> str:
    names = [*libraries]
    some = [*dict.fromkeys(names)]
    more = [] if len(some) <= _MOST_LIBRARIES else ["…"]
    return f"… {count(len(names), 'call')} in {', '.join([*some[:_MOST_LIBRARIES], *more])}"


def shortened(text: str, most: int) -> list[Part]:
    """Part it so that about `most` rows are seen: the first of the user's own, and the last."""
    parts = parted(text)
    if sum(part.height for part in parts) <= most + 1:
        return parts
    rows = [row for part in parts for row in ([part.folded] if part.folded else part.rows)]
    own = _own_line(rows)
    last = rows[-most:]
    first = [row for row in dict.fromkeys([rows[0], *own]) if row not in last]
    left = len(rows) - len(first) - len(last)
    return [Part((*first, f"… {left} lines …", *last))]


def _own_line(rows: list[str]) -> list[str]:
    """Find the first call, which is the cell's, and its line."""
    heads = [number for number, row in enumerate(rows) if _FRAME.match(strip(row))]
    if not heads:
        return []
    end = heads[1] if len(heads) > 1 else len(rows)
    arrows = [row for row in rows[heads[0] : end] if _ARROW.match(strip(row))]
    return [rows[heads[0]], *arrows[:1]]


def traceback_html(text: str, lines: int, width: int) -> str:
    """Write a coloured traceback in about so many lines, the calls in libraries folded."""
    return "".join(_part_html(part, width) for part in shortened(text, lines))


def _part_html(part: Part, width: int) -> str:
    body = ansi_html("\n".join(clip(row, width) for row in part.rows))
    html = f'<div style="{LINES}">{body}</div>'
    if not part.folded:
        return html
    return f'<details><summary style="cursor:pointer">{dim(part.folded)}</summary>{html}</details>'


def traceback_rows(text: str, lines: int) -> list[str]:
    """Write it as lines, of folded calls only how many they are."""
    return [
        row
        for part in shortened(text, lines)
        for row in ([part.folded] if part.folded else part.rows)
    ]
